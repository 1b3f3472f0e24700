"""Figures of a benchmark from made-up metrics, and the order of its runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import training_row, write_metrics
from titanlite.runs.read import read_run
from titanlite.tools.benchmark import Level, in_turn
from titanlite.tools.benchmark_report import RunFigures, after_warmup, measure, summarize


def made(level: str, repeat: int, speed: float, losses: dict[int, float] | None = None, **more: Any) -> RunFigures:
    return RunFigures(level, repeat, speed, more.get("mfu"), more.get("memory"), losses or {1: 5.0})


def test_the_warm_up_is_left_out_of_speed_and_mfu_and_not_of_memory_and_losses(tmp_path: Path) -> None:
    rows = [training_row(1, 8.0, 1, mfu=0.1, memory_gib=3.0), training_row(2, 7.0, 900, mfu=90.0)]
    rows += [training_row(3 + i, 6 - i, tps, mfu=tps / 5) for i, tps in enumerate((100, 130, 110))]
    run = read_run(write_metrics(tmp_path, rows))
    found = measure(run, "default", 1, warmup=2)
    assert found.tokens_per_second == pytest.approx(220)  # 110 on each of two devices
    assert found.mfu == 22 and found.memory_gib == 3.0
    assert found.losses == {1: 8.0, 2: 7.0, 3: 6.0, 4: 5.0, 5: 4.0}
    assert measure(run, "default", 1, warmup=1).tokens_per_second == pytest.approx(240)


def test_a_row_whose_window_begins_in_the_warm_up_does_not_count() -> None:
    rows = [{"step": float(step)} for step in (1, 10, 20, 25)]
    assert [row["step"] for row in after_warmup(rows, 5)] == [20, 25]
    assert [row["step"] for row in after_warmup(rows, 10)] == [20, 25]
    assert [row["step"] for row in after_warmup(rows, 11)] == [25]


def test_ratios_are_taken_repeat_by_repeat() -> None:
    """On a machine that becomes half as fast with each repeat, a level that is twice as fast is just that."""
    measured = [made("default", i + 1, 100 / 2**i) for i in range(3)]
    measured += [made("compile", i + 1, 200 / 2**i) for i in range(3)]
    measured += [made("odd", 1, 90), made("odd", 2, 60), made("odd", 3, 25)]
    baseline, compiled, odd = summarize(["default", "compile", "odd"], measured)
    assert (baseline.tokens_per_second, compiled.tokens_per_second) == (50, 100)
    assert compiled.ratio == (2, 2, 2)
    assert odd.tokens_per_second == 60 and odd.ratio == (1, pytest.approx(0.9), pytest.approx(1.2))


def test_a_level_is_only_set_against_repeats_that_the_baseline_has() -> None:
    measured = [made("default", 1, 100), made("compile", 1, 150), made("compile", 2, 900)]
    missing, lines = "float8", summarize(["default", "compile", "float8"], measured)
    assert lines[1].ratio == (1.5, 1.5, 1.5) and lines[1].repeats == 2
    assert lines[2].level == missing and lines[2].repeats == 0 and lines[2].tokens_per_second is None


def test_losses_differ_by_the_largest_difference_at_equal_steps() -> None:
    base = {1: 8.0, 2: 7.0, 3: 6.0}
    measured = [made("default", 1, 1, base), made("default", 2, 1, {**base, 2: 7.25})]
    measured += [made("compile", 1, 1, {1: 8.0, 2: 6.5, 3: 6.125, 4: 99.0}), made("compile", 2, 1, base)]
    measured += [made("other", 1, 1, {1: 2.0})]
    default, compiled, other = summarize(["default", "compile", "other"], measured, not_comparable=["other"])
    assert default.loss_difference is None and default.loss_spread == 0.25
    assert compiled.loss_difference == 0.5  # and 0.25 in the second repeat
    assert default.loss == 6.0 and compiled.loss == pytest.approx((99 + 6) / 2)
    assert other.loss_difference is None and other.loss == 2.0


def test_a_loss_that_is_no_number_is_not_hidden() -> None:
    for losses in ({1: math.nan, 2: 7.5}, {1: 8.5, 2: math.nan}):
        measured = [made("default", 1, 1, {1: 8.0, 2: 7.0}), made("compile", 1, 1, losses)]
        difference = summarize(["default", "compile"], measured)[1].loss_difference
        assert difference is not None and math.isnan(difference)


def test_mfu_and_memory_over_repeats() -> None:
    measured = [made("default", i, 1, mfu=mfu, memory=memory) for i, mfu, memory in ((1, 40, 2.0), (2, 44, 2.5))]
    (line,) = summarize(["default"], measured)
    assert line.mfu == 42 and line.memory_gib == 2.5
    assert summarize(["default"], [made("default", 1, 1)])[0].mfu is None


def test_each_repeat_begins_with_another_level() -> None:
    slots = in_turn([Level(name, "") for name in "abc"], 4)
    assert [level.name for level, _ in slots] == [*"abc", *"bca", *"cab", *"abc"]
    assert [repeat for _, repeat in slots[2:5]] == [1, 2, 2]
