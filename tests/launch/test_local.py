"""`titanlite launch local`: the script, and two machines, of which one loses its agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.slurm_jobs import LAUNCH, RUN, STEPS, until_step
from tests.support.processes import ROOT, environment, titanlite
from tests.support.train_runs import rows, unequal
from titanlite import exit_codes
from titanlite.cli.launch import prepare
from titanlite.launch import local as launch_local

EXAMPLE = ROOT / "deploy" / "examples" / "local" / "llama3_8b.sh"


def _example(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "getcwd", lambda: "/shared/titanlite")
    monkeypatch.setattr(sys, "executable", "/shared/titanlite/.venv/bin/python")
    example = ["--job.config_file=llama3_8b.toml", "--launch.nodes=2", "--launch.gpus_per_node=8"]
    return launch_local.files(prepare([*example, "--job.dump_folder=/shared/runs/8b"]))[
        launch_local.FILE
    ]


def test_example(monkeypatch):
    assert _example(monkeypatch) == EXAMPLE.read_text(), "run: python scripts/generate.py"


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


METRICS = 'echo "{\\"step\\": $n}" >>metrics.jsonl'
#: As with metrics.log_freq = 100, where a start may log nothing.
SAVES = 'echo "{\\"saved_step\\": $n, \\"lost_steps\\": 0}" >>attempts.jsonl'


@pytest.mark.parametrize(
    ("progress", "code", "step"), [(METRICS, exit_codes.LOST_PEER, 3), (SAVES, 137, 0)]
)
def test_the_third_failure_without_a_new_step_or_checkpoint_is_the_last(
    tmp_path, monkeypatch, progress, code, step
):
    """A stand-in for Python gets on in its first three starts and always fails."""
    count = f"n=$(wc -l <starts); [ $n -gt 3 ] || {progress}"
    script = _script(tmp_path, monkeypatch, f"{count}\nexit {code}")
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode == code
    assert f"after step {step} for the third time" in done.stderr
    assert (tmp_path / "run" / "starts").read_text().count("start") == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_script_stops_the_run_and_its_code_comes_back(
    tmp_path, monkeypatch, number
):
    program = "trap 'exit 5' TERM\necho ready\nfor i in {1..3000}; do sleep 0.1; done"
    script = _script(tmp_path, monkeypatch, program)
    with subprocess.Popen(["bash", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(300) == exit_codes.PREEMPTED
    assert (tmp_path / "run" / "starts").read_text() == "start\n"


@pytest.mark.slow
def test_a_killed_agent_leads_to_a_restart_of_both_machines(undisturbed, tmp_path):
    """Both are this one."""
    folder = tmp_path / "run"
    more = ["--launch.max_restarts=1", "--checkpoint.interval=4"]
    done = titanlite("launch", "local", *RUN, *LAUNCH, f"--job.dump_folder={folder}", *more)
    assert done.returncode == 0, done.stderr
    env = environment(STEP_SECONDS="0.25", GLOO_SOCKET_IFNAME="lo")
    output = tmp_path / "output"
    with output.open("w") as out:
        both = [
            subprocess.Popen(
                ["bash", folder / "launch" / "run.sh", str(number), "127.0.0.1"],
                env=env,
                stdout=out,
                stderr=out,
            )
            for number in (0, 1)
        ]
    until_step(folder, 6)
    (agent,) = Path(f"/proc/{both[1].pid}/task/{both[1].pid}/children").read_text().split()
    os.kill(int(agent), signal.SIGKILL)
    assert [one.wait(600) for one in both] == [0, 0], output.read_text()
    assert output.read_text().count("restart 1 of 1") == 2
    assert rows(folder) == rows(undisturbed)
    assert unequal(undisturbed, folder, STEPS) == []


if __name__ == "__main__" and "--write" in sys.argv:
    EXAMPLE.parent.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        EXAMPLE.write_text(_example(patch))
