"""A rank whose storage hangs is asked to stop: all ranks stop in time, nothing is lost, the run goes on the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.test_background_training import TINY as SAVED_OFTEN
from tests.pool import Pools
from tests.training.harness import LateGuard, Run, batches, build_tiny, full, micro_batches
from tests.words import listening
from titanlite import exit_codes
from titanlite.build import read_text, to_device
from titanlite.checkpoint.manifest import parse_manifest
from titanlite.config.load import load_file
from titanlite.config.plans import GuardPlan
from titanlite.data import background
from titanlite.data.background import DataNotReadyError, Prefetcher
from titanlite.data.loader import Batch
from titanlite.guard import FiniteGuard
from titanlite.metrics.jsonl import read_metrics
from titanlite.parallel.world import World
from titanlite.preempt import Preempted
from titanlite.prepare import resolve_plans
from titanlite.runs.record import read_entries
from titanlite.starting import READER
from titanlite.step import train_step
from titanlite.trainer import Trainer

#: 4 sequences a step, on 2 ranks; saved at the end, or when a signal comes.
TINY = [*SAVED_OFTEN, "--checkpoint.interval=100", "--training.steps=8"]
#: With grace periods of half a minute in mind.
IN_TIME = 20.0


def _run(
    world: World, folder: str, hang: tuple[str, int, int] | None, late: bool, *flags: str, signalled: int | None = None
) -> dict[str, Any]:
    """Train. hang: where ("text", "validation", or "loader": the text for steps alone), the rank whose storage hangs,
    the first sequence that it does not give. The signal comes when that is waited for, to that rank or to `signalled`.
    """
    background._LAST_CHANCE = 1.0
    plans = resolve_plans(load_file("debug_model.toml", [*TINY, f"--job.dump_folder={folder}", *flags]), world.size)
    text = read_text(plans)
    trainer = Trainer(plans, world, text)
    if late:
        trainer.guard = LateGuard(world.device, plans.guard)
    asked, comes = [0.0], threading.Event()
    waits_in_vain = Path(folder) / "waits"
    if signalled == world.rank:

        def hear() -> None:
            while not waits_in_vain.exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=hear, daemon=True).start()
    if hang is not None and hang[1] == world.rank:
        dataset: Any = text.validation if hang[0] == "validation" else text.train
        read = dataset.sequence

        def strike() -> None:
            if not asked[0]:
                asked[0] = time.monotonic()
                if signalled is None:
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    waits_in_vain.touch()

        def sequence(index: int) -> Any:
            reads = threading.current_thread().name == READER
            if index >= hang[2] and not (reads and hang[0] == "loader"):
                if reads:
                    strike()
                comes.wait()
            return read(index)

        dataset.sequence = sequence
        waits = trainer.parts.validation if hang[0] == "validation" else trainer.parts.loader
        assert waits is not None
        give_up = waits.give_up
        assert give_up is not None
        waits.give_up = lambda: (strike(), give_up())[1]  # asked while data are waited for
    ended: Preempted | None = None
    with listening() as said:
        try:
            trainer.train()
        except Preempted as caught:
            ended = caught
    seconds = time.monotonic() - asked[0]
    comes.set()
    return {
        "step": trainer.step,
        "tokens": trainer.tokens_seen,
        "saved": ended and ended.saved,
        "reason": str(ended or ""),
        "code": exit_codes.code_of(ended) if ended else exit_codes.DONE,
        "said": said,
        "seconds": seconds if asked[0] else 0.0,
    }


def _figures(folder: Path) -> dict[tuple[int, str], float]:
    rows = read_metrics(folder / "metrics.jsonl")
    return {
        (row["step"], key): row[key] for row in rows for key in ("loss", "grad_norm", "validation_loss") if key in row
    }


@pytest.fixture(scope="module")
def straight(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], float]:
    folder = tmp_path_factory.mktemp("straight")
    pool(2).run(_run, str(folder), None, False)
    return _figures(folder)


@pytest.mark.parametrize(
    ("late", "flags"),
    [
        (False, []),
        # The step after it is begun before anyone knows.
        pytest.param(True, [], marks=pytest.mark.slow),
        # The checkpoint to end with is there already.
        pytest.param(False, ["--checkpoint.interval=1"], marks=pytest.mark.slow),
        pytest.param(True, ["--checkpoint.interval=1", "--checkpoint.async_mode=async"], marks=pytest.mark.slow),
        pytest.param(False, ["--training.tensor_parallel_degree=2"], marks=pytest.mark.slow),
        pytest.param(
            False,
            [
                "--experimental.pipeline_parallel_degree=2",
                "--experimental.pipeline_parallel_microbatches=1",
                "--model.overrides.n_layers=2",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(True, ["--guard.policy=skip", "--guard.spike_sigmas=6"], marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_waits_in_vain_does_not_keep_the_others(
    pool: Pools, tmp_path: Path, straight: dict[tuple[int, str], float], late: bool, flags: list[str]
) -> None:
    where = "text" if not flags else "loader"
    for rank, ended in enumerate(pool(2).run(_run, str(tmp_path), (where, 1, 12), late, *flags)):
        assert (ended["step"], ended["tokens"], ended["code"]) == (3, 3 * 64, exit_codes.PREEMPTED), ended["said"]
        assert ended["saved"]
        assert ended["reason"] == (
            "SIGTERM on rank 1: the checkpoint of step 3 is written, the same command goes on from there"
        )
        assert ended["seconds"] < IN_TIME
        told = (
            "SIGTERM while this rank waited for text for step 4: no data came within 1 s of being asked to stop. All "
            "ranks leave it out"
        )
        assert ended["said"].count(told) == (rank == 1)
    assert {step for step, _ in _figures(tmp_path)} == {1, 2, 3}, "nothing is recorded of a step that was left out"
    end = read_entries(tmp_path)[-1]
    assert (end["state"], end["step"], end["saved_step"], end["lost_steps"], end["lost_tokens"]) == (
        "preempted", 3, 3, 0, 0
    )  # fmt: skip
    next_batch = parse_manifest(tmp_path / "checkpoint" / "step-3").train["resume"]["next_batch"]
    assert (next_batch is None) == (where == "text"), "reading for its hash hangs too"
    for ended in pool(2).run(_run, str(tmp_path), None, False, *flags):
        assert (ended["step"], ended["code"]) == (8, exit_codes.DONE)
        assert not [line for line in ended["said"] if "NOT VERIFIED" in line]
    if flags[:1] in ([], ["--checkpoint.interval=1"]):
        assert _figures(tmp_path) == straight


@pytest.mark.slow
def test_a_save_does_not_wait_for_text_that_it_only_hashes(
    pool: Pools, tmp_path: Path, straight: dict[tuple[int, str], float]
) -> None:
    for ended in pool(2).run(_run, str(tmp_path), ("text", 1, 12), False, "--checkpoint.interval=3"):
        assert (ended["step"], ended["saved"], ended["code"]) == (3, True, exit_codes.PREEMPTED), ended["said"]
        assert ended["seconds"] < IN_TIME
    assert parse_manifest(tmp_path / "checkpoint" / "step-3").train["resume"]["next_batch"] is None
    pool(2).run(_run, str(tmp_path), None, False)
    assert _figures(tmp_path) == straight


def test_in_the_first_step_of_all_there_is_nothing_to_save(pool: Pools, tmp_path: Path) -> None:
    for ended in pool(2).run(_run, str(tmp_path), ("text", 0, 0), False):
        assert (ended["step"], ended["saved"], ended["code"]) == (0, True, exit_codes.PREEMPTED)
        assert ended["reason"] == "SIGTERM on rank 0: no step was done, nothing is lost"
    assert not list((tmp_path / "checkpoint").glob("step-*"))


@pytest.mark.slow
def test_in_the_first_step_after_a_resume_its_checkpoint_stays(
    pool: Pools, tmp_path: Path, straight: dict[tuple[int, str], float]
) -> None:
    pool(2).run(_run, str(tmp_path), ("text", 1, 12), False)
    before = (tmp_path / "checkpoint" / "step-3" / "manifest.json").read_bytes()
    for ended in pool(2).run(_run, str(tmp_path), ("text", 0, 12), False):
        assert (ended["step"], ended["saved"], ended["code"]) == (3, True, exit_codes.PREEMPTED)
    assert (tmp_path / "checkpoint" / "step-3" / "manifest.json").read_bytes() == before
    pool(2).run(_run, str(tmp_path), None, False)
    assert _figures(tmp_path) == straight


@pytest.mark.slow
@pytest.mark.parametrize("first", [8, 20])  # of 24: in the second batch of three, and in the last
def test_a_validation_that_waits_in_vain_is_broken_off(
    pool: Pools, tmp_path: Path, straight: dict[tuple[int, str], float], first: int
) -> None:
    assert (4, "validation_loss") in straight
    flags = ["--validation.steps=6"]
    for ended in pool(2).run(_run, str(tmp_path), ("validation", 1, first), False, *flags):
        assert (ended["step"], ended["saved"], ended["code"]) == (4, True, exit_codes.PREEMPTED), ended["said"]
        assert "validation at 4 was broken off; the run that goes on does it" in ended["said"]
        assert ended["seconds"] < IN_TIME
    assert (4, "validation_loss") not in _figures(tmp_path)
    pool(2).run(_run, str(tmp_path), None, False, *flags)
    found = _figures(tmp_path)
    assert {key: found[key] for key in straight if key[1] != "validation_loss"} == {
        key: value for key, value in straight.items() if key[1] != "validation_loss"
    }
    assert {step for step, key in found if key == "validation_loss"} == {4, 8}


# The pieces


def _steps(world: World, void: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any], int | None]:
    tokens, labels = batches(6, 4, 16, 192)
    model, optimizer, rank = build_tiny(world, Run(tokens, labels, [1e-3] * 6))
    guard = FiniteGuard(world.device, GuardPlan(policy="skip", spike_sigmas=6.0, window=4))
    kept: list[torch.Tensor] = []
    for step in range(1, 7):
        data = to_device(micro_batches(Run(tokens, labels, []), step - 1, rank, world.size), world.device)
        nothing = void and step == 4 and world.rank == 1
        if nothing:  # whatever it brings
            data = [Batch(b.tokens, torch.full_like(b.labels, 7)) for b in data]
        if step == 4:
            kept = [full(p).clone() for p in model.parameters()]
        train_step(model, optimizer, data, step=step, lr=1e-3, max_norm=1.0, guard=guard, stop=nothing, void=nothing)
        assert guard.watch() is (void and step == 4)
    return kept, [full(p) for p in model.parameters()], guard.state_dict(), guard.void_step


def test_a_void_step_and_those_after_it_change_nothing(pool: Pools) -> None:
    for before, after, statistics, first in pool(2).run(_steps, True):
        assert first == 4
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert len(statistics["losses"]) == 3 and "bad_steps" not in statistics
    for before, after, statistics, first in pool(2).run(_steps, False):
        assert first is None
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert len(statistics["losses"]) == 4


class _Hanging:
    """A loader whose third step does not come before `comes` is set."""

    steps_left = None

    def __init__(self) -> None:
        self.given, self.comes = 0, threading.Event()

    def next_step(self) -> list[Batch]:
        if self.given == 2:
            self.comes.wait()
        self.given += 1
        return [Batch(torch.tensor([[self.given]]), torch.tensor([[self.given]]))]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def test_a_loader_that_is_given_up_is_left_behind_at_once() -> None:
    loader = _Hanging()
    with Prefetcher(loader, depth=2) as ahead:
        asked = threading.Event()
        ahead.give_up = asked.is_set
        assert [ahead.next_step()[0].tokens.item() for _ in range(2)] == [1, 2]
        threading.Timer(0.3, asked.set).start()
        began = time.monotonic()
        with pytest.raises(DataNotReadyError, match="no data came within 3 s of being asked to stop"):
            ahead.next_step()
        assert time.monotonic() - began >= 3.0, "what comes late is still taken"
        assert ahead.state_dict() == {"given": 2}
        began = time.monotonic()
    assert time.monotonic() - began < 1.0, "closing does not wait for it"
    loader.comes.set()


def test_data_that_come_after_the_wish_are_taken() -> None:
    loader = _Hanging()
    with Prefetcher(loader, depth=1) as ahead:
        ahead.give_up = lambda: True
        threading.Timer(1.0, loader.comes.set).start()
        assert [ahead.next_step()[0].tokens.item() for _ in range(4)] == [1, 2, 3, 4]
