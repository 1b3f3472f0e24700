"""Manifests of `titanlite launch kubernetes`: each field and type as the operators' own models have
it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from tests.launch.examples import EXAMPLES
from tests.support.processes import ROOT
from titanlite import exit_codes
from titanlite.cli.launch import prepare
from titanlite.config.errors import ConfigError
from titanlite.launch import kubernetes as launch_kubernetes
from titanlite.resolve.load import check_config

SNAPSHOTS = ROOT / "deploy" / "examples" / "kubernetes"
KINDS = ("PyTorchJob", "TrainJob")


def render(*flags: str, name: str = "llama3_1_8b") -> str:
    """Return the manifests of an example.

    As examples show them, the config has no defaults: a new key changes none.
    """
    words = [
        *EXAMPLES[name],
        f"--job.dump_folder=/fsx/runs/{name}",
        "--launch.image=123456789012.dkr.ecr.us-east-1.amazonaws.com/titanlite:latest",
        '--launch.volumes={"fsx-claim" = "/fsx"}',
        "--launch.token_secret=hugging-face",
        "--model.tokenizer_path=/fsx/tokenizer/original/tokenizer.model",
        *flags,
    ]
    job = prepare(words)
    given = check_config(words, training=False, defer=True)[0].to_toml(defaults=False)
    files = launch_kubernetes.files(job._replace(run=replace(job.run, toml=given)))
    return "".join(files.values()).replace(
        "# The resolved config", "# Without the defaults of a written job: the config", 1
    )


def examples() -> dict[str, str]:
    """Return all rendered examples by file name."""
    return {
        **{f"{name}.yaml": render(name=name) for name in EXAMPLES},
        "llama3_1_8b_trainjob.yaml": render("--launch.kind=TrainJob"),
    }


def fits(text: str) -> bool:
    """Return whether the operators' own models take each manifest and give it back whole."""
    import kubeflow.training
    import kubeflow_trainer_api.models

    client = kubeflow.training.ApiClient()
    for value in yaml.safe_load_all(text):
        kind = value["kind"]
        if kind in ("TrainJob", "TrainingRuntime"):
            model = getattr(kubeflow_trainer_api.models, f"TrainerV1alpha1{kind}")
            try:
                kept = model.from_dict(value).to_dict()
            except ValueError:
                return False
        else:
            name = {"PyTorchJob": "KubeflowOrgV1PyTorchJob", "ConfigMap": "V1ConfigMap"}[kind]
            kept = client.sanitize_for_serialization(client._ApiClient__deserialize(value, name))
        # 1 == True
        if json.dumps(kept, sort_keys=True) != json.dumps(value, sort_keys=True):
            return False
    return True


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_examples_are_what_the_command_writes():
    stored = {file.name: file.read_text() for file in SNAPSHOTS.iterdir()}
    assert stored == examples(), "run: python scripts/generate.py"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_one_of_the_operator(kind):
    pytest.importorskip(
        {"PyTorchJob": "kubeflow.training", "TrainJob": "kubeflow_trainer_api"}[kind]
    )
    text = render(
        f"--launch.kind={kind}",
        "--launch.namespace=ml",
        "--launch.queue=team",
        "--launch.time_limit=2-12",
        '--launch.labels={"a/b" = "high"}',
        '--launch.annotations={"a/c" = "a: {} rack"}',
        *GIVEN,
    )
    assert fits(text)
    assert "activeDeadlineSeconds: 216000" in text
    assert text.count('namespace: "ml"') == text.count("\nkind: ")
    # The job and its pods; a TrainJob also has a job set.
    marked = [one for one in _values(text, "metadata") if one.get("labels", {}).get("a/b")]
    assert len(marked) == {"PyTorchJob": 2, "TrainJob": 3}[kind]
    assert all(one["annotations"] == {"a/c": "a: {} rack"} for one in marked)
    assert any("kueue.x-k8s.io/queue-name" in one["labels"] for one in marked)
    # Versions before 2.2 of the trainer have no such field of the job, but of its job set.
    *_, job = yaml.safe_load_all(text)
    assert kind == "PyTorchJob" or "activeDeadlineSeconds" not in job["spec"]
    # A misspelt field and a wrong type, deep in the pod.
    for right, wrong in (
        ("volumeMounts:", "volumeMount:"),
        ("readOnly: true", 'readOnly: "yes"'),
    ):
        assert right in text and not fits(text.replace(right, wrong)), wrong


def test_a_train_job_fails_at_the_codes_that_come_again():
    """Each of titanlite's codes but those after which the same command continues."""
    (values,) = re.findall(r"values: \[([\d, ]+)\]", render("--launch.kind=TrainJob"))
    again = {exit_codes.ERROR, *exit_codes.FINAL} - {exit_codes.PREEMPTED, exit_codes.INTERRUPTED}
    assert {int(value) for value in values.split(", ")} == again


def test_the_config_map_holds_the_resolved_config():
    job = prepare(
        [
            "--job.config_file=llama3_1_8b.toml",
            "--launch.image=titanlite",
            "--launch.instance_type=p5.48xlarge",
            "--job.dump_folder=/fsx/a",
            '--launch.volumes={"fsx.claim" = "/fsx/"}',
        ]
    )
    text = launch_kubernetes.files(job)[launch_kubernetes.CONFIG_FILE]
    assert yaml.safe_load(text)["data"]["config.toml"].rstrip() == job.run.toml.rstrip()
    (warning,) = launch_kubernetes.warnings(job)
    assert "model.tokenizer_path" in warning


def _values(text: str, name: str) -> list[Any]:
    """Return the values of a field of this name in all documents, at any depth."""

    def found(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            if name in value:
                yield value[name]
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                yield from found(item)

    return [one for document in yaml.safe_load_all(text) for one in found(document)]


def _container(text: str) -> dict[str, Any]:
    """Return the container of a PyTorchJob's pods."""
    ((container,),) = _values(text, "containers")
    return container


ZERO = [f"--launch.{key}=0" for key in ("cpu_request", "memory_request", "shm_size")]
GIVEN = ["--launch.cpu_request=90", "--launch.memory_request=7Gi", "--launch.shm_size=0.5Gi"]
CPU = ["--launch.cpu", "--launch.gpus_per_node=1"]
GPU = {"limits": {"nvidia.com/gpu": "1"}}


@pytest.mark.parametrize(
    ("flags", "resources", "shared"),
    [
        ([], {"requests": {"cpu": "2"}, **GPU}, {"medium": "Memory"}),
        (ZERO, GPU, {"medium": "Memory"}),
        (
            GIVEN,
            {"requests": {"cpu": "90", "memory": "7Gi"}, **GPU},
            {"medium": "Memory", "sizeLimit": "0.5Gi"},
        ),
        (CPU, {"requests": {"cpu": "1"}}, {"medium": "Memory"}),
    ],
)
def test_pods_ask_for_what_the_machines_have(flags, resources, shared):
    machine = ["--launch.instance_type=g6e.4xlarge", "--launch.environment.NCCL_DEBUG=INFO"]
    text = render(*machine, *flags)
    container = _container(text)
    assert container["resources"] == resources
    assert _values(text, "emptyDir") == [shared]
    assert bool(_values(text, "tolerations")) == ("limits" in resources)
    names = {one["name"]: one.get("value") for one in container["env"]}
    assert (names["NCCL_DEBUG"], names["TITANLITE_RESTART_CODE"]) == ("INFO", "138")
    assert "FI_PROVIDER" not in names


def test_two_run_folders_have_two_jobs_and_one_node_needs_no_efa():
    texts = [render("--launch.nodes=1", f"--job.dump_folder=/fsx/{one}/on") for one in "ab"]
    names = [one["metadata"]["name"] for text in texts for one in yaml.safe_load_all(text)]
    assert len(set(names)) == 2 and all(name.startswith("on-") for name in names)
    assert _container(texts[0])["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_each_volume_has_a_name_of_its_own():
    claims = {"host-1": "/a", "/disk": "/disk", "a.b": "/b", "a-b": "/c", "config": "/d"}
    entries = ", ".join(f'"{source}" = "{path}"' for source, path in claims.items())
    text = render(f"--launch.volumes={{{entries}}}")
    claims["fsx-claim"] = "/fsx"
    (volumes,) = _values(text, "volumes")
    sources = {one["name"]: one for one in volumes}
    assert len(sources) == len(volumes) == 2 + len(claims)
    mounts = {one["mountPath"]: one["name"] for one in _container(text)["volumeMounts"]}
    for source, path in claims.items():
        volume = sources[mounts[path]]
        found = volume.get("hostPath", {}).get("path")
        assert source == (found or volume["persistentVolumeClaim"]["claimName"])


def test_starts_without_a_new_step_end_the_job(tmp_path):
    text = render(
        "--launch.max_restarts=1",
        f'--launch.volumes={{"claim" = "{tmp_path}"}}',
        f"--job.dump_folder={tmp_path}/run 1",
    )
    words = [*_container(text)["args"][:4], "sh", "-c", "exit 7"]

    def codes(host, count):
        env = {**os.environ, "HOSTNAME": host}
        return [subprocess.run(words, env=env).returncode for _ in range(count)]

    assert codes("a-worker-1", 4) == [7] * 4
    assert codes("a-worker-0", 2) == [7, 7]
    (tmp_path / "run 1" / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2}\n{"step": 12, "loss": 2}\n'
    )
    # A new step counts anew, and so does a start after the end of the job.
    assert codes("a-worker-0", 4) == [7, 7, 1, 7]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--launch.image="], "launch.image"),
        (["--job.dump_folder=/runs/a"], "'/runs/a' is not on a volume of the pods (/fsx)"),
        (
            ["--checkpoint.folder=${A}/a", "--launch.environment.A=/tmp"],
            "checkpoint.folder: '/tmp/a' is not on a vol",
        ),
        (
            ["--training.dataset_path=/fsx/${NOT_THERE}", "--launch.token_secret="],
            "variable NOT_THERE",
        ),
        (["--launch.environment.WANDB_API_KEY=1"], "--from-literal=WANDB_API_KEY=…"),
        (
            ['--launch.volumes={"fsx" = "fsx"}'],
            "is not a claim, or a path of the nodes, and a folder",
        ),
        (['--launch.volumes={"" = "/fsx"}'], "'' = '/fsx' is not a claim"),
        (
            [
                '--launch.volumes={"/disk" = "/fsx/a", "claim" = "/fsx"}',
                "--job.dump_folder=/fsx/a/b",
            ],
            "'/fsx/a/b' is not on a volume of the pods (/fsx)",
        ),
        (['--launch.labels={"kueue.x-k8s.io/queue-name" = "q"}'], "set launch.queue"),
        (["--launch.shm_size=16GB"], "launch.shm_size"),
        (["--launch.memory_request=1\n2"], "launch.memory_request"),
        (["--launch.kind=HyperPodPyTorchJob"], "take PyTorchJob, which HyperPod's clusters run"),
    ],
)
def test_a_job_that_cannot_work_or_would_lose_its_checkpoints_is_refused(flags, words):
    with pytest.raises(ConfigError) as error:
        render(*flags)
    assert words in str(error.value)


if __name__ == "__main__" and "--write" in sys.argv:
    os.chdir(ROOT)
    SNAPSHOTS.mkdir(parents=True, exist_ok=True)
    for _name, _text in examples().items():
        (SNAPSHOTS / _name).write_text(_text)
