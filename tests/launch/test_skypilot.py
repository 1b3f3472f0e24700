"""Tasks of `titanlite launch skypilot`: as SkyPilot's own loader reads them, and as processes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from tests.launch.examples import EXAMPLES
from tests.launch.slurm_jobs import LAUNCH, RUN, STEPS, processes, until_step
from tests.support.processes import ROOT, environment
from tests.support.train_runs import rows, unequal
from titanlite import exit_codes
from titanlite.config.errors import ConfigError
from titanlite.start.fit import check_config
from titanlite.tools.launch import skypilot as launch_skypilot
from titanlite.tools.launch.launch import LaunchError, prepare

SNAPSHOTS = ROOT / "deploy" / "examples" / "skypilot"
#: What SkyPilot read from the examples; `skypilot_loader.py` says how it is made.
READ = Path(__file__).parent / "skypilot_tasks.json"
BUCKET = '--launch.volumes={"s3://bucket/runs" = "/runs"}'
#: Example → its flags beside those of its machines.
FLAGS = {
    "llama3_1_8b": [
        BUCKET,
        "--launch.infra=aws/us-east-1",
        "--launch.environment.WANDB_API_KEY=key",
        "--checkpoint.enable_checkpoint",
        "--checkpoint.folder=s3://bucket/runs/llama3_1_8b/checkpoint",
    ],
    "mathstral_7b": [BUCKET, "--launch.spot", "--launch.image=registry/titanlite:latest"],
}


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def render(*flags: str) -> str:
    return launch_skypilot.files(prepare(list(flags)))[launch_skypilot.FILE]


def example(name: str) -> str:
    """Return an example, whose config has no defaults, as launched from /home/me/titanlite."""
    flags = [*EXAMPLES[name].flags(), f"--job.dump_folder=/runs/{name}", *FLAGS[name]]
    job = prepare(flags)
    given = check_config(flags, training=False, defer=True)[0].to_toml(defaults=False)
    text = launch_skypilot.files(job._replace(run=replace(job.run, toml=given)))
    return text[launch_skypilot.FILE].replace(f'"{ROOT}"', '"/home/me/titanlite"')


@pytest.mark.parametrize("name", FLAGS)
def test_examples_are_what_the_command_writes(name: str) -> None:
    """`python -m tests.launch.test_skypilot --write` writes them anew."""
    assert example(name) == (SNAPSHOTS / f"{name}.yaml").read_text()


def test_skypilot_itself_reads_the_examples() -> None:
    """Its loader read these very files: set SKYPILOT_PYTHON to a Python with it to ask it again."""
    known = json.loads(READ.read_text())
    files = sorted(SNAPSHOTS.glob("*.yaml"))
    if program := os.environ.get("SKYPILOT_PYTHON"):
        words = [program, Path(__file__).parent / "skypilot_loader.py", *files]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
        now = json.loads(done.stdout)
        assert now["tasks"] == known["tasks"]
    renew = "renew it as tests/launch/skypilot_loader.py says"
    hashes = {name: one["sha256"] for name, one in known["tasks"].items()}
    assert hashes == {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}, renew
    two, one = (known["tasks"][f"{name}.yaml"] for name in FLAGS)
    assert (two["nodes"], two["accelerators"]) == (2, {"H100": 8})
    assert (two["instance_type"], two["region"]) == ("p5.48xlarge", "us-east-1")
    assert two["mounts"] == {"/runs": ["s3://bucket/runs", "MOUNT_CACHED"]}
    assert two["secrets"] == ["WANDB_API_KEY"]
    assert "WANDB_API_KEY" not in two["variables"]
    assert two["workdir"] == "/home/me/titanlite"
    assert '-c constraints.txt -e ".[hf,s3,wandb]"' in two["setup"]
    assert not two["spot"]
    assert (one["nodes"], one["accelerators"], one["spot"]) == (1, {"A100-80GB": 8}, True)
    assert list(one["image"].values()) == ["docker:registry/titanlite:latest"]
    assert (one["workdir"], one["setup"]) == (None, None)
    for task in (one, two):
        assert task["recovery"]["max_restarts_on_errors"] == 0
        assert task["recovery"]["recover_on_exit_codes"] == [launch_skypilot.RESTART_CODE]


_TASK = [*RUN, *LAUNCH, "--checkpoint.interval=2"]


def _task(folder: Path, *flags: str) -> dict[str, Any]:
    """Return a task of two machines that share the folder."""
    volume = f'--launch.volumes={{"disk" = "{folder}"}}'
    return yaml.safe_load(render(*_TASK, volume, f"--job.dump_folder={folder}/run", *flags))


def _start(task: dict[str, Any], place: Path, rank: int, **more: str) -> subprocess.Popen[str]:
    """Run the script of a task as SkyPilot does on one of its machines."""
    home = place / f"home{rank}"
    home.mkdir(parents=True, exist_ok=True)
    variables = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    env = {**os.environ, **environment(), **task["envs"], **variables, **more}
    return subprocess.Popen(
        ["bash", "-c", task["run"]],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _end(machines: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        return [(one.wait(300), one.communicate()[0]) for one in machines]
    finally:
        for one in machines:
            one.kill()


@pytest.mark.slow
def test_two_machines_train_and_a_killed_rank_leads_to_the_code_that_recovers(
    tmp_path: Path, undisturbed: Path
) -> None:
    task = _task(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    task["run"] = task["run"].replace("--master_port 29500", f"--master_port {port}")
    mark = f"{tmp_path.name}-{os.getpid()}"
    slow = {"STEP_SECONDS": "0.3", "MARK": mark}
    first = [_start(task, tmp_path, rank, **slow) for rank in (0, 1)]
    until_step(tmp_path / "run", 4)
    (killed,) = processes(f"MARK={mark}", "RANK=1", "LOCAL_RANK=0")
    os.kill(killed, signal.SIGKILL)
    codes = {code for code, _ in _end(first)}
    assert codes == {launch_skypilot.RESTART_CODE}
    again = [_start(task, tmp_path, rank, STEP_SECONDS="0") for rank in (0, 1)]
    ends = _end(again)
    assert [code for code, _ in ends] == [0, 0], ends
    assert [row[0] for row in rows(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert unequal(undisturbed, tmp_path / "run", STEPS) == []


def test_three_ends_without_a_step_end_the_run_and_an_error_is_final(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python").write_text('#!/bin/sh\nexit "$CODE"\n')
    (programs / "python").chmod(0o755)
    task = _task(tmp_path)

    def code(rank: int, wanted: int, **more: str) -> int:
        path = f"{programs}:/usr/bin:/bin"
        # A folder of the task's own Python would come first.
        ((ended, _),) = _end(
            [_start(task, tmp_path, rank, CODE=str(wanted), **{"PATH": path, **more})]
        )
        return ended

    again = launch_skypilot.RESTART_CODE
    assert [code(1, again) for _ in range(5)] == [again] * 5
    assert code(0, 2) == 2
    assert [code(0, again) for _ in range(4)] == [again, again, again, 1]
    # The user starts it again, and it gets on.
    assert [code(0, again) for _ in range(3)] == [again] * 3
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 2, "loss": 1}\n')
    assert code(0, 0) == 0
    assert code(0, 0, SKYPILOT_NUM_NODES="3") == exit_codes.CONFIG
    gpus = yaml.safe_load(
        render(*_TASK, "--no-launch.cpu", "--launch.accelerator=H100", BUCKET, *_BUCKET_RUN)
    )
    ((ended, said),) = _end([_start(gpus, tmp_path, 1, SKYPILOT_NUM_GPUS_PER_NODE="4")])
    assert ended == exit_codes.CONFIG
    assert "this task is for 1 GPU per machine, and SkyPilot gave it 4" in said


_BUCKET_RUN = ["--job.dump_folder=/runs/a", "--checkpoint.folder=s3://bucket/runs/a"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--job.dump_folder=/elsewhere/a"], "job.dump_folder: '/elsewhere/a' ends with the mach"),
        (["--checkpoint.folder=checkpoint"], "checkpoint.folder: '/runs/a/checkpoint': a mounted"),
        (["--checkpoint.folder=/tmp/a", "--launch.nodes=1"], "'/tmp/a' ends with the machine"),
        (['--launch.volumes={"s3://b" = "runs"}'], "'s3://b' = 'runs' is not a bucket"),
        (['--launch.volumes={"s3://b" = "/$A"}'], "is not a bucket"),
        (["--no-launch.cpu"], "launch.accelerator: the kind of GPU is not known"),
        (["--launch.accelerator=H100"], "launch.accelerator: the machines have no GPUs"),
        (["--launch.time_limit=1:00:00"], "launch.time_limit: a task of SkyPilot has none"),
        (["--launch.queue=a"], "launch.queue: a task of SkyPilot has none"),
        (["--training.dataset_path=${NOT_THERE}"], "no environment variable NOT_THERE"),
        (["--training.dataset_path=https://a:b@host/x"], "training.dataset_path: the task shows"),
    ],
)
def test_a_task_that_cannot_work_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        render(*_TASK, BUCKET, *_BUCKET_RUN, *flags)
    assert words in str(error.value)


def test_without_a_checkout_an_image_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [*_TASK, BUCKET, *_BUCKET_RUN]
    with pytest.raises(ConfigError, match=r"launch\.image: nothing installs titanlite"):
        render(*flags)
    assert 'image_id: "docker:mine"' in render(*flags, "--launch.image=mine")


def test_a_task_is_submitted_as_a_managed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare([*_TASK, BUCKET, *_BUCKET_RUN])._replace(folder=tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(LaunchError, match="sky is not installed here"):
        launch_skypilot.submit(job)
    sky = tmp_path / "sky"
    sky.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/words\necho "Managed Job ID: 12"\n')
    sky.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "sky jobs logs 12" in launch_skypilot.submit(job)
    words = (tmp_path / "words").read_text().split()
    assert words == ["jobs", "launch", "--yes", "--detach-run", f"{tmp_path}/task.yaml"]


def test_values_of_secrets_are_in_no_file_and_reach_sky_by_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["--launch.environment.HF_TOKEN=", "--launch.environment.WANDB_API_KEY=planted-key"]
    job = prepare([*_TASK, BUCKET, *_BUCKET_RUN, *names])._replace(folder=tmp_path)
    text = launch_skypilot.files(job)[launch_skypilot.FILE]
    assert yaml.safe_load(text)["secrets"] == {"HF_TOKEN": None, "WANDB_API_KEY": None}
    assert "planted" not in text
    assert "--secret HF_TOKEN --secret WANDB_API_KEY" in launch_skypilot.advice(job)
    sky = tmp_path / "sky"
    sky.write_text(f'#!/bin/sh\necho "$HF_TOKEN $WANDB_API_KEY $@" >{tmp_path}/words\n')
    sky.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(LaunchError, match="HF_TOKEN has no value"):
        launch_skypilot.submit(job)
    monkeypatch.setenv("HF_TOKEN", "planted-token")
    assert "planted" not in launch_skypilot.submit(job)
    words = (tmp_path / "words").read_text().split()
    assert words[:2] == ["planted-token", "planted-key"]
    assert not any("planted" in word for word in words[2:])


if __name__ == "__main__" and "--write" in sys.argv:
    os.chdir(ROOT)
    SNAPSHOTS.mkdir(parents=True, exist_ok=True)
    for _name in FLAGS:
        (SNAPSHOTS / f"{_name}.yaml").write_text(example(_name))
