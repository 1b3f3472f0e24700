"""Manifests of `titanlite launch kubernetes`: each field and type as the operators' own models have
it.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from tests.launch.examples import EXAMPLES
from tests.support.processes import ROOT
from titanlite import exit_codes
from titanlite.cli import main as cli
from titanlite.cli.launch import prepare
from titanlite.config.errors import ConfigError
from titanlite.launch import kubernetes as launch_kubernetes
from titanlite.resolve.load import check_config

SNAPSHOTS = ROOT / "deploy" / "examples" / "kubernetes"
KINDS = ("PyTorchJob", "TrainJob")


def render(name: str, *flags: str) -> str:
    """Return the manifests of an example.

    As examples show them, the config has no defaults: a new key changes none.
    """
    flags = (
        *EXAMPLES[name].flags(),
        f"--job.dump_folder=/fsx/runs/{name}",
        "--launch.image=123456789012.dkr.ecr.us-east-1.amazonaws.com/titanlite:latest",
        '--launch.volumes={"fsx-claim" = "/fsx"}',
        "--launch.token_secret=hugging-face",
        "--model.tokenizer_path=/fsx/tokenizer/original/tokenizer.model",
        *flags,
    )
    job = prepare(list(flags))
    given = check_config(list(flags), training=False, defer=True)[0].to_toml(defaults=False)
    files = launch_kubernetes.files(job._replace(run=replace(job.run, toml=given)))
    return "".join(files.values()).replace(
        "# The resolved config", "# Without the defaults of a written job: the config", 1
    )


def examples() -> dict[str, str]:
    """Return all rendered examples by file name."""
    kinds = {
        f"llama3_1_8b_{kind.lower()}": render("llama3_1_8b", f"--launch.kind={kind}")
        for kind in KINDS[1:]
    }
    return {
        f"{name}.yaml": text
        for name, text in {**{name: render(name) for name in EXAMPLES}, **kinds}.items()
    }


def _open_api(value: Any, kind: str, place: str) -> list[str]:
    """Return misfits of a value and a type of kubeflow's or kubernetes' models, which name types in
    words.
    """
    import kubeflow.training.models
    import kubernetes.client.models

    plain = {"str": str, "int": int, "bool": bool, "object": object, "float": float}
    if kind in plain:
        fits = isinstance(value, plain[kind]) and (kind == "bool" or not isinstance(value, bool))
        return [] if fits else [f"{place}: {value!r} is not of type {kind}"]
    if kind.startswith("list["):
        if not isinstance(value, list):
            return [f"{place}: {value!r} is not a list"]
        return [
            bad
            for i, item in enumerate(value)
            for bad in _open_api(item, kind[5:-1], f"{place}[{i}]")
        ]
    if not isinstance(value, dict):
        return [f"{place}: {value!r} is not a table"]
    if kind.startswith("dict("):
        of = kind[5:-1].partition(", ")[2]
        return [bad for key, item in value.items() for bad in _open_api(item, of, f"{place}.{key}")]
    model = getattr(kubeflow.training.models, kind, None) or getattr(kubernetes.client.models, kind)
    names = {key: name for name, key in model.attribute_map.items()}
    unknown = [f"{place}: no field {key}" for key in value.keys() - names.keys()]
    known = [(key, item) for key, item in value.items() if key in names]
    return unknown + [
        bad
        for key, item in known
        for bad in _open_api(item, model.openapi_types[names[key]], f"{place}.{key}")
    ]


def _lost(value: Any, kept: Any, place: str) -> list[str]:
    """Return the places of an input that a model does not give back."""
    if isinstance(value, dict) and isinstance(kept, dict):
        return [bad for key in value for bad in _lost(value[key], kept.get(key), f"{place}.{key}")]
    if isinstance(value, list) and isinstance(kept, list) and len(value) == len(kept):
        return [
            bad
            for i, pair in enumerate(zip(value, kept, strict=True))
            for bad in _lost(*pair, f"{place}[{i}]")
        ]
    return (
        []
        if value == kept and type(value) is type(kept)
        else [f"{place}: {value!r} became {kept!r}"]
    )


def _trainer(value: dict[str, Any]) -> list[str]:
    import kubeflow_trainer_api.models as models

    try:
        model = getattr(models, f"TrainerV1alpha1{value['kind']}").from_dict(value)
    except ValueError as error:
        return [str(error)]
    return _lost(value, model.to_dict(), value["kind"])


def problems(text: str) -> list[str]:
    """Return all misfits of a manifest."""
    found = []
    for value in yaml.safe_load_all(text):
        match value["kind"]:
            case "TrainJob" | "TrainingRuntime":
                found += _trainer(value)
            case "PyTorchJob":
                found += _open_api(value, "KubeflowOrgV1PyTorchJob", value["kind"])
            case kind:
                found += _open_api(value, f"V1{kind}", kind)
    return found


def _skip_without(kind: str) -> None:
    package = {"PyTorchJob": "kubeflow-training", "TrainJob": "kubeflow-trainer-api"}[kind]
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: the manifest is not checked")


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_examples_are_what_the_command_writes() -> None:
    wanted = examples()
    stored = {file.name: file.read_text() for file in SNAPSHOTS.iterdir()}
    assert stored == wanted, "renew: python -m tests.launch.test_kubernetes --write"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_one_of_the_operator(kind: str) -> None:
    _skip_without(kind)
    flags = [
        f"--launch.kind={kind}",
        "--launch.namespace=ml",
        "--launch.queue=team",
        "--launch.time_limit=2-12",
    ]
    text = render("llama3_1_8b", *flags)
    assert problems(text) == []
    assert "activeDeadlineSeconds: 216000" in text
    assert 'kueue.x-k8s.io/queue-name: "team"' in text
    assert text.count('namespace: "ml"') == text.count("\nkind: ")
    # A misspelt field and a wrong type, near the root and deep in the pod.
    for right, wrong in [
        ("volumeMounts:", "volumeMount:"),
        ("terminationGracePeriodSeconds:", "terminationGracePeriod:"),
        ("terminationGracePeriodSeconds: 150", 'terminationGracePeriodSeconds: "150"'),
        ("readOnly: true", 'readOnly: "yes"'),
        *{
            "PyTorchJob": [
                ("minReplicas: 2", "minReplica: 2"),
                ("maxRestarts: 0", 'maxRestarts: "0"'),
            ],
            "TrainJob": [("failurePolicy:", "failPolicy:"), ("numNodes: 2", 'numNodes: "2"')],
        }[kind],
    ]:
        assert right in text and problems(text.replace(right, wrong)) != [], wrong


def test_the_kind_that_went_is_refused_with_the_one_to_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*EXAMPLES["llama3_1_8b"].flags(), "--launch.kind=HyperPodPyTorchJob", "--dry-run"]
    assert cli.main(["launch", "kubernetes", *words]) == exit_codes.CONFIG
    assert "launch.kind" in (said := capsys.readouterr().err)
    assert "take PyTorchJob, which HyperPod's clusters run, too" in said


def test_the_config_map_holds_the_resolved_config() -> None:
    _skip_without("PyTorchJob")
    flags = [
        "--job.config_file=llama3_1_8b.toml",
        "--launch.image=titanlite",
        "--launch.instance_type=p5.48xlarge",
    ]
    job = prepare([*flags, "--job.dump_folder=/fsx/a", '--launch.volumes={"fsx.claim" = "/fsx/"}'])
    text = launch_kubernetes.files(job)[launch_kubernetes.CONFIG_FILE]
    assert problems(text) == []
    assert yaml.safe_load(text)["data"]["config.toml"].rstrip() == job.run.toml.rstrip()


def test_pods_get_what_the_machines_have() -> None:
    pod = _pod(render("llama3_1_8b"))
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}
    plain = _pod(render("llama3_2_1b", "--launch.environment.NCCL_DEBUG=INFO"))["containers"][0]
    names = {one["name"]: one.get("value") for one in plain["env"]}
    assert plain["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert names["NCCL_DEBUG"] == "INFO"
    assert "FI_PROVIDER" not in names
    assert names["TITANLITE_RESTART_CODE"] == "138"
    cpu = _pod(render("llama3_2_1b", "--launch.cpu", "--launch.gpus_per_node=1"))
    assert cpu["containers"][0]["resources"] == {"requests": {"cpu": "1"}}
    assert "tolerations" not in cpu


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_pods_ask_for_cpus_and_memory(kind: str) -> None:
    _skip_without(kind)
    asked = [f"--launch.kind={kind}", "--launch.cpu_request=90", "--launch.memory_request=1000Gi"]
    text = render("llama3_2_1b", *asked)
    resources = _resources(yaml.safe_load_all(text))
    assert problems(text) == []
    wanted = {"requests": {"cpu": "90", "memory": "1000Gi"}, "limits": {"nvidia.com/gpu": "1"}}
    assert resources
    assert all(one == wanted for one in resources)
    on_cpus = render(
        "llama3_2_1b",
        *asked,
        "--launch.cpu",
        "--launch.gpus_per_node=1",
        "--launch.memory_request=",
    )
    assert {str(one) for one in _resources(yaml.safe_load_all(on_cpus))} == {
        "{'requests': {'cpu': '90'}}"
    }


def _resources(value: Any) -> list[Any]:
    """Return all values of the field `resources`, at any depth."""
    if isinstance(value, dict):
        inside = [one for item in value.values() for one in _resources(item)]
        return [value["resources"], *inside] if "resources" in value else inside
    return (
        [one for item in value for one in _resources(item)]
        if not isinstance(value, str | int | None)
        else []
    )


def _values(text: str, name: str) -> list[Any]:
    """Return the values of a field of this name in all documents."""

    def found(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            if name in value:
                yield value[name]
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                yield from found(item)

    return [one for document in yaml.safe_load_all(text) for one in found(document)]


def test_zero_asks_for_nothing() -> None:
    def pod(*flags: str) -> tuple[Any, Any]:
        text = render("llama3_2_1b", *flags)
        (container,) = _pod(text)["containers"]
        return container["resources"].get("requests"), _values(text, "emptyDir")[0]

    off = [f"--launch.{key}=0" for key in ("cpu_request", "memory_request", "shm_size")]
    assert pod(*off) == (None, {"medium": "Memory"})
    given = ["--launch.memory_request=7Gi", "--launch.shm_size=0.5Gi"]
    assert pod(*given)[0] == {"cpu": "2", "memory": "7Gi"}
    assert pod(*given)[1] == {"medium": "Memory", "sizeLimit": "0.5Gi"}


@pytest.mark.parametrize("kind", KINDS)
def test_labels_and_annotations_reach_the_job_its_job_set_and_its_pods(kind: str) -> None:
    _skip_without(kind)
    label = "kueue.x-k8s.io/priority-class"
    note = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    text = render(
        "llama3_1_8b",
        f"--launch.kind={kind}",
        "--launch.queue=team",
        f'--launch.labels={{"{label}" = "high"}}',
        f'--launch.annotations={{"{note}" = "a: {{}} rack"}}',
    )
    assert problems(text) == []
    found = _values(text, "metadata")
    (job,) = [one for one in found if one.get("labels", {}).get("kueue.x-k8s.io/queue-name")]
    marked = [one for one in found if one.get("labels", {}).get(label) == "high"]
    assert job in marked
    assert all(one["annotations"] == {note: "a: {} rack"} for one in marked)
    # The job and its pods; a TrainJob also has a job set.
    assert len(marked) == {"PyTorchJob": 2, "TrainJob": 3}[kind]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ('labels={"kueue.x-k8s.io/queue-name" = "q"}', "set launch.queue"),
        ("trainer_version=3.0", "launch.trainer_version"),
        ("shm_size=16GB", "launch.shm_size"),
    ],
)
def test_what_no_api_server_takes_is_refused(flag: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        render("llama3_1_8b", f"--launch.{flag}")
    assert words in str(error.value)


@pytest.mark.parametrize("key", ["cpu_request", "memory_request"])
@pytest.mark.parametrize("value", ["90 cores", "-1", "1GB", "1000gi", "1\n2"])
def test_a_request_that_is_no_quantity_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"launch.{key}"):
        render("llama3_1_8b", f"--launch.{key}={value}")


#: Fields of a TrainJob's spec in versions 2.0 and 2.1 of the trainer. Later ones have further
#: fields.
TRAINER_2_0 = {
    "runtimeRef",
    "trainer",
    "initializer",
    "labels",
    "annotations",
    "suspend",
    "managedBy",
}


def test_a_train_job_with_a_time_limit_has_the_fields_of_trainer_2_0() -> None:
    values = {
        one["kind"]: one.get("spec")
        for one in yaml.safe_load_all(_train_job("--launch.time_limit=2-12"))
    }
    assert values["TrainJob"].keys() <= TRAINER_2_0
    job_set = values["TrainingRuntime"]["template"]["spec"]
    (node,) = job_set["replicatedJobs"]
    assert node["template"]["spec"]["activeDeadlineSeconds"] == 216000
    (rule,) = job_set["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"
    assert "DeadlineExceeded" in rule["onJobFailureReasons"]
    assert "eadline" not in _train_job()


def test_a_train_job_of_trainer_2_2_has_the_time_limit_itself() -> None:
    _skip_without("TrainJob")
    limit = "--launch.time_limit=2-12"
    for version in ("2.2", "2.10"):
        text = _train_job(limit, f"--launch.trainer_version={version}")
        assert problems(text) == []
        runtime, job = (one["spec"] for one in list(yaml.safe_load_all(text))[1:])
        assert job["activeDeadlineSeconds"] == 216000
        assert "eadline" not in str(runtime)
    old = _train_job(limit, "--launch.trainer_version=2.1").partition("kind: TrainingRuntime")
    assert old[2] == _train_job(limit).partition("kind: TrainingRuntime")[2]


def _train_job(*flags: str) -> str:
    return render("llama3_1_8b", "--launch.kind=TrainJob", *flags)


def test_names_stay_texts_and_two_run_folders_have_two_jobs() -> None:
    flags = ["--launch.namespace=1234", "--launch.queue=on", "--launch.token_secret=null"]
    folders = ("/fsx/a/on", "/fsx/b/on")
    jobs = [
        list(yaml.safe_load_all(render("mathstral_7b", *flags, f"--job.dump_folder={f}")))
        for f in folders
    ]
    names = [{value["metadata"]["name"] for value in values} for values in jobs]
    assert len(names[0]) == len(names[1]) == 1
    assert names[0] != names[1]
    assert all(min(n)[:3] == "on-" for n in names)
    job = jobs[0][1]["metadata"]
    assert (job["namespace"], job["labels"]) == ("1234", {"kueue.x-k8s.io/queue-name": "on"})
    container = jobs[0][1]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
        "containers"
    ][0]
    assert container["envFrom"] == [{"secretRef": {"name": "null"}}]
    # One node needs no EFA.
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "FI_PROVIDER" not in {one["name"] for one in container["env"]}


def test_starts_without_a_new_step_end_the_job(tmp_path: Path) -> None:
    volume = f'--launch.volumes={{"claim" = "{tmp_path}"}}'
    flags = ["--launch.max_restarts=1", volume, f"--job.dump_folder={tmp_path}/run 1"]
    script = _pod(render("llama3_2_1b", *flags))["containers"][0]["args"][:4]

    def codes(host: str, count: int) -> list[int]:
        words = [*script, "sh", "-c", "exit 7"]
        env = {**os.environ, "HOSTNAME": host}
        return [subprocess.run(words, env=env, check=False).returncode for _ in range(count)]

    assert codes("a-worker-1", 4) == [7] * 4
    assert codes("a-worker-0", 2) == [7, 7]
    (tmp_path / "run 1" / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2}\n{"step": 12, "loss": 2}\n'
    )
    # A new step counts anew, and so does a start after the end of the job.
    assert codes("a-worker-0", 4) == [7, 7, 1, 7]


def test_relative_paths_of_data_are_named() -> None:
    flags = [
        "--job.config_file=llama3_1_8b.toml",
        "--launch.gpus_per_node=8",
    ]
    job = prepare([*flags, "--training.dataset_path=s3://bucket/text"])
    (warning,) = launch_kubernetes.warnings(job)
    assert "model.tokenizer_path" in warning


def _pod(text: str) -> dict[str, Any]:
    (job,) = (value for value in yaml.safe_load_all(text) if value["kind"] == "PyTorchJob")
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--launch.image="], "launch.image"),
        (["--job.dump_folder=/runs/a"], "'/runs/a' is not on a volume of the pods (/fsx)"),
        (["--job.dump_folder=fsx/a"], "is not on a volume"),
        (["--checkpoint.folder=/tmp/a"], "checkpoint.folder: '/tmp/a' is not on a volume"),
        (
            ["--checkpoint.folder=${A}/a", "--launch.environment.A=/tmp"],
            "checkpoint.folder: '/tmp/a' is not on a vol",
        ),
        (
            ["--training.dataset_path=/fsx/${NOT_THERE}", "--launch.token_secret="],
            "variable NOT_THERE",
        ),
        (["--launch.environment.WANDB_API_KEY=1"], "--from-literal=WANDB_API_KEY=…"),
        (['--launch.volumes={"fsx" = "fsx"}'], "is not a claim and a folder"),
        (["--training.tensor_parallel_degree=3"], "does not divide"),
    ],
)
def test_a_job_that_would_lose_its_checkpoints_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        render("llama3_1_8b", *flags)
    assert words in str(error.value)


if __name__ == "__main__" and "--write" in sys.argv:
    os.chdir(ROOT)
    SNAPSHOTS.mkdir(parents=True, exist_ok=True)
    for _name, _text in examples().items():
        (SNAPSHOTS / _name).write_text(_text)
