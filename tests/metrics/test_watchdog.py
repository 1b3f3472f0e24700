"""Real ranks that sleep, stop, raise and die: the report names them, and all end."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tests.support.processes import TORCHRUN, python, until
from tests.support.tiny import TWENTY_STEPS
from tests.support.whole_runs import make_trainer
from tests.support.words import listening
from titanlite import exit_codes
from titanlite.assembly import error_exit
from titanlite.config.run_sections import Comm, Stall
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics import watchdog
from titanlite.metrics.hang_report import verdict
from titanlite.metrics.rank_state import RankState
from titanlite.metrics.watchdog import THREAD, HangWatchdog, _stack
from titanlite.optim.bad_step_errors import BadStepError
from titanlite.runs.attempts import read_entries
from titanlite.utils import note_progress, progress_at

QUICK = Stall(deadline_seconds=1.0, heartbeat_seconds=0.3)
#: Longest wait for an event that should come within seconds.
LONG = 300.0
#: For tests in which no rank is late: on a busy machine one would be.
PATIENT = Stall(deadline_seconds=LONG, heartbeat_seconds=0.3)

AT_FORWARD = RankState(
    0, "node1", 11, 5, 1, "forward", 8.0, ("c10d.py:1 all_reduce", "step.py:2 train_step"), True
)
IN_DATA = RankState(
    1, "node2", 12, 5, 0, "data", 8.1, ("loader.py:9 read", "trainer.py:3 train_one")
)


def _ranks(state: RankState, *ranks: int) -> list[RankState]:
    return [replace(state, rank=rank) for rank in ranks]


@pytest.mark.parametrize(
    ("states", "named", "words"),
    [
        (
            [AT_FORWARD, IN_DATA],
            [1],
            "rank 1 (node2, process 12) has been in data of step 5 for 8.1 s, at loader.py:9",
        ),
        # At the same place, one of them not in a collective.
        (
            [
                AT_FORWARD,
                replace(AT_FORWARD, rank=1, in_collective=False, stack=("hook.py:3 slow",)),
            ],
            [1],
            "in forward of step 5 for 8.0 s, at hook.py:3 slow: the others wait",
        ),
        # Behind, but waiting itself: for the one that is ahead and busy.
        ([AT_FORWARD, replace(IN_DATA, step=6)], [1], "in data of step 6"),
        ([AT_FORWARD, *_ranks(AT_FORWARD, 1)], [], "none of the ranks holds the others up"),
        # A rank that is mute is blamed before one that is behind.
        (
            [IN_DATA, *_ranks(replace(AT_FORWARD, silent=True), 2)],
            [2],
            "not answer, last seen in forward of step 5",
        ),
        (
            [AT_FORWARD, *(RankState(rank, silent=True) for rank in (1, 2))],
            [1, 2],
            "ranks 1, 2 do not answer",
        ),
        ([AT_FORWARD, replace(IN_DATA, end="left")], [1], "has left the loop, in data of step 5"),
        # Collectives that failed on the others are the effect.
        ([replace(AT_FORWARD, end="lost"), IN_DATA], [1], "in data of step 5 for 8.1 s"),
    ],
)
def test_a_rank_that_waits_is_not_the_culprit(states, named, words):
    culprits, sentence = verdict(states)
    assert [state.rank for state in culprits] == named
    assert words in sentence


@pytest.mark.parametrize(
    ("stall", "comm", "deadlines"),
    [
        ({}, {"train_timeout_seconds": 10, "init_timeout_seconds": 600}, (6.0, 360.0, 2.0)),
        ({"deadline_seconds": 900.0}, {"train_timeout_seconds": 1000}, (900.0, 900.0, 2.0)),
        ({"deadline_seconds": 0.0, "heartbeat_seconds": 20.0}, {}, (0.0, 180.0, 20.0)),
    ],
)
def test_deadlines_follow_the_timeouts(stall, comm, deadlines):
    dog = HangWatchdog(Stall(**stall), Comm(**comm))
    assert (dog._deadline, dog._patience, dog._heartbeat) == pytest.approx(deadlines)


def test_no_garbage_is_collected_while_a_stack_is_read():
    """Python 3.11 would let the thread run on meanwhile, and read frames that have ended."""
    within: list[str] = []

    def note(phase, _):
        frame = sys._getframe(1)
        while frame is not None:
            within.append(frame.f_code.co_name)
            frame = frame.f_back

    usual = gc.get_threshold()
    main = threading.get_ident()
    reader = threading.Thread(target=lambda: [_stack(main) for _ in range(20)])
    gc.callbacks.append(note)
    gc.set_threshold(1, 1, 1)
    try:
        reader.start()
        reader.join()
        assert gc.get_threshold() == (1, 1, 1)
    finally:
        gc.set_threshold(*usual)
        gc.callbacks.remove(note)
    assert "_stack" in within and "_look" not in within


# Ranks that stand still


@contextlib.contextmanager
def _watching(
    own_reason: float = 0.5, silent_beats: float = 1000.0, stall: Stall = QUICK, **keywords: Any
) -> Iterator[tuple[HangWatchdog, list[str]]]:
    """A watchdog that looks often and ends nobody, and what is logged.

    It waits long for what comes, since a busy machine is late.
    """
    shorter = {"_POLL_SECONDS": 0.1, "_OWN_REASON_SECONDS": own_reason}
    longer = {"_TOLD_SECONDS": LONG, "_UNWIND_SECONDS": LONG, "_SILENT_BEATS": silent_beats}
    keywords.setdefault("end", None)
    with (
        mock.patch.multiple(watchdog, **shorter, **longer),
        listening() as said,
        HangWatchdog(stall, **keywords) as dog,
    ):
        yield dog, said


def _loop(dog: HangWatchdog, slow: Callable[[], object]) -> None:
    """Three steps of phases and collectives; `slow` is called where the second one reads
    its data.
    """
    for step in range(1, 4):
        dog.phase("data", step)
        if step == 2:
            slow()
        dog.phase("forward")
        dist.all_reduce(torch.ones(3))
        dog.phase("optimizer")


def _reports_of_step_2(said: list[str]) -> list[str]:
    """The reports that blame a rank in its data.

    A busy machine may bring more of them, of other steps.
    """
    return [text for text in said if "\n" in text and "in data of step 2 " in text]


def _waiter(world: DistEnv, said: list[str]) -> Callable[[], None]:
    """A call with which rank 1 stands still until rank 0 has reported it."""
    store = _get_default_store().clone()

    def tell() -> None:
        until(lambda: _reports_of_step_2(said))
        store.set("reported", "")

    if world.rank == 0:
        threading.Thread(target=tell, daemon=True).start()

    def read_shard() -> None:
        deadline = time.monotonic() + LONG  # without `until`, whose frames would hide this one
        while world.rank == 1 and not store.check(["reported"]) and time.monotonic() < deadline:
            time.sleep(0.02)

    return read_shard


@pytest.mark.parametrize("phase", ["validate", "evaluate", "save", "data"])
def test_a_long_phase_that_goes_on_is_no_hang_until_it_stops(phase):
    dog = HangWatchdog(Stall(deadline_seconds=100.0), Comm(init_timeout_seconds=100))
    dog.rank, dog._reported = 0, None
    dog.phase(phase, 3)
    began = dog._now[3]
    with (
        mock.patch.object(dog, "_report") as report,
        mock.patch.dict(progress_at, {"other": began + 500}),
        mock.patch("titanlite.utils.time.monotonic") as clock,
    ):
        for seconds in range(0, 1000, 50):
            clock.return_value = began + seconds
            note_progress(phase)
            dog._watch(began + seconds + 99)
        assert not report.called
        dog._watch(began + seconds + 101)
        dog._watch(began + seconds + 300)
        report.assert_called_once_with("no progress for 101 s")


def _marks(world: DistEnv, folder: str) -> set[str]:
    progress_at.clear()
    flags = ["--training.steps=1", "--validation.steps=2"]
    flags += ["--checkpoint.enable_checkpoint", "--training.seq_len=32"]
    hf = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
    make_trainer(world, folder, *flags, *hf).train()
    return set(progress_at)


def test_validation_and_the_export_tell_that_they_go_on(pool, tmp_path):
    (marks,) = pool(1).run(_marks, str(tmp_path / "run"))
    assert {"validate", "save"} <= marks


def _sleep(world: DistEnv) -> list[str]:
    with _watching() as (dog, said):
        _loop(dog, _waiter(world, said))
        # The loop is over before rank 0's thread has looked again.
        until(lambda: world.rank or any("continues" in text for text in said))
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD]
    return said


def test_a_rank_that_sleeps_in_its_loader_is_named_with_its_stack(pool):
    said, others = pool(2).run(_sleep)
    (report,) = _reports_of_step_2(said)
    host = socket.gethostname()
    head, _, zero, one, sentence = report.splitlines()
    assert re.fullmatch(r"no progress for \d+ s:", head)
    assert zero.split()[:4] == ["0", host, "2", "forward"]
    assert "all_reduce < " in zero
    assert zero.endswith(" _loop"), "where our code is, not torch's"
    assert one.split()[:4] == ["1", host, "2", "data"]
    assert "read_shard" in one
    assert re.match(
        rf"rank 1 \({re.escape(host)}, process \d+\) has been in data of step 2 for [\d.]+ s, at ",
        sentence,
    )
    assert sentence.endswith(": the others wait")
    assert any(text.startswith("rank 0 continues") for text in said)
    assert not others


def _unanswered(said: list[str]) -> list[str]:
    return [text for text in said if "\n" in text and "does not answer" in text]


def _stop(world: DistEnv) -> list[str]:
    pids = [0] * world.size
    dist.all_gather_object(pids, os.getpid())
    here = RankState(0, step=2, phase="data").where
    with _watching(silent_beats=3.0) as (dog, said):

        def wake() -> None:
            try:
                until(lambda: _unanswered(said))
            finally:
                os.kill(pids[1], signal.SIGCONT)

        if world.rank == 0:
            threading.Thread(target=wake, daemon=True).start()

        def stop() -> None:
            if world.rank == 1:
                until(lambda: RankState.load(dog._beat(1).partition(" ")[2]).where == here)
                os.kill(os.getpid(), signal.SIGSTOP)

        _loop(dog, stop)
    return _unanswered(said)


@pytest.mark.slow
def test_a_stopped_rank_does_not_answer_and_is_named(pool):
    report = pool(2).run(_stop)[0][0]
    assert re.search(r"\n +1 +\S+ +2 +data +[\d.]+ +no answer\n", report)
    assert re.search(r"\nrank 1 \(.*\) does not answer, last seen in data of step 2: ", report)


def _add_dead(dog: HangWatchdog, rank: int) -> RankState:
    """Add a last rank whose state names a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    dead = replace(dog._state(), rank=rank, pid=process.pid)
    dog._store.set(f"beat/{rank}", f"1 {dead.dump()}")
    dog.size = rank + 1
    return dead


def _report_of_a_dead_rank(world: DistEnv) -> str:
    began = time.monotonic()
    with _watching(stall=Stall(deadline_seconds=2 * LONG, heartbeat_seconds=LONG)) as (dog, _):
        dead = _add_dead(dog, 1)
        assert not dog._is_gone(dead), "it may be of another launcher"
        dog._near = range(2)
        assert not dog._is_gone(replace(dead, host="node-2"))
        assert not dog._is_gone(dog._state())
        dog._report("a collective failed")
        return dog.verdict if time.monotonic() - began < LONG else ""


def test_a_rank_whose_process_is_gone_is_named_without_a_wait(pool):
    """torchrun starts ranks again when the others have ended, after their report."""
    (found,) = pool(1).run(_report_of_a_dead_rank)
    assert re.match(r"rank 1 \(\S+, process \d+\) does not answer", found)


def _lose_one(world: DistEnv) -> tuple[str, list[str]]:
    """Return the verdict and the reports where rank 2 is gone, and rank 0 waits for rank 1."""
    error = RuntimeError("gloo: connection closed by peer")
    with _watching(stall=PATIENT) as (dog, said):
        _add_dead(dog, 2)
        dog._near = range(3)
        dist.barrier()
        if world.rank == 1:
            dog.failed(error)
        dist.barrier()
        if world.rank == 0:
            dog.failed(error)
    return dog.verdict, [text for text in said if text.startswith("a collective failed")]


def test_a_rank_that_waits_for_one_that_lost_its_peer_reports_the_lost_one_once(pool):
    """Rank by rank, a ring would wait for the verdict, and torchrun would kill rank 0 before."""
    ends = pool(2).run(_lose_one)
    for sentence, _ in ends:
        assert re.match(r"rank 2 \(\S+, process \d+\) does not answer", sentence)
    assert [len(reports) for _, reports in ends] == [1, 0]


# Ranks that raise


def _fail_in_nccl(world: DistEnv, failure: str) -> tuple[list[int], list[str], str]:
    """Return how this rank ends, its errors and the verdict when NCCL has failed on all ranks."""
    ends: list[int] = []

    def notice() -> str:
        """Rank 0 is the last, or the other would seem to go on."""
        return failure if world.rank or '"lost"' in dog._beat(1) else ""

    with (
        _watching(stall=PATIENT, end=ends.append) as (dog, said),
        mock.patch.object(watchdog, "nccl_failure", notice),
    ):
        dog.phase("data" if world.rank else "forward", 1)
        until(lambda: ends)
    dist.barrier()
    return ends, said, dog.verdict


def test_a_failure_that_nccl_has_noticed_ends_ranks_that_wait_for_their_device(pool):
    for ends, said, sentence in pool(2).run(
        _fail_in_nccl, "NCCL reports TIMEOUT in the group mesh_tp"
    ):
        assert ends == [exit_codes.LOST_PEER]
        assert said[-1] == "NCCL reports TIMEOUT in the group mesh_tp: this rank ends"
        assert "wait for a device" in sentence


def _raise_together(
    world: DistEnv, kind: type[BaseException], values: tuple[Any, ...], late: float
) -> list[str]:
    # An error that is published waits for that of the others; `late` is longer than that.
    own_reason = 0.5 if late else LONG
    watching = _watching(own_reason=own_reason, stall=PATIENT, end=os._exit)
    with pytest.raises(kind), watching as (dog, said):
        dog.phase("data", 1)
        dist.barrier()
        if world.rank == 0:
            time.sleep(late)
        raise kind(*values)
    return said


@pytest.mark.parametrize(
    ("kind", "values", "late"),
    [
        (ValueError, ("of all",), 0.0),
        # The guard stops all ranks, even if one takes longer than it has for a reason of its own.
        (BadStepError, (7, 1.0, 9.0, "too high"), 1.5),
    ],
)
def test_an_error_of_all_ranks_ends_no_other_rank(pool, kind, values, late):
    assert pool(2).run(_raise_together, kind, values, late) == [[], []]


def test_a_rank_that_does_not_print_waits_for_one_that_does(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv(exit_codes.VARIABLE, str(tmp_path / "codes"))
    monkeypatch.setattr(error_exit, "PRINT_SECONDS", 0.3)
    for words in ("error: [rank 5] lost\n", ""):
        began = time.monotonic()
        assert error_exit.print_error("lost", exit_codes.LOST_PEER) == exit_codes.LOST_PEER
        assert time.monotonic() - began >= 0.3
        assert capsys.readouterr().err == words, "a rank has told the same"


# Whole runs under torchrun

_FAULTY = """
import os, signal, sys, time
from titanlite import main
from titanlite.data.prefetch import Prefetcher
from titanlite.data.loader import TrainLoader
kind, struck = sys.argv[1:3]
rank, asked, read = os.environ["RANK"], 0, 0

def read_shard(self, step=TrainLoader.next_step):
    global read
    read += 1
    if read == 3 and rank == "1" and kind == "raise":
        raise OSError(5, "Input/output error", "/data/shard-3")
    return step(self)

def next_step(self, step=Prefetcher.next_step):
    global asked
    asked += 1
    if asked == 3 and rank == "1":
        open(struck, "w").write(str(time.time()))
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    # Like a collective of NCCL, which does not notice that a rank is gone.
    elif asked == 3 and kind == "raise":
        time.sleep(600)
    return step(self)

TrainLoader.next_step, Prefetcher.next_step = read_shard, next_step
main.main(sys.argv[3:])
"""


def _torchrun(tmp_path: Path, kind: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run two ranks, of which rank 1 fails in its third step.

    Return also the seconds from then to the end.
    """
    script = tmp_path / "faulty.py"
    struck = tmp_path / "struck"
    script.write_text(_FAULTY)
    launch = ["-m", "titanlite.torchrun", *TORCHRUN[2:], "--local-ranks-filter=0"]
    flags = [
        "--job.config_file=debug_model.toml",
        *TWENTY_STEPS,
        f"--job.dump_folder={tmp_path}/run",
        "--training.steps=9",
    ]
    # Torchrun would wait as long for a rank that does not end.
    done = python(
        *launch, script, kind, struck, *flags, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
    )
    return done, time.time() - float(struck.read_text())


@pytest.mark.soak
def test_an_error_of_a_loader_ends_all_ranks_and_is_the_last_line(tmp_path):
    """Rank 0 is where nothing tells it of the other's end, as in a collective of NCCL."""
    done, seconds = _torchrun(tmp_path, "raise")
    assert done.returncode == exit_codes.ERROR
    host = socket.gethostname()
    error = "OSError: [Errno 5] Input/output error: '/data/shard-3'"
    said, last = done.stdout.splitlines()[-2:]
    named = rf"ERROR: rank 1 \({re.escape(host)}, process \d+\) raised in data of step 3"
    assert last == error
    assert re.search(named, said)
    assert "read_shard: all ranks end." in said
    assert "in read_shard" in (tmp_path / "run" / "logs" / "rank_1.log").read_text()
    assert done.stderr.splitlines()[-1] == f"error: rank 1 on {host}: {error}"
    root = done.stderr.partition("Root Cause (first observed failure)")[2]
    assert re.search(r"rank +: 1 ", root), "torchrun blames the rank that raised"
    end = read_entries(tmp_path / "run")[-1]
    assert (end["state"], end["exit_code"], end["step"]) == ("failed", exit_codes.LOST_PEER, 2)
    assert end["reason"].startswith("rank 1 (") and end["reason"].endswith(error)
    # Some 5 s on a machine that does nothing else; waiting for rank 0's sleep or torchrun's
    # patience takes ten minutes.
    assert seconds < LONG


@pytest.mark.soak
def test_a_killed_rank_is_named(tmp_path):
    done, seconds = _torchrun(tmp_path, "kill")
    assert done.returncode == exit_codes.LOST_PEER
    assert seconds < LONG
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    culprit = r"rank 1 \(\S+, process \d+\) does not answer, last seen in "
    assert re.match(culprit, done.stderr[done.stderr.index("error: ") :].splitlines()[1]), (
        "the run's last words"
    )
    assert re.match(culprit, read_entries(tmp_path / "run")[-1]["reason"])
    report = log[log.index("a collective failed:\n") :].splitlines()
    assert report[2].endswith("lost its peers")
    assert report[3].endswith("no answer")
    assert re.match(culprit, report[4])
    assert report[4] in done.stdout
