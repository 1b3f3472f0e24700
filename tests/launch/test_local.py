"""`titanlite launch local` on two machines, which are network namespaces: a cut link and a killed
agent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.namespaces import Host
from tests.support.processes import ROOT, environment, titanlite
from tests.support.train_runs import rows, unequal
from titanlite import exit_codes
from titanlite.cli.launch import prepare
from titanlite.launch import local as launch_local
from titanlite.runs.attempts import read_entries
from titanlite.runs.lines import read_lines

EXAMPLE = ROOT / "deploy" / "examples" / "local" / "llama3_8b.sh"
STEPS = 12
FLAGS = [
    "debug_model.toml",
    f"--training.steps={STEPS}",
    "--training.seq_len=64",
    "--training.batch_size=2",
    "--metrics.log_freq=1",
    "--no-validation.enable",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=4",
    "--launch.nodes=2",
    "--launch.gpus_per_node=1",
    "--launch.cpu",
    "--launch.max_restarts=1",
    "--job.callbacks=tests.launch.slow_steps:SlowSteps",
]


class Run:
    """A run on two machines."""

    def __init__(self, machines: list[Host], folder: Path, *more: str) -> None:
        self.machines = machines
        self.folder = folder
        words = ["launch", "local", *FLAGS, f"--job.dump_folder={folder}", *more]
        done = titanlite(*words)
        assert done.returncode == 0, done.stderr

    def start(self, step_seconds: float = 0.25) -> list[subprocess.Popen[str]]:
        """Start run.sh on each machine."""
        both = []
        for number, machine in enumerate(self.machines):
            words = ["bash", self.folder / "launch" / "run.sh", number, self.machines[0].address]
            with open(self.folder / f"output.{number}", "a") as out:
                env = {"STEP_SECONDS": str(step_seconds)}
                both.append(machine.popen(words, env, stdout=out, stderr=out))
        return both

    def until_step(self, step: int, seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        file = self.folder / "metrics.jsonl"
        while not file.exists() or not any(row.get("step", 0) >= step for row in read_lines(file)):
            assert time.monotonic() < end, f"step {step} does not come: {self.output()}"
            time.sleep(0.05)

    def end(self, both: list[subprocess.Popen[str]], seconds: float = 600) -> list[int]:
        """Wait for both machines; return their codes."""
        end = time.monotonic() + seconds
        return [one.wait(max(end - time.monotonic(), 0.1)) for one in both]

    def output(self) -> str:
        return "".join((self.folder / f"output.{number}").read_text() for number in (0, 1))

    def is_done(self) -> bool:
        """Whether each step was logged once, in order."""
        return [row[0] for row in rows(self.folder)] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def undisturbed(machines: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run(machines, tmp_path_factory.mktemp("undisturbed") / "run")
    assert run.end(run.start(0)) == [0, 0] and run.is_done(), run.output()
    return run.folder


def _example(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "getcwd", lambda: "/shared/titanlite")
    monkeypatch.setattr(sys, "executable", "/shared/titanlite/.venv/bin/python")
    example = ["--job.config_file=llama3_8b.toml", "--launch.nodes=2", "--launch.gpus_per_node=8"]
    return launch_local.files(prepare([*example, "--job.dump_folder=/shared/runs/8b"]))[
        launch_local.FILE
    ]


def test_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python tests/launch/test_local.py --write` writes it anew."""
    assert _example(monkeypatch) == EXAMPLE.read_text()


def test_the_third_failure_without_a_new_logged_step_is_the_last(
    tmp_path: Path, monkeypatch
) -> None:
    """A stand-in for Python logs the steps 1, 2 and 3 in its first three starts and always ends
    with 7.
    """
    folder = tmp_path / "run"
    count = 'n=$(wc -l <starts); [ $n -gt 3 ] || echo "{\\"step\\": $n}" >>metrics.jsonl'
    _script(tmp_path, monkeypatch, f"{count}\nexit 7")
    done = subprocess.run(["bash", tmp_path / "run.sh"], capture_output=True, text=True)
    assert done.returncode == exit_codes.LOST_PEER
    assert "after step 3 for the third time" in done.stderr
    assert (folder / "starts").read_text().count("start") == 5


def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> Path:
    """Write run.sh for one rank with a stand-in for Python, which runs in the run's folder."""
    stand_in = tmp_path / "stand-in"
    folder = tmp_path / "run"
    folder.mkdir()
    stand_in.write_text(f"#!/bin/bash\ncd {folder}\necho start >>starts\n{program}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    flags = [
        "--job.config_file=debug_model.toml",
        "--launch.gpus_per_node=1",
        f"--job.dump_folder={folder}",
    ]
    script = tmp_path / "run.sh"
    script.write_text(launch_local.files(prepare(flags))[launch_local.FILE])
    (folder / "launch").mkdir()
    return script


def test_a_newer_checkpoint_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with metrics.log_freq = 100, where a start may log nothing.

    The only rank is killed each time.
    """
    save = (
        'n=$(wc -l <starts); [ $n -gt 4 ] || echo "{\\"saved_step\\": $n, \\"lost_steps\\": 0}" '
        ">>attempts.jsonl"
    )
    script = _script(tmp_path, monkeypatch, f"{save}\nexit 137")
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode == 137
    assert "restart 5 of" in done.stderr
    assert "for the third time" in done.stderr
    assert (tmp_path / "run" / "starts").read_text().count("start") == 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_script_stops_the_run_and_its_code_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    program = "trap 'exit 5' TERM\necho ready\nfor i in {1..3000}; do sleep 0.1; done"
    script = _script(tmp_path, monkeypatch, program)
    with subprocess.Popen(["bash", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(300) == exit_codes.PREEMPTED
    assert (tmp_path / "run" / "starts").read_text() == "start\n"


@pytest.mark.slow
def test_a_killed_only_rank_is_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["launch", "local", *FLAGS, "--launch.nodes=1", f"--job.dump_folder={folder}"]
    done = titanlite(*words, "--checkpoint.interval=2")
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "output", "w") as out:
        words = ["bash", str(folder / "launch" / "run.sh")]
        process = subprocess.Popen(
            words, stdout=out, stderr=out, env=environment(STEP_SECONDS="0.5")
        )
    end = time.monotonic() + 600
    file = folder / "metrics.jsonl"
    while not file.exists() or not any(row.get("step", 0) >= 4 for row in read_lines(file)):
        assert time.monotonic() < end and process.poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.05)
    (start,) = (entry for entry in read_entries(folder) if entry["event"] == "start")
    os.kill(start["pid"], signal.SIGKILL)
    assert process.wait(600) == exit_codes.DONE, (tmp_path / "output").read_text()
    assert "ended with code 137; restart 1 of 1" in (tmp_path / "output").read_text()
    assert [row[0] for row in rows(folder)] == list(range(1, STEPS + 1))


@pytest.mark.soak
def test_a_link_that_is_down_for_four_seconds_only_costs_time(
    machines: list[Host], undisturbed: Path, tmp_path: Path
) -> None:
    run = Run(machines, tmp_path / "run")
    both = run.start()
    run.until_step(2)
    machines[1].cut()
    time.sleep(4)
    machines[1].join()
    assert run.end(both) == [0, 0] and run.is_done(), run.output()
    assert "restart" not in run.output()
    assert unequal(undisturbed, run.folder, STEPS) == []


@pytest.mark.soak
def test_a_cut_link_ends_both_machines_and_the_same_command_goes_on(
    machines: list[Host], undisturbed: Path, tmp_path: Path
) -> None:
    limits = ["--comm.train_timeout_seconds=5", "--launch.max_restarts=0"]
    run = Run(machines, tmp_path / "run", *limits)
    both = run.start()
    try:
        run.until_step(6)
        machines[1].cut()
        began = time.monotonic()
        assert run.end(both, 150) == [exit_codes.LOST_PEER] * 2, run.output()
        # 5 s of the collective, 18 s in which a rank may end by itself; the rest is for a busy
        # machine.
        assert time.monotonic() - began < 100
    finally:
        machines[1].join()
    assert "a collective failed" in run.output()
    assert run.end(run.start(0)) == [0, 0], run.output()
    assert "step 4" in run.output()
    assert unequal(undisturbed, run.folder, STEPS) == []


@pytest.mark.soak
def test_a_killed_agent_leads_to_a_restart_of_both_machines(
    machines: list[Host], undisturbed: Path, tmp_path: Path
) -> None:
    run = Run(machines, tmp_path / "run")
    both = run.start()
    run.until_step(6)
    (agent,) = Path(f"/proc/{both[1].pid}/task/{both[1].pid}/children").read_text().split()
    os.kill(int(agent), signal.SIGKILL)
    assert run.end(both) == [0, 0] and run.is_done(), run.output()
    assert run.output().count("restart 1 of 1") == 2
    assert unequal(undisturbed, run.folder, STEPS) == []


if __name__ == "__main__" and "--write" in sys.argv:
    EXAMPLE.parent.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        EXAMPLE.write_text(_example(patch))
