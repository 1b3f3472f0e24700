"""benchmarks/levels.py: the order of its runs, its figures, and the levels as shipped files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

import benchmarks.gpu_ladder as gpu_ladder
import benchmarks.levels as levels
from benchmarks.levels import levels_of
from tests.support.processes import ROOT
from tests.support.run_folders import begin, end, training_row, write_metrics, written
from titanlite.config.load import read
from titanlite.contrib.lab.members import Member, MemberResult
from titanlite.resolve.load import load_config

CONFIGS = ROOT / "train_configs"
#: Tokens per second and rank; each repeat is half as fast as the one before.
SPEEDS = {"default": 1000.0, "compile": 1500.0}


def test_levels_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def run(members: Sequence[Member], _: Any, folder: Path, ranks: int) -> list[MemberResult]:
        (member,) = members
        made.append(member.name)
        level, _, repeat = member.name.rpartition("-")
        speed = SPEEDS[level] / 2 ** (int(repeat) - 1)
        # The first two steps are slow, and the first uses most memory.
        rows = [
            training_row(
                step,
                9 - step / 10 + (0.001 if level == "compile" and step > 1 else 0),
                speed if step > 2 else 1.0,
                memory_gib=2.5 if step == 1 else 2.0,
            )
            for step in range(1, 7)
        ]
        write_metrics(folder / member.name, rows)
        written(folder / member.name, begin(1, None, 0, ranks=2), end(1, 9, 6))
        config, _ = read(member.arguments([], folder))
        (folder / member.name / "config.toml").write_text(config.to_toml())
        return [MemberResult(member.name, "done", 6, 8.4, "")]

    monkeypatch.setattr(levels, "run_members", run)
    words = [str(CONFIGS / "debug_model.toml"), "--out", str(tmp_path), "--steps=6", "--warmup=2"]
    words += ["--ranks=2", "--repeats=3", "--skip=float8", "--skip=float8-all-gather"]
    assert levels.main(words) == 0
    assert made == [f"{name}-{i}" for i in (1, 2, 3) for name in sorted(SPEEDS, reverse=i != 2)]
    found = json.loads((tmp_path / levels.RESULTS).read_text())
    assert found["config"]["compile"]["training.compile"] is True
    default, compiled = found["levels"]
    # Two ranks; the median is that of the second repeat.
    assert (default["tokens_per_second"], compiled["tokens_per_second"]) == (1000, 1500)
    assert compiled["ratio"] == [1.5, 1.5, 1.5]
    assert (default["memory_gib"], default["loss"]) == (2.5, pytest.approx(8.4))
    assert (default["loss_difference"], default["loss_spread"]) == (None, 0)
    assert compiled["loss_difference"] == pytest.approx(0.001)


def values(*arguments: str) -> dict[str, Any]:
    """A config without its place and description."""
    config, problems = read(arguments)
    assert not problems
    found: dict[str, Any] = to_builtins(config.sections)
    for name in ("dump_folder", "description", "config_file", "extends"):
        found["job"].pop(name, None)
    return found


def test_every_setting_of_gpu_sh_has_a_valid_config() -> None:
    for setting in gpu_ladder.SETTINGS.values():
        load_config(str(gpu_ladder.CONFIGS / setting.config), 1, [])


def test_the_shipped_levels_are_those_of_the_benchmark() -> None:
    found = levels_of(str(CONFIGS / "llama3_8b.toml"), [])
    shipped = ("level1_default", "level2_compile", "level3_float8", "level4_float8_all_gather")
    for words, name in zip(found.values(), shipped, strict=True):
        assert values(*words) == values(f"--job.config_file={CONFIGS}/llama3_8b_{name}.toml")
