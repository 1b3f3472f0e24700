"""Jobs of `titanlite launch slurm`: as text, and on a real Slurm, where each disturbance ends with
the same weights.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import lost_nodes
from tests.launch.examples import EXAMPLES
from tests.launch.slurm_cluster import Cluster
from tests.launch.slurm_jobs import (
    ENDS,
    LAUNCH,
    RUN,
    STEPS,
    completed,
    lose,
    processes,
    read_log,
    submit,
    until_step,
    write,
)
from tests.support.processes import ROOT
from tests.support.train_runs import rows
from titanlite import exit_codes
from titanlite.cli import main as cli
from titanlite.cli.launch import prepare
from titanlite.config.errors import ConfigError
from titanlite.launch import slurm as launch_slurm
from titanlite.launch.job import limit_seconds
from titanlite.runs.attempts import read_entries

FOLDER = ROOT / "deploy" / "examples" / "slurm"


@pytest.fixture(scope="module")
def limited(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Submit a job that reaches its time limit while other tests run: Slurm looks for such jobs
    each 30 s.
    """
    folder = tmp_path_factory.mktemp("limited") / "run"
    # The notice may come up to a minute sooner than asked for, and a start takes long on a busy
    # machine.
    limits = [
        "--launch.time_limit=2:00",
        "--launch.notice_seconds=29",
        "--launch.environment.STEP_SECONDS=6",
    ]
    return folder, submit(slurm, folder, *limits, "--launch.queue=aside")


@pytest.mark.slow
@pytest.mark.usefixtures("limited")
def test_a_preempted_job_goes_on_later(slurm: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = submit(slurm, folder)
    until_step(folder, 3)
    other = slurm.run(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--wrap=sleep 1", "-o/dev/null"
    ).strip()
    slurm.wait(other, "COMPLETED")
    completed(slurm, folder, job, undisturbed)
    assert "SIGTERM: stopping" in read_log(folder, job)
    assert slurm.field(job, "Restarts") == "1"


@pytest.mark.slow
def test_a_lost_node_leads_to_a_new_start(
    slurm: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = submit(slurm, folder, "--checkpoint.interval=2")
    until_step(folder, 3)
    lose(slurm, "n2", job, silently=False)
    slurm.wait(job, "PENDING", "NODE_FAIL", *ENDS)
    slurm.start_node("n2")
    completed(slurm, folder, job, undisturbed)
    assert f"job {job} failed after" in (folder / "launch" / "failures.log").read_text()


@pytest.mark.soak
def test_the_tasks_of_a_job_array_do_one_run_after_the_other(
    slurm: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    """The first task is asked to stop: it alone waits for a further start, while the second one
    goes on.
    """
    folder = tmp_path / "run"
    write(slurm, folder, "--launch.environment.STEP_SECONDS=0.2")
    job = slurm.run(
        "sbatch", "--parsable", "--array=0-1%1", str(folder / "launch" / "job.sbatch")
    ).strip()
    until_step(folder, 3)
    slurm.run("scancel", "--batch", "--signal=USR1", f"{job}_0")
    slurm.wait(f"{job}_1", "COMPLETED")
    completed(slurm, folder, f"{job}_0", undisturbed)
    assert [slurm.field(f"{job}_{task}", "Restarts") for task in (0, 1)] == ["1", "0"]
    assert "SIGUSR1: stopping" in read_log(folder, slurm.field(f"{job}_0", "JobId"))


@pytest.mark.slow
def test_another_allocation_than_the_job_was_written_for_is_refused_at_once(
    slurm: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    write(slurm, folder)
    script = folder / "launch" / "job.sbatch"
    for_gpus = tmp_path / "gpus.sbatch"  # as edited for a cluster that does not know its GPUs
    lines = _render(*RUN, *LAUNCH, "--no-launch.cpu", f"--job.dump_folder={folder}").splitlines(
        keepends=True
    )
    for_gpus.write_text("".join(line for line in lines if not line.startswith("#SBATCH --gpus")))
    slurm.environment |= {
        "SLURM_GPUS_ON_NODE": "0",
        "SLURM_NTASKS": "7",
    }  # 7: of a job that submits this one
    try:
        jobs = {
            slurm.run("sbatch", "--parsable", "--partition=spares", *words).strip(): said
            for words, said in {
                ("--nodes=1", str(script)): "for 2 nodes, and Slurm gave it 1",
                ("--ntasks-per-node=2", str(script)): "for one task per node, and Slurm gave it 2",
                (str(for_gpus),): "for 1 GPU per node, and Slurm gave it 0",
            }.items()
        }
    finally:
        del slurm.environment["SLURM_GPUS_ON_NODE"], slurm.environment["SLURM_NTASKS"]
    for job, said in jobs.items():
        assert slurm.wait(job, *ENDS) == "FAILED"
        assert said in read_log(folder, job)
        assert slurm.field(job, "ExitCode") == f"{exit_codes.CONFIG}:0"
        assert slurm.field(job, "Restarts") == "0"
        assert "srun" not in read_log(folder, job)
    words = ["srun", "--partition=spares", "--nodes=2", "bash", str(script)]
    done = subprocess.run(words, env=slurm.environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == exit_codes.CONFIG
    assert "error: srun cannot run this script" in done.stderr


@pytest.mark.soak
def test_three_notices_before_the_first_step_end_the_job(slurm: Cluster, tmp_path: Path) -> None:
    """They come before and while the ranks' Python starts, and just before the first step.

    None is lost. A start whose record began before its notice counts like the others.
    """
    folder = tmp_path / "run"
    # A fast machine comes to its first step, or to the last, before the notice.
    job = submit(slurm, folder, "--launch.environment.START_SECONDS=300")
    for start, (sign, delay) in enumerate([("", 0.0), ("", 1.0), ("a fresh run", 0.0)]):
        slurm.wait(job, "RUNNING")
        _until_logged(folder, job, f"restart {start},")
        _until_logged(folder, job, sign)
        time.sleep(delay)
        slurm.run("scancel", "--batch", "--signal=USR1", job)
        slurm.wait(job, "PENDING", *ENDS)
    assert slurm.wait(job, *ENDS) == "FAILED"
    assert slurm.field(job, "ExitCode") == f"{exit_codes.PREEMPTED}:0"
    log = read_log(folder, job)
    assert slurm.field(job, "Restarts") == "2"
    assert log.count("with code 5") + log.count("before the ranks") == 3
    assert "after no step, for the third time" in log
    assert "launch.notice_seconds" in log
    assert (folder / "attempts.jsonl").exists()
    assert not (folder / "metrics.jsonl").exists()


def _until_logged(folder: Path, job: str, words: str) -> None:
    end = time.monotonic() + 300
    while not _has_log(folder, job) or words not in read_log(folder, job):
        assert time.monotonic() < end, f"the job's log does not say {words!r}"
        time.sleep(0.05)


def _has_log(folder: Path, job: str) -> bool:
    return (folder / "launch" / f"slurm-{job}.log").exists()


@pytest.mark.slow
def test_a_killed_only_rank_starts_again_on_its_node_and_only_the_user_can_read_the_log(
    slurm: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    umask = os.umask(0o022)
    try:
        job = submit(slurm, folder, "--launch.nodes=1", "--checkpoint.interval=2")
    finally:
        os.umask(umask)
    until_step(folder, 4)
    (rank,) = processes(f"SLURM_JOB_ID={job}", "RANK=0", "LOCAL_RANK=0")
    os.kill(rank, signal.SIGKILL)
    assert slurm.wait(job, *ENDS) == "COMPLETED", read_log(folder, job)
    assert slurm.field(job, "Restarts") == "0"
    assert "ended with code 137" in read_log(folder, job)
    assert read_log(folder, job).count("== start 1 on the same nodes") == 1
    assert [row[0] for row in rows(folder)] == list(range(1, STEPS + 1))
    launch = folder / "launch"
    modes = {file.name: file.stat().st_mode & 0o777 for file in [launch, *launch.iterdir()]}
    names = ("config.toml", "job.sbatch", "failures.log", f"slurm-{job}.log")
    assert modes == {"launch": 0o700, **dict.fromkeys(names, 0o600)}


@pytest.mark.soak
@pytest.mark.parametrize("moment", [0, 1])
def test_a_spare_node_replaces_one_that_is_lost_without_the_queue(
    moment: int, slurm: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    """In a save and in a step, with its disk: the other node has a copy of its part."""
    wanted = lost_nodes.MOMENTS[moment]
    loss = lost_nodes.lose_one(slurm, tmp_path, wanted, undisturbed)
    # As `Held` stops there.
    assert (loss.done, loss.resumed) == {"save": (8, 4), "step": (10, 8)}[wanted.kind]
    assert 0 < loss.ended <= loss.started < loss.stepped < 300
    assert loss.told == pytest.approx(loss.stepped, abs=5)


@pytest.mark.slow
def test_a_job_near_its_time_limit_saves_and_goes_on(
    slurm: Cluster, undisturbed: Path, limited: tuple[Path, str]
) -> None:
    folder, job = limited
    completed(slurm, folder, job, undisturbed)
    assert "SIGUSR1: stopping" in read_log(folder, job)
    assert int(slurm.field(job, "Restarts")) >= 1


@pytest.mark.soak
def test_a_stopped_and_a_cancelled_job_save_and_stay_so(slurm: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = submit(slurm, folder)
    until_step(folder, 3)
    slurm.run("scontrol", "update", f"JobId={job}", "Requeue=0")
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert slurm.wait(job, *ENDS) == "FAILED"
    assert slurm.field(job, "ExitCode") == "5:0"
    stopped = rows(folder)[-1][0]
    again = slurm.run("sbatch", "--parsable", str(folder / "launch" / "job.sbatch")).strip()
    until_step(folder, stopped + 1)
    slurm.run("scancel", again)
    assert slurm.wait(again, *ENDS) == "CANCELLED"
    assert slurm.field(job, "Restarts") == "0"
    end = time.monotonic() + 300
    while len(ends := [e["exit_code"] for e in read_entries(folder) if e["event"] == "end"]) < 2:
        assert time.monotonic() < end, "the cancelled run was not saved"
        time.sleep(0.3)
    assert ends == [exit_codes.PREEMPTED] * 2
    time.sleep(1)
    assert slurm.field(again, "JobState") == "CANCELLED"


def _render(*flags: str) -> str:
    return launch_slurm.files(prepare(list(flags)))[launch_slurm.FILE]


def _example(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Render an example as on a cluster whose shared folder has a checkout and its virtual
    environment. A name may end with _spare: with one spare node.
    """
    model = name.removesuffix("_spare")
    monkeypatch.setattr(Path, "cwd", lambda: Path("/fsx/titanlite"))
    monkeypatch.setattr(sys, "executable", "/fsx/titanlite/.venv/bin/python")
    flags = [
        "--launch.shared_dir=/fsx",
        f"--job.dump_folder=/fsx/runs/{name}",
        "--launch.time_limit=2-0",
    ]
    if name != model:
        flags.append("--launch.spare_nodes=1")
    return _render(*EXAMPLES[model].flags(), *flags)


#: The job of each model, and one with a spare node.
_STORED = [*EXAMPLES, "llama3_1_8b_spare"]


@pytest.mark.parametrize("name", _STORED)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python tests/launch/test_slurm.py --write` writes them anew."""
    assert _example(name, monkeypatch) == (FOLDER / f"{name}.sbatch").read_text()


def test_a_container_mounts_the_shared_folder_and_starts_python_of_its_own() -> None:
    flags = [
        *EXAMPLES["llama3_1_8b"].flags(),
        "--job.dump_folder=/fsx/runs/8b",
        "--launch.shared_dir=/fsx",
    ]
    text = _render(
        *flags, "--launch.image=/fsx/my image.sqsh", "--launch.environment.NCCL_DEBUG=it's on"
    )
    mounts, image, variables = (re.search(f"^{pattern}", text, re.M) for pattern in _CONTAINER)
    assert mounts
    assert set(mounts[1].split(",")) == {"/fsx:/fsx", f"{ROOT}:{ROOT}"}
    assert image
    assert variables
    assert "exec python -m" in text
    assert "export NCCL_DEBUG='it'\"'\"'s on'" in text


_FOLDERS = [
    "--launch.gpus_per_node=8",
    "--launch.shared_dir=/fsx",
    "--job.dump_folder=/fsx/run",
    "--checkpoint.enable_checkpoint",
]
_IMAGE = "--launch.image=/fsx/my image.sqsh"
_CONTAINER = (
    r"mounts=(.*)",
    r"options.*--container-image='/fsx/my image.sqsh' ",
    r"variables=\S*,NCCL_DEBUG ",
)


@pytest.mark.parametrize(
    ("flags", "key", "text"),
    [
        (["--launch.instance_type=p5.48xl"], "launch.instance_type", "p5.48xlarge"),
        ([], "launch.gpus_per_node", "not known"),
        (
            ["--launch.instance_type=ml.p5.48xlarge", "--launch.gpus_per_node=16"],
            "launch.gpus_per_node",
            "has 8 GPU",
        ),
        (["--launch.environment.HF_TOKEN=(removed)"], "launch.environment.HF_TOKEN", "secret"),
        (["--launch.environment.A-B=1"], "launch.environment.A-B", "digits"),
        (
            ["--experimental.enable_compiled_autograd"],
            "experimental.enable_compiled_autograd",
            "compiled autograd",
        ),
        (
            ["--launch.gpus_per_node=8", "--training.tensor_parallel_degree=3"],
            "tensor_parallel_degree",
            "divide",
        ),
        (
            ["--launch.gpus_per_node=8", "--launch.shared_dir=/fsx"],
            "job.dump_folder",
            "/fsx: not all machines",
        ),
        (
            [*_FOLDERS, "--checkpoint.folder=/tmp/x"],
            "checkpoint.folder",
            "outside of launch.shared_dir",
        ),
        (
            [*_FOLDERS, "--launch.shared_dir=", _IMAGE, "--checkpoint.folder=/x"],
            "checkpoint.folder",
            "the container's",
        ),
        (
            ["--launch.gpus_per_node=8", "--launch.time_limit=0:03:59"],
            "launch.notice_seconds",
            "120 s",
        ),
    ],
)
def test_a_job_that_cannot_work_is_refused(flags: list[str], key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){key}: .*{text}"):
        _render("--job.config_file=llama3_8b.toml", *flags)


def test_variables_of_a_job() -> None:
    flags = ["--job.config_file=llama3_8b.toml", "--launch.instance_type=ml.p5.48xlarge"]
    text = _render(*flags, "--launch.environment.TORCH_ELASTIC_SHUTDOWN_TIMEOUT=60")
    assert re.findall("SHUTDOWN_TIMEOUT=(.*)", text) == ["60"]
    assert "export FI_" not in text
    assert "gpus-per-node=8" in text
    assert "export FI_EFA_USE_DEVICE_RDMA=1" in _render(*flags, "--launch.nodes=2")


def test_a_time_limit_is_read_as_slurm_does() -> None:
    seconds = {"": None, "1:30": 90, "01:30:00": 5400, "2:00:00": 7200}
    seconds |= {"1-0": 86400, "2-00": 172800, "1-2:30": 95400, "0-0:00:07": 7}
    assert {text: limit_seconds(text) for text in seconds} == seconds


def test_a_dry_run_prints_the_job_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "llama3_8b.toml",
        f"--job.dump_folder={tmp_path / 'run'}",
        "--launch.gpus_per_node=8",
        "--launch.nodes=2",
    ]
    assert cli.main(["launch", "slurm", *flags, "--dry-run"]) == exit_codes.DONE
    said = capsys.readouterr()
    assert "#SBATCH --nodes=2\n" in said.out
    assert not (tmp_path / "run").exists()
    assert said.err == ""
    launch = tmp_path / "run" / "launch"
    launch.mkdir(parents=True, mode=0o755)
    assert (
        cli.main(["launch", "slurm", *flags, "--no-checkpoint.enable_checkpoint"])
        == exit_codes.DONE
    )
    assert "begins at step 0" in capsys.readouterr().err
    assert (launch / "job.sbatch").stat().st_mode & 0o777 == 0o600
    assert (
        launch.stat().st_mode & 0o777 == 0o700
    )  # Slurm's log in it has the mode of the submitting shell at first


if __name__ == "__main__" and "--write" in sys.argv:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for one in _STORED:
        with pytest.MonkeyPatch.context() as patch:
            (FOLDER / f"{one}.sbatch").write_text(_example(one, patch))
