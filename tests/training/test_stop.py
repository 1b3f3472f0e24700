"""Asked to stop by real signals: all ranks stop at the same step, save, and the run that goes on is
the same.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Pools
from tests.support.processes import ROOT, TORCHRUN, environment, python, until
from tests.support.tiny import EIGHT_STEPS
from tests.support.whole_runs import make_trainer, outcome_of
from titanlite import exit_codes
from titanlite.checkpoint.manager import Checkpointer
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.signals import SIGNALS
from titanlite.runs.attempts import read_entries
from titanlite.runs.read_jsonl import read_metrics
from titanlite.trainer import Trainer

#: No save but for a signal, and at the end.
TINY = [
    *EIGHT_STEPS,
    "--validation.enable",
    "--validation.freq=4",
    "--validation.steps=3",
    "--validation.batch_size=2",
    "--validation.seq_len=16",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=100",
]
EIGHT = "--training.steps=8"


def _losses(folder: Path) -> dict[tuple[int, str], float]:
    return {
        (row["step"], key): row[key]
        for row in read_metrics(folder / "metrics.jsonl")
        for key in ("loss", "grad_norm", "validation_loss")
        if key in row
    }


def _run(
    world: DistEnv, folder: str, where: str, step: int, rank: int, number: int, *flags: str
) -> dict[str, Any]:
    """Train; a signal comes to one rank in the given place of a step (0: never). How that ended."""
    trainer = make_trainer(world, folder, *TINY, *flags)
    struck: list[int] = []

    def strike() -> None:
        if trainer.step == step and world.rank == rank and not struck:
            struck.append(number)
            os.kill(os.getpid(), number)
            # On a busy machine a thread that gets it may wait for a core.
            until(lambda: trainer.stop.requested)

    _strike_in(trainer, where, strike)
    printed: list[str] = []
    trainer.stop._print = printed.append  # type: ignore[method-assign]
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell ignores it for what runs in its background
    handlers = [signal.getsignal(n) for n in SIGNALS]
    found = outcome_of(trainer, folder)
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    threads = {thread.name for thread in threading.enumerate()}
    assert not threads & {"titanlite-prefetch", "titanlite-heartbeat"}
    return {**found, "printed": printed}


def _strike_in(trainer: Trainer, where: str, strike: Callable[[], None]) -> None:
    """Call `strike` in every step: while it waits for data, in its backward, in a validation, or in
    a save.
    """
    if where == "data":
        fetch = trainer.parts.loader.next_step
        trainer.parts.loader.next_step = lambda: (strike(), fetch())[1]  # type: ignore[method-assign]
    elif where == "backward":
        next(trainer.parts.model.parameters()).register_post_accumulate_grad_hook(
            lambda _: strike()
        )
    elif where == "validation":
        trainer.parts.model.register_forward_pre_hook(
            lambda model, _: None if model.training else strike()
        )
    elif where == "save":
        saver: Any = trainer.parts.checkpointer
        write = saver.save
        saver.save = lambda *args, **kwargs: (strike(), write(*args, **kwargs))[1]


@pytest.fixture(scope="module")
def straight(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], float]:
    """8 steps on 2 ranks without a break."""
    folder = tmp_path_factory.mktemp("straight")
    pool(2).run(_run, str(folder), "", 0, 0, 0, EIGHT)
    losses = _losses(folder)
    assert {step for step, _ in losses} == set(range(1, 9))
    assert (4, "validation_loss") in losses
    return losses


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("where", "step", "rank", "number", "last"),
    [
        ("data", 3, 1, signal.SIGTERM, 3),  # known before the step's counts are summed
        ("backward", 3, 0, signal.SIGUSR1, 4),  # after them: the next step brings it
        ("validation", 4, 1, signal.SIGINT, 4),
        ("save", 2, 1, signal.SIGTERM, 2),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_nothing_is_lost(
    pool, tmp_path, straight, where, step, rank, number, last
):
    flags = [EIGHT, *(["--checkpoint.interval=2"] if where == "save" else [])]
    for ended in pool(2).run(_run, str(tmp_path), where, step, rank, number, *flags):
        assert (ended["step"], ended["code"]) == (last, exit_codes.PREEMPTED)
        assert ended["error"].startswith(
            f"{number.name} on rank {rank}: the checkpoint of step {last} is written"
        )
    end = read_entries(tmp_path)[-1]
    assert end == end | {"state": "preempted", "saved_step": last, "lost_steps": 0}
    assert end["reason"].startswith(f"{number.name} on rank {rank}")
    if where == "validation":
        assert (4, "validation_loss") not in _losses(tmp_path), "it was broken off"
    for ended in pool(2).run(_run, str(tmp_path), "", 0, 0, 0, EIGHT):
        assert (ended["step"], ended["code"]) == (8, exit_codes.DONE)
    assert _losses(tmp_path) == straight
    start, end = read_entries(tmp_path)[-2:]
    assert (start["began"], start["after"]) == (f"resumed from step {last}", "preempted")
    assert end == end | {"state": "done", "step": 8, "saved_step": 8}


def test_without_checkpoints_it_is_said_at_once_that_nothing_is_saved(pool, tmp_path):
    flags = [EIGHT, "--no-checkpoint.enable_checkpoint"]
    first, second = pool(2).run(_run, str(tmp_path), "backward", 3, 0, signal.SIGTERM, *flags)
    assert first["code"] == second["code"] == exit_codes.PREEMPTED_UNSAVED
    assert "CHECKPOINTS ARE OFF" in first["printed"][0]
    assert second["printed"] == []
    said = "stopped after step 4 by SIGTERM on rank 0: checkpoints are off, nothing is saved"
    assert said in second["said"]
    end = read_entries(tmp_path)[-1]
    stop = {"exit_code": exit_codes.PREEMPTED_UNSAVED, "step": 4, "saved_step": None}
    assert end == end | stop | {"lost_steps": 4, "lost_tokens": 4 * 64}


def _run_without_loading(world: DistEnv, folder: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Checkpointer, "load", lambda *_: None
        )  # it would refuse the file in the folder's place
        return _run(world, folder, "data", 2, 0, signal.SIGTERM, EIGHT)


def test_a_save_that_fails_is_not_called_saved(pool, tmp_path):
    (tmp_path / "checkpoint").write_text("not a folder")
    for ended in pool(2).run(_run_without_loading, str(tmp_path)):
        assert ended["code"] == exit_codes.PREEMPTED_UNSAVED
        assert "its checkpoint could not be written, there is no checkpoint" in ended["error"]


def test_a_signal_in_the_very_last_step_lets_the_run_be_done(pool, tmp_path):
    flags = ["--training.steps=2", "--no-validation.enable"]
    for ended in pool(2).run(_run, str(tmp_path), "data", 2, 0, signal.SIGTERM, *flags):
        assert ended["code"] == exit_codes.DONE
    assert read_entries(tmp_path)[-1]["state"] == "done"


# StopSignal alone


@pytest.mark.slow
def test_a_second_ctrl_c_and_not_its_echo_ends_a_process_that_hangs(tmp_path):
    code = (
        "import os, signal, time\n"
        "from titanlite.dist.signals import StopSignal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with StopSignal():\n"
        "    try:\n"
        "        for _ in range(2):\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        # A launcher passes on what its workers have got already.
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            time.sleep(1.2)\n"
        "            print('alive', flush=True)\n"
        "    finally:\n"
        "        time.sleep(60)\n"
    )
    done = python("-c", code, env={"TITANLITE_EXIT_CODES": f"{tmp_path}/codes"})
    assert done.returncode == exit_codes.INTERRUPTED and "SIGINT again" in done.stderr, done.stderr
    assert done.stdout == "alive\n"
    assert (tmp_path / "codes").read_text() == "0 130\n"


def test_children_started_under_the_shield_survive_what_is_sent_to_the_group():
    code = (
        "import os, signal, subprocess, sys, time\n"
        "from titanlite.dist.signals import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    with stop.shield_children():\n"
        "        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1); "
        "print(7, flush=True)'])\n"
        "        time.sleep(0.3)\n"
        "        os.killpg(os.getpgid(0), signal.SIGTERM)\n"
        "        code = child.wait()\n"
        "    print(code, stop.reason)\n"
    )
    done = python("-c", code, start_new_session=True)
    assert (done.returncode, done.stdout) == (0, "7\n0 SIGTERM\n"), done.stderr


# Whole processes


@pytest.mark.parametrize(
    ("launched", "number"),
    [(True, signal.SIGTERM), (False, signal.SIGINT), (False, signal.SIGUSR1)],
)
def test_a_signal_while_torch_is_imported(tmp_path, launched, number):
    """A module in torch's place sends the signal to its own process.

    The launcher is started with SIGUSR1 ignored.
    """
    (tmp_path / "torch.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(300)\n"
    )
    run = "run_module('titanlite.torchrun'" if launched else "run_path('train.py'"
    start = (
        f"import signal, runpy; signal.signal(2, signal.default_int_handler); runpy.{run}, "
        "run_name='__main__')"
    )
    codes = tmp_path / "codes"
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TITANLITE_EXIT_CODES": str(codes)}
    done = python(
        "-c", start, "--job.config_file=debug_model.toml", env=variables, start_new_session=True
    )
    assert (done.returncode, done.stdout) == (exit_codes.PREEMPTED, ""), done.stderr
    assert done.stderr == f"stopped: {number.name} before the first step\n"
    assert codes.read_text() == f"0 {exit_codes.BEGUN}\n0 5\n"


def _launch(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """Start two ranks of train.py by torchrun; `codes` beside the folder gets their exit codes."""
    flags = ("--job.config_file=debug_model.toml", *TINY, "--no-validation.enable", *flags)
    words = [sys.executable, *TORCHRUN, "train.py", *flags, f"--job.dump_folder={folder}"]
    env = environment(TITANLITE_EXIT_CODES=str(folder.parent / "codes"))
    return subprocess.Popen(
        words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_workers_of_a_killed_torchrun_save_and_stop_and_the_next_start_goes_on(tmp_path):
    """No save before the stop's own: torchrun's store is gone then."""
    launch = _launch(tmp_path / "run", "--training.steps=100000")
    assert launch.stdout is not None
    assert any("step:  3" in line for line in launch.stdout)
    launch.kill()
    text = launch.communicate(timeout=900)[0]  # the workers hold the pipe
    codes = sorted(line.split()[1] for line in (tmp_path / "codes").read_text().splitlines())
    ends = [code for code in codes if int(code) != exit_codes.BEGUN]
    assert ends == [str(exit_codes.PREEMPTED)] * 2, text
    stopped = r"stopped after step (\d+) by SIG\w+ on every rank: the checkpoint"
    step = int(re.findall(stopped, text)[0])
    again = _launch(tmp_path / "run", f"--training.steps={step + 1}")
    assert f"resumed from step {step}" in again.communicate(timeout=900)[0]
    assert again.returncode == 0
