"""The check of a resume: by itself, and in whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.pool import Pools
from tests.support.whole_runs import losses_of, train_run
from titanlite.checkpoint.loaded import LoadedState
from titanlite.checkpoint.resume_check import FILE, ResumeCheck
from titanlite.data.loader import TrainLoader
from titanlite.dist.dist_env import DistEnv

HERE = {"ranks": "2"}
NEAR = float(torch.nextafter(torch.tensor(2.5), torch.tensor(3.0)))


def _step(check: ResumeCheck, step: int, loss: float, norm: float = 0.5) -> Any:
    return check.after_step(step, torch.tensor(loss), torch.tensor(norm))


def _left(path: Path, **settings: Any) -> dict[str, Any]:
    """An attempt that has saved step 4 and done step 5; the train state of its checkpoint."""
    check = ResumeCheck(path, 0, HERE, **settings)
    assert _step(check, 4, 9.0) is None
    state = check.at_save(4, "abc")
    assert _step(check, 5, 2.5) is None
    assert _step(check, 6, 2.25) is None
    return state


def _again(
    path: Path,
    state: dict[str, Any],
    batch: str | None = "abc",
    setting: dict[str, str] = HERE,
    **fields: Any,
) -> ResumeCheck:
    check = ResumeCheck(path, 0, setting)
    check.resumed(LoadedState(4, state, verified=True, **fields), batch)
    return check


@pytest.mark.parametrize(
    ("now", "setting", "tolerance", "verified", "part"),
    [
        ((NEAR, 0.5), "2", 1e-4, False, "with the same setting"),
        ((2.5, 0.6), "2", 1e-4, False, "with the same setting"),
        ((NEAR, 0.5), "4", 1e-4, True, "which is rounding (ranks 2 then, 4 now)"),
        ((2.51, 0.5), "4", 1e-4, False, "a relative difference of 4.0e-03 (ranks 2 then, 4 now)"),
        ((2.51, 0.5), "4", 2e-2, True, "which is rounding"),  # the coarser attempt decides
        ((2.6, 0.5), "4", 2e-2, False, "a relative difference of 3.8e-02"),
    ],
)
def test_the_last_bit_counts_unless_a_setting_has_changed(
    tmp_path: Path,
    now: tuple[float, float],
    setting: str,
    tolerance: float,
    verified: bool,
    part: str,
) -> None:
    state = _left(tmp_path / FILE, tolerance=tolerance)
    result = _step(_again(tmp_path / FILE, state, setting={"ranks": setting}), 5, *now)
    assert result.verified == verified
    assert part in result.text
    assert result.text.startswith("RESUME NOT VERIFIED") != verified


def test_another_batch_is_named(tmp_path: Path) -> None:
    state = _left(tmp_path / FILE)
    verified, text = _step(_again(tmp_path / FILE, state, batch="xyz"), 5, 2.5)
    assert not verified
    assert "the next batch is not the one" in text
    verified, text = _step(
        _again(tmp_path / FILE, state, batch="xyz", changes=("data: d there, x here",)), 5, 7.0
    )
    assert verified
    assert "as allowed: data: d there, x here" in text


def test_figures_belong_to_one_save_and_may_be_missing(tmp_path: Path) -> None:
    """A step of the same number after another save is not compared; this attempt records it for the
    next one.
    """
    path = tmp_path / FILE
    _left(path)
    state = ResumeCheck(path, 0, HERE).at_save(4, "abc")
    verified, text = _step(_again(path, state), 5, 2.0)
    assert verified
    assert "no earlier attempt has left figures of step 5" in text
    check = _again(path, state)
    assert "bit for bit" in _step(check, 5, 2.0).text and _step(check, 6, 2.25) is None, (
        "it is told once"
    )
    check = _again(path, state)
    check.forget()  # a rollback: the step after it trains on other data
    assert _step(check, 5, 9.0) is None
    assert _step(ResumeCheck(path, 0, HERE), 5, 2.0) is None, "a fresh run has no result"
    check = ResumeCheck(tmp_path / FILE, 1, HERE)
    check.resumed(LoadedState(4, state, verified=True), "abc")
    assert _step(check, 5, 2.5) is None, "rank 0 alone has a result"


@pytest.mark.parametrize(
    "change", [{"loss": None}, {"norm": "x"}, {"setting": []}, {"tolerance": [1]}], ids=str
)
def test_an_entry_that_lacks_figures_is_as_none(tmp_path: Path, change: dict[str, Any]) -> None:
    state = _left(tmp_path / FILE)
    (entry,) = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    (tmp_path / FILE).write_text(json.dumps({**entry, **change}) + "\n")
    result = _step(_again(tmp_path / FILE, state), 5, 2.5)
    assert result.verified
    assert "no earlier attempt has left figures of step 5" in result.text


def test_bad_numbers_and_bad_files(tmp_path: Path) -> None:
    for folder, loss in ((tmp_path, float("nan")), (tmp_path / "nowhere", 2.5)):
        check = ResumeCheck(folder / FILE, 0, HERE)
        check.at_save(4, None)
        assert _step(check, 5, loss) is None and not list(tmp_path.iterdir()), "training goes on"
    (tmp_path / FILE).write_bytes(b'{"id": "torn')
    assert _step(_again(tmp_path / FILE, _left(tmp_path / FILE)), 5, 2.5).verified


@pytest.fixture(scope="module")
def left(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that was lost at step 6; its checkpoint is of step 4."""
    folder = tmp_path_factory.mktemp("left")
    pool(2).run(train_run, str(folder), "--training.steps=6", "--checkpoint.interval=4")
    shutil.rmtree(folder / "checkpoint" / "step-6")
    return folder


def _resume(
    pool: Pools, ranks: int, left: Path, folder: Path, *flags: str, function: Any = train_run
) -> dict[str, Any]:
    shutil.copytree(left, folder)
    found: dict[str, Any] = pool(ranks).run(function, str(folder), *flags, "--training.steps=6")[0]
    return found


def _line(found: dict[str, Any]) -> str:
    (line,) = [line for line in found["said"] if line.lower().startswith("resume ")]
    return str(line)


def _numbers(folder: Path) -> list[float]:
    """Return loss and gradient norm of step 5, as a run logged them."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        row[name]
        for row in rows
        if row.get("step") == 5
        for name in ("loss", "grad_norm")
        if name in row
    ]


@pytest.mark.parametrize(
    ("ranks", "end"), [(2, "bit for bit"), pytest.param(1, "2 then, 1 now", marks=pytest.mark.slow)]
)
def test_a_run_that_goes_on_is_verified(
    pool: Pools, left: Path, tmp_path: Path, ranks: int, end: str
) -> None:
    result = _line(_resume(pool, ranks, left, tmp_path / "run"))
    assert result.startswith(
        "resume verified at step 4: every file is as it was written; the next batch is the one"
    )
    # On some processors other numbers of ranks add up to the same bits.
    same = _numbers(left) == _numbers(tmp_path / "run")
    assert same or ranks == 1
    assert ("bit for bit" if same else end) in result


def _late(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """A run whose loader begins one step later than it was told."""
    move = TrainLoader.load_state_dict

    def late(self: TrainLoader, state: dict[str, int]) -> None:
        move(self, {"next_sequence": state["next_sequence"] + 8})

    with patch.object(TrainLoader, "load_state_dict", late):
        return train_run(world, folder, *flags, "--data.prefetch=0")


@pytest.mark.slow
def test_a_skipped_batch_is_found(pool: Pools, left: Path, tmp_path: Path) -> None:
    found = _line(_resume(pool, 2, left, tmp_path / "run", function=_late))
    assert found.startswith("RESUME NOT VERIFIED at step 4: the next batch is not the one")


@pytest.mark.slow
def test_schedule_and_text_can_begin_anew(pool: Pools, left: Path, tmp_path: Path) -> None:
    anew = "--checkpoint.exclude_from_loading=lr_scheduler,dataloader"
    found = _resume(pool, 2, left, tmp_path / "run", anew, "--checkpoint.interval=5")
    before = losses_of(
        json.loads(line) for line in (left / "metrics.jsonl").read_text().splitlines()
    )  # type: ignore[arg-type]
    now = losses_of(found["rows"])
    assert [now[step][2] for step in (5, 6)] == [before[step][2] for step in (1, 2)]
    assert any("but with new schedule, text" in line for line in found["said"])
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-6")
    again = pool(2).run(train_run, str(tmp_path / "run"), "--training.steps=6", anew)[0]
    assert losses_of(again["rows"])[6] == now[6], "the schedule and the text continue"
    assert "bit for bit" in _line(again)


@pytest.mark.slow
def test_other_shares_of_a_mixture_are_allowed_and_named(pool: Pools, tmp_path: Path) -> None:
    def source(weight: int) -> str:
        return (
            f'--data.source=[{{name="c4_test",weight={weight}}},{{name="c4_validation",weight=3}}]'
        )

    flags = ["--no-validation.enable", "--checkpoint.interval=4"]
    pool(1).run(train_run, str(tmp_path), *flags, source(1), "--training.steps=4")
    again = _line(pool(1).run(train_run, str(tmp_path), *flags, source(9), "--training.steps=5")[0])
    assert again.startswith("resume verified at step 4: ")
    assert "the next batch is another one, as allowed: data.source and data.phase" in again
    same = _line(pool(1).run(train_run, str(tmp_path), *flags, source(9), "--training.steps=6")[0])
    assert "the next batch is the one that was to come" in same
