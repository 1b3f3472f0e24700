"""Jobs of `titanlite launch slurm` on a real Slurm of two nodes: each disturbance ends with the undisturbed weights."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.failures.runs import rows, unequal
from tests.launch.slurm_cluster import Cluster, cluster, missing
from tests.processes import ROOT, environment, python
from titanlite import exit_codes
from titanlite.runs.record import read_entries
from titanlite.utils import read_lines

STEPS = 12
FLAGS = [
    "debug_model.toml",
    f"--training.steps={STEPS}",
    "--training.seq_len=64",
    "--training.batch_size=2",
    "--metrics.log_freq=1",
    "--no-validation.enable",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=100",
    "--launch.nodes=2",
    "--launch.gpus_per_node=1",
    "--launch.cpu",
    "--job.callbacks=tests.launch.slow_steps:SlowSteps",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacks := missing():
        message = f"no Slurm here: {', '.join(lacks)} (apt-get install slurmctld slurmd slurm-client munge)"
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    with cluster(tmp_path_factory.mktemp("slurm")) as one:
        one.environment.update(environment())
        one.environment["PATH"] += ":/usr/sbin"
        yield one


def _submit(slurm: Cluster, folder: Path, *more: str) -> str:
    """Submit a job; return its number."""
    words = ["-m", "titanlite", "launch", "slurm", *FLAGS, f"--job.dump_folder={folder}", "--submit", *more]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=slurm.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1]


def _log(folder: Path, job: str) -> str:
    return (folder / "launch" / f"slurm-{job}.log").read_text()


def _until_step(folder: Path, step: int, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    file = folder / "metrics.jsonl"
    while not file.exists() or not any(row.get("step", 0) >= step for row in read_lines(file)):
        assert time.monotonic() < end, f"step {step} does not come"
        time.sleep(0.1)


def _completed(slurm: Cluster, folder: Path, job: str, restarts: int) -> None:
    assert slurm.wait(job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED") == "COMPLETED", _log(folder, job)
    assert slurm.field(job, "Restarts") == str(restarts)
    assert [row[0] for row in rows(folder)] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def undisturbed(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    job = _submit(slurm, folder)
    _completed(slurm, folder, job, restarts=0)
    assert "== the ranks ended with code 0" in _log(folder, job)
    return folder


def test_a_job_near_its_time_limit_saves_and_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = ["--training.steps=60", "--launch.time_limit=2:00", "--launch.notice_seconds=30"]
    job = _submit(slurm, folder, *flags)
    assert slurm.wait(job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", seconds=300) == "COMPLETED"
    assert int(slurm.field(job, "Restarts")) >= 1 and "SIGUSR1: stopping" in _log(folder, job)
    assert [row[0] for row in rows(folder)] == list(range(1, 61))  # none is lost, none comes twice


def test_a_preempted_job_goes_on_later(slurm: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = _submit(slurm, folder)
    _until_step(folder, 3)
    other = slurm.run("sbatch", "--parsable", "--partition=high", "--nodes=2", "--wrap=sleep 3", "-o/dev/null").strip()
    slurm.wait(other, "COMPLETED")
    _completed(slurm, folder, job, restarts=1)
    assert "SIGTERM: stopping" in _log(folder, job)
    assert unequal(undisturbed, folder, STEPS) == []


def test_a_lost_node_leads_to_a_new_start(slurm: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = _submit(slurm, folder, "--checkpoint.interval=4")
    _until_step(folder, 6)
    lost = slurm.daemons["n2"]
    lost.kill()
    lost.wait()
    for pid in _processes(f"SLURM_JOB_ID={job}", "SLURMD_NODENAME=n2"):
        os.kill(pid, signal.SIGKILL)
    slurm.wait(job, "PENDING", "FAILED", "COMPLETED", "NODE_FAIL")
    slurm.start_node("n2")
    _completed(slurm, folder, job, restarts=1)
    assert unequal(undisturbed, folder, STEPS) == []


def _processes(*variables: str) -> list[int]:
    """Return the processes that have these environment variables."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if set(variables) <= set(file.read_bytes().decode(errors="replace").split("\0")):
                found.append(int(file.parent.name))
    return found


def test_what_would_fail_again_is_not_started_again(slurm: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = _submit(slurm, folder, "--training.dataset_path=/nowhere/text.jsonl")
    assert slurm.wait(job, "FAILED", "COMPLETED") == "FAILED"
    assert f"code {exit_codes.CONFIG}" in _log(folder, job) and slurm.field(job, "Restarts") == "0"


def test_a_cancelled_job_saves_and_stays_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = _submit(slurm, folder, "--training.steps=1000")
    _until_step(folder, 3)
    slurm.run("scancel", job)
    assert slurm.wait(job, "CANCELLED", "FAILED", "COMPLETED") == "CANCELLED"
    time.sleep(6)  # a requeued job would be pending or running by now
    assert slurm.field(job, "JobState") == "CANCELLED" and slurm.field(job, "Restarts") == "0"
    end = time.monotonic() + 30
    while not any(entry.get("exit_code") == exit_codes.PREEMPTED for entry in read_entries(folder)):
        assert time.monotonic() < end, "the run was not saved"
        time.sleep(0.3)


def test_dry_run_writes_nothing_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    flags = ["llama3_8b.toml", f"--job.dump_folder={tmp_path / 'run'}", "--launch.instance_type=p5.48xlarge"]
    done = python("-m", "titanlite", "launch", "slurm", *flags, "--launch.nodes=4", "--dry-run")
    assert done.returncode == 0 and "FI_PROVIDER=efa" in done.stdout and "--nproc_per_node 8" in done.stdout
    assert not (tmp_path / "run").exists()
    refused = python("-m", "titanlite", "launch", "slurm", *flags, "--training.tensor_parallel_degree=3")
    assert refused.returncode == exit_codes.CONFIG and "does not divide" in refused.stderr
