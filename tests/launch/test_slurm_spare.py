"""Jobs of `titanlite launch slurm` with spare nodes, or with fewer than they ask for."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import lost_nodes
from tests.launch.slurm_cluster import Cluster
from tests.launch.slurm_jobs import (
    LAUNCH,
    RUN,
    completed,
    freeze,
    lose,
    read_log,
    submit,
    until_step,
)
from tests.support.tiny import TWO_LAYERS
from titanlite import exit_codes
from titanlite.cli import main as cli
from titanlite.cli.launch import prepare
from titanlite.launch import slurm as launch_slurm


@pytest.mark.soak
def test_a_job_whose_first_node_is_lost_goes_back_into_the_queue(
    slurm: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    """Slurm itself leaves such a job running, without its script and without ranks."""
    folder = tmp_path / "run"
    spares = ["--launch.spare_nodes=1", "--launch.queue=spares", "--checkpoint.interval=2"]
    job = submit(slurm, folder, *spares, "--launch.environment.STEP_SECONDS=0.3")
    until_step(folder, 5)
    first = slurm.field(job, "BatchHost")
    try:
        lose(slurm, first, job)
        completed(slurm, folder, job, undisturbed)
    finally:
        slurm.start_node(first)
    assert slurm.field(job, "Restarts") == "1"
    assert f"== node {first} is lost, and the script with it" in read_log(folder, job)


@pytest.mark.soak
def test_a_node_lost_before_the_first_step_is_replaced_and_one_more_leads_to_the_queue(
    slurm: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = _submit_held(slurm, folder, "data:1", "--checkpoint.interval=2")
    first, lost = _placed(folder, job)[0]
    lose(slurm, lost, job)
    until_step(folder, 5)
    assert slurm.field(job, "Restarts") == "0"
    again, spare = _placed(folder, job)[1]
    assert again == first and spare not in (first, lost)
    lose(slurm, spare, job)
    slurm.wait(job, "PENDING")
    assert "== 1 healthy nodes are too few: the job needs 2" in read_log(folder, job)
    slurm.start_node(lost)
    slurm.start_node(spare)
    completed(slurm, folder, job, undisturbed)
    assert slurm.field(job, "Restarts") == "1"


@pytest.mark.soak
def test_a_node_that_hangs_is_replaced_by_the_spare_one(
    slurm: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    """All its processes stop, with Slurm's daemon, as on a machine that is stuck."""
    folder = tmp_path / "run"
    limits = ["--comm.train_timeout_seconds=30", "--checkpoint.interval=4"]
    job = _submit_held(slurm, folder, "backward:7", *limits)
    first, stuck = _placed(folder, job)[0]
    frozen = freeze(slurm, stuck, job)
    try:
        completed(slurm, folder, job, undisturbed)
    finally:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        slurm.start_node(stuck)
    assert slurm.field(job, "Restarts") == "0"
    assert f"== node {stuck} is lost" in read_log(folder, job)
    assert _placed(folder, job)[1][0] == first


def _submit_held(slurm: Cluster, folder: Path, phase: str, *more: str) -> str:
    """Submit a job with a spare node, and wait until its second node stops in a phase of a step."""
    callbacks = "tests.launch.slow_steps:SlowSteps,tests.launch.slow_steps:Held"
    held = [f"--job.callbacks={callbacks}", f"--launch.environment.HELD_PHASE={phase}"]
    spares = ["--launch.spare_nodes=1", "--launch.queue=spares"]
    seconds = "--launch.environment.STEP_SECONDS=0.5"
    job = submit(slurm, folder, *spares, *held, seconds, *more)
    end = time.monotonic() + 300
    while not (folder / "held").exists():
        assert time.monotonic() < end, read_log(folder, job)
        time.sleep(0.1)
    return job


def _placed(folder: Path, job: str) -> list[tuple[str, str]]:
    """The two nodes of each start."""
    return lost_nodes.placed(read_log(folder, job))


#: Stand-ins for Slurm's programs and for Python. The ranks end with the codes of the file `codes`,
#: one after the other. A node runs nothing if a file has its name, and one GPU is missing if a file
#: `gpu-NAME` is there.
_PROGRAMS = {
    "scontrol": """
if [ "$1" = requeue ]; then touch requeued; exit; fi
if [ "$2" = hostnames ]; then printf '%s\\n' a b c; exit; fi
echo "NodeAddr=10.0.0.1 NodeHostName=host-$3.lab"
""",
    "squeue": "",
    "sleep": """
if [ "$1" = 10 ]; then exec /bin/sleep 20 >/dev/null 2>&1; fi
/bin/sleep 0.1
exit 1
""",
    "timeout": 'shift 2; exec "$@"\n',
    "nvidia-smi": """
echo "GPU 0: H100"
if [ ! -e "gpu-$SLURMD_NODENAME" ]; then echo "GPU 1: H100"; fi
""",
    "srun": """
export SLURM_NODEID=0 SLURM_STEP_NODELIST=
for word; do case $word in --nodelist=*) SLURM_STEP_NODELIST=${word#*=} ;; esac; done
export SLURMD_NODENAME=$SLURM_STEP_NODELIST
if [ -e "$SLURMD_NODENAME" ]; then exit 1; fi
case "$*" in --overlap*--nodes=2*) if [ -e b ]; then exit 1; fi ;; esac
while [ "$1" != bash ] && [ "$1" != true ]; do shift; done
exec "$@"
""",
    "python": """
echo "$SLURM_STEP_NODELIST $* lost: $TITANLITE_LOST_HOSTS" >>started
code=$(head -n 1 codes)
sed -i 1d codes
if [ "$code" -gt 128 ]; then touch b; fi
exit "$code"
""",
}


def _run(
    place: Path, codes: list[int], *flags: str, first: str = "a", nodes: str = "a,b,c"
) -> tuple[int, str]:
    """Run a job's script with the stand-ins; return its exit code and its output.

    first: the node on which it runs; "": none, as within salloc.
    """
    (place / "programs").mkdir()
    for name, body in _PROGRAMS.items():
        (place / "programs" / name).write_text(f"#!/bin/bash\n{body}")
        (place / "programs" / name).chmod(0o755)
    (place / "codes").write_text("".join(f"{code}\n" for code in codes))
    folder = place / "run"
    (folder / "launch").mkdir(parents=True)
    script = _script(f"--job.dump_folder={folder}", "--launch.image=image", *flags)
    variables = {
        **({"SLURMD_NODENAME": first} if first else {}),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(len(nodes.split(","))),
    }
    path = {"PATH": f"{place / 'programs'}:/usr/bin:/bin"}
    words = ["bash", "-c", script]
    done = subprocess.run(
        words, env=path | variables, cwd=place, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def _script(*flags: str) -> str:
    run = ["--job.config_file=debug_model.toml", *TWO_LAYERS, "--training.global_batch_size=32"]
    machines = ["--launch.nodes=2", "--launch.gpus_per_node=2", "--launch.shared_dir=/"]
    return launch_slurm.files(prepare([*run, *machines, *flags]))[launch_slurm.FILE]


def _starts(place: Path) -> list[str]:
    return [line.split()[0] for line in (place / "started").read_text().splitlines()]


def test_a_node_that_does_not_see_all_its_gpus_gets_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "gpu-a").touch()
    code, said = _run(tmp_path, [0], "--launch.spare_nodes=1")
    assert code == 0, said
    assert _starts(tmp_path) == ["b,c"]
    assert "== node a is lost" in said


def test_the_script_runs_within_salloc(tmp_path: Path) -> None:
    code, said = _run(tmp_path, [0], "--launch.spare_nodes=1", first="")
    assert code == 0, said
    assert _starts(tmp_path) == ["a,b"]


def test_without_enough_healthy_nodes_the_job_goes_back_into_the_queue(tmp_path: Path) -> None:
    (tmp_path / "gpu-a").touch()
    code, said = _run(tmp_path, [137, 0], "--launch.spare_nodes=1")
    assert code == 137, said
    assert _starts(tmp_path) == ["b,c"]
    assert "== 1 healthy nodes are too few: the job needs 2" in said
    assert (tmp_path / "requeued").exists()


def test_a_spare_node_that_is_dead_is_named_and_replaces_none(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    code, said = _run(tmp_path, [137, 0], "--launch.spare_nodes=1")
    assert code == 137, said
    assert _starts(tmp_path) == ["a,b"]
    assert re.findall("== node (.) is lost", said) == ["c", "b"]
    assert (tmp_path / "requeued").exists()


def test_an_error_and_a_third_end_at_the_same_step_are_final(tmp_path: Path) -> None:
    for name, codes, wanted in (("error", [2], 2), ("again", [7, 7, 7, 0], 7)):
        place = tmp_path / name
        place.mkdir()
        code, said = _run(place, codes, "--launch.spare_nodes=1")
        assert code == wanted, said
        assert _starts(place) == ["a,b"] * len([one for one in codes if one])
        assert not (place / "requeued").exists()


@pytest.mark.parametrize(
    ("codes", "ids", "end", "queued"),
    [
        ([7, 7, 0], ["7-0-0", "7-0-1", "7-0-2"], 0, False),
        ([137, 0], ["7-0-0"], 137, True),
        ([5, 0], ["7-0-0"], 5, True),
        ([2, 0], ["7-0-0"], 2, False),
        ([7, 7, 7, 0], ["7-0-0", "7-0-1", "7-0-2"], 7, False),
    ],
)
def test_ranks_that_died_start_again_on_the_same_nodes_and_a_lost_node_leads_to_the_queue(
    tmp_path: Path, codes: list[int], ids: list[str], end: int, queued: bool
) -> None:
    """The stand-in loses node b with a code above 128."""
    code, said = _run(tmp_path, codes, nodes="a,b")
    assert code == end, said
    started = (tmp_path / "started").read_text()
    assert re.findall("--rdzv_id (.*?) ", started) == ids
    assert (tmp_path / "requeued").exists() == queued


@pytest.mark.parametrize(("start", "starts"), [("7-0-0", 2), ("6-1-0", 1)])
def test_a_lost_rank_of_an_earlier_start_ends_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, starts: int
) -> None:
    """Lines of another start come before that of this one and after it."""
    lines = f"echo '6-1-0 2' >>$file; echo '{start} 3' >>$file; echo '6-1-0 2' >>$file"
    late = f"file=$RUN/launch/lost-rank; {lines}; exec /bin/sleep 2"
    monkeypatch.setitem(_PROGRAMS, "python", late)
    monkeypatch.setitem(_PROGRAMS, "sleep", "/bin/sleep 0.1; [ $1 -ne 15 ]\n")
    code, said = _run(tmp_path, [], "--launch.spare_nodes=1")
    assert code == 0, said
    ends = re.findall("the ranks ended with code (.*?) ", said)
    assert ends == ["137", "0"][-starts:], said


def test_a_stopped_job_does_not_start_again_in_its_allocation(tmp_path: Path) -> None:
    code, said = _run(tmp_path, [5, 0], "--launch.spare_nodes=1")
    assert code == 5, said
    assert _starts(tmp_path) == ["a,b"]
    assert (tmp_path / "requeued").exists()


def test_the_nodes_that_a_job_asks_for() -> None:
    folder = "--job.dump_folder=/run"
    four = [folder, "--launch.nodes=4", "--training.global_batch_size=96"]
    assert "\n#SBATCH --nodes=4\n" in _script(*four)
    assert "\n#SBATCH --nodes=6\n#" in _script(*four, "--launch.spare_nodes=2")
    assert "\n#SBATCH --no-kill\n" in _script(*four, "--launch.spare_nodes=2")


def test_other_systems_have_no_spare_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*RUN, *LAUNCH, "--launch.spare_nodes=1", "--dry-run"]
    assert cli.main(["launch", "local", *words]) == exit_codes.CONFIG
    assert "launch.spare_nodes: local has no such jobs" in capsys.readouterr().err
