"""A signal has the documented exit code whenever it comes, from the first import to the end of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import Pools
from tests.training.test_preemption import TINY, _run
from titanlite import exit_codes
from titanlite.runs.ledger import read_entries
from titanlite.torchrun import code_after_signal

ROOT = Path(__file__).resolve().parents[2]


def _process(*command: str, path: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with modules of `path` before others."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{path}{os.pathsep}{ROOT}", **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_words_say_after_which_step_a_run_stops(pool: Pools, tmp_path: Path, ranks: int) -> None:
    """A signal in the backward pass comes too late for the token counts, with which other ranks learn of it."""
    when, last = {
        1: ("stopping as soon as this step is done", 3),
        2: ("all ranks stop after this step or the next", 4),
    }[ranks]
    found = pool(ranks).run(_run, str(tmp_path), "backward", 3, 0, signal.SIGTERM, "--training.steps=8")
    assert [(ended["step"], ended["saved"]) for ended in found] == [(last, True)] * ranks
    assert f"SIGTERM: {when}, then a checkpoint is written" in found[0]["said"]


@pytest.mark.parametrize(
    ("launched", "number"),
    [
        (True, signal.SIGTERM),
        (True, signal.SIGINT),
        (False, signal.SIGTERM),
        (False, signal.SIGINT),
        (False, signal.SIGUSR1),
    ],
)
def test_while_torch_is_imported(tmp_path: Path, launched: bool, number: signal.Signals) -> None:
    """A module in torch's place sends the signal to its own process. The launcher is started with SIGUSR1 ignored."""
    (tmp_path / "torch.py").write_text(f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(20)\n")
    run = "run_module('titanlite.torchrun'" if launched else "run_path('train.py'"
    start = f"import signal, runpy; signal.signal(2, signal.default_int_handler); runpy.{run}, run_name='__main__')"
    codes = tmp_path / "codes"
    done = _process("-c", start, "--job.config_file=debug_model.toml", path=tmp_path, TITANLITE_EXIT_CODES=str(codes))
    assert (done.returncode, done.stdout) == (exit_codes.PREEMPTED, ""), done.stderr
    assert done.stderr == f"stopped: {number.name} before the first step\n"
    assert codes.read_text() == "0 5\n"


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (None, exit_codes.PREEMPTED),
        ("", exit_codes.ERROR),
        ("0 0\n0 0\n", exit_codes.DONE),
        ("0 5\n0 0\n", exit_codes.PREEMPTED),
        ("0 6\n", exit_codes.PREEMPTED_UNSAVED),
    ],
    ids=["no worker began", "they were killed", "all were done", "one was done", "nothing was saved"],
)
def test_what_a_signal_to_torchrun_comes_to(told: str | None, code: int) -> None:
    assert code_after_signal(told) == code


@pytest.mark.slow
def test_torchrun_asked_to_stop_when_its_workers_are_done(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(os.environ['TITANLITE_EXIT_CODES'], 'a').write('0 0\\n')\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(1)\n"
    )
    done = _process("-m", "titanlite.torchrun", "--nproc_per_node=1", str(script))
    assert done.returncode == exit_codes.DONE, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_signal_when_the_run_is_done_does_not_change_its_code(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import os, signal, time\n"
        "from titanlite import app\n"
        "leave = app.leave\n"
        "def late(*rest):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.5)\n"
        "    leave(*rest)\n"
        "app.leave = late\n"
        "app.main()\n"
    )
    flags = [*TINY, "--training.steps=1", "--no-validation.enable", f"--job.dump_folder={tmp_path}/run"]
    done = _process(str(script), "--job.config_file=debug_model.toml", *flags)
    assert done.returncode == exit_codes.DONE, done.stderr
    assert "SIGTERM: the run is ending already" in done.stdout
    end = read_entries(tmp_path / "run")[-1]
    assert (end["state"], end["exit_code"], end["saved_step"]) == ("done", exit_codes.DONE, 1)
