"""The levels as files, the checks before the first run, and figures from made-up metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from tests.runs.conftest import training_row, write_metrics
from titanlite.config.errors import Problem
from titanlite.config.load import load_file
from titanlite.runs.read import read_run
from titanlite.tools.benchmark import (
    LEVELS,
    SWITCHES,
    BenchmarkError,
    Level,
    Machine,
    check_levels,
    common_flags,
    make_levels,
    write_levels,
)
from titanlite.tools.benchmark_report import RunFigures, after_warmup, measure, summarize
from titanlite.tools.cli import main

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "train_configs"
SHIPPED = ("level1_default", "level2_compile", "level3_float8", "level4_float8_all_gather")
CPU = Machine("CPU (made up)")
AMPERE = Machine("A100 (made up)", 2, [Problem("", "float8.enable_float8_linear", "compute capability 8.0", "set it")])


def values(path: Path) -> dict[str, Any]:
    """The config of a file, without its place and description."""
    found = to_builtins(load_file(path).sections)
    job = {k: v for k, v in found["job"].items() if k not in ("dump_folder", "description", "config_file", "extends")}
    return {**found, "job": job}


def test_the_shipped_levels_are_those_of_the_command(tmp_path: Path) -> None:
    levels = make_levels(CONFIGS / "llama3_8b.toml", [])
    write_levels(levels, tmp_path)
    for i, (level, name) in enumerate(zip(levels, SHIPPED, strict=True)):
        shipped = CONFIGS / f"llama3_8b_{name}.toml"
        assert values(tmp_path / f"{level.name}.toml") == values(shipped)
        config = load_file(shipped)
        assert config.sections.job.dump_folder == f"./outputs/{shipped.stem}"
        assert config.files[0].endswith("llama3_8b.toml") and len(config.files) == i + 2


def test_each_level_adds_to_the_one_before_and_an_overlay_to_the_first(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        "[training]\ncompile = true\nseq_len = 64\n[float8]\nenable_float8_linear = true\n"
    )
    (tmp_path / "over.toml").write_text('[activation_checkpoint]\nmode = "full"\n[training]\nseq_len = 32\n')
    write_levels(make_levels(tmp_path / "base.toml", [f"full={tmp_path}/over.toml"]), tmp_path / "levels")
    on: list[str] = []
    for level in LEVELS:
        config = load_file(tmp_path / "levels" / f"{level.name}.toml")
        on += level.adds
        assert [key for key in SWITCHES if config.value(key)] == on and config.value("training.seq_len") == 64
    config = load_file(tmp_path / "levels" / "full.toml")
    assert (config.value("training.compile"), config.value("training.seq_len")) == (False, 32)
    assert config.value("activation_checkpoint.mode") == "full"


def test_the_runs_are_the_first_steps_of_the_configs_own_schedule(tmp_path: Path) -> None:
    flags = common_flags(str(CONFIGS / "llama3_8b.toml"), ["--training.seq_len=64"], 20, ranks=2)
    for flag in ("--training.steps=20", "--training.seed=0", "--lr_scheduler.total_steps=50000"):
        assert flag in flags
    assert flags[-1] == "--training.seq_len=64"
    for off in ("checkpoint.enable_checkpoint", "validation.enable", "metrics.enable_tensorboard"):
        assert f"--{off}=false" in flags
    seeded = tmp_path / "seeded.toml"
    seeded.write_text('[training]\nseed = 7\n[checkpoint]\nenable_checkpoint = true\nstart = "resume"')
    flags = common_flags(str(seeded), [], 20, ranks=2)
    assert "--training.seed=7" in flags and "--checkpoint.start=resume-or-fresh" in flags
    load_file(seeded, flags)  # without a checkpoint "resume" would be a contradiction


def check(tmp_path: Path, text: str, *overlays: str, machine: Machine = CPU, float8: bool = False) -> list[Level]:
    (tmp_path / "base.toml").write_text(text)
    levels = make_levels(tmp_path / "base.toml", overlays)
    write_levels(levels, tmp_path / "levels")
    common = common_flags(str(tmp_path / "levels" / "default.toml"), [], 5, ranks=2)
    chosen = [level for level in levels if float8 or not level.name.startswith("float8")]
    return check_levels(chosen, tmp_path / "levels", common, 2, machine)


def test_all_problems_of_levels_are_reported_at_once_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text("[training]\nseq_len = 0\nstepz = 4\n")
    (tmp_path / "unbuilt.toml").write_text("[experimental]\nenable_compiled_autograd = true\n")
    with pytest.raises(BenchmarkError) as caught:
        check(
            tmp_path,
            '[compile]\nbackend = "aot_eager"\n',
            *(f"{name}={tmp_path / name}.toml" for name in ("wrong", "unbuilt")),
        )
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("2 of 4 levels cannot run") and lines[-1].endswith(": --skip wrong --skip unbuilt")
    for place in ("wrong.toml:3: training.stepz", "wrong.toml:2: training.seq_len"):
        assert any(line.startswith(f"    {tmp_path}/{place}") for line in lines)
    assert any("unbuilt.toml:2: experimental.enable_compiled_autograd" in line for line in lines)


def test_features_that_this_machine_lacks_are_found_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match='compile.backend: torch has no backend "nosuch"') as caught:
        check(tmp_path, '[compile]\nbackend = "nosuch"\n')
    assert str(caught.value).endswith(": --skip compile")
    text = '[compile]\nbackend = "aot_eager"\n'
    with pytest.raises(BenchmarkError) as caught:
        check(tmp_path, text, machine=AMPERE, float8=True)
    assert str(caught.value).count("    float8.enable_float8_linear: compute capability 8.0") == 2
    assert str(caught.value).endswith(": --skip float8 --skip float8-all-gather")
    for machine, emulated in ((CPU, [False, False, True, True]), (Machine("H100 (made up)", 2), [False] * 4)):
        levels = check(tmp_path, text, machine=machine, float8=True)
        assert [one.values["float8.emulate"] for one in levels] == emulated
        assert [one.values["float8.enable_float8_linear"] for one in levels] == [False, False, True, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nosuch.toml"], 'no file "nosuch.toml"'),
        (["debug_model.toml", "--steps", "5", "--warmup", "5"], "--steps 5"),
        (["debug_model.toml", "--skip", "compiled"], "the levels are default, comp"),
        (["debug_model.toml", *(w for level in LEVELS for w in ("--skip", level.name))], "--skip leaves no level"),
        (["debug_model.toml", "--overlay", "x.toml"], "--overlay x.toml: expected NAME=FILE.toml"),
        (["debug_model.toml", "--overlay", "compile={config}"], "there is a level compile already"),
        (["debug_model.toml", "--optimizer.lr=1e-3", "--training.tokens=500"], "--steps"),
    ],
)
def test_a_wrong_command_line_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.replace("{config}", str(CONFIGS / "debug_model.toml")) for word in words]
    try:
        assert main(["benchmark", *words]) == 2
    except SystemExit as end:  # argparse's own
        assert end.code == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert not list(tmp_path.iterdir())


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
    # A row of which a part lies in the warm-up does not count.
    assert [row["step"] for row in after_warmup([{"step": float(n)} for n in (1, 10, 20, 25)], 5)] == [20, 25]


def test_ratios_are_taken_repeat_by_repeat() -> None:
    """On a machine that becomes half as fast with each repeat, a level that is twice as fast is just that."""
    measured = [made("default", i + 1, 100 / 2**i) for i in range(3)]
    measured += [made("compile", i + 1, 200 / 2**i) for i in range(3)]
    measured += [made("odd", 1, 90, mfu=40), made("odd", 2, 60, mfu=44), made("odd", 3, 25), made("odd", 4, 60)]
    baseline, compiled, odd, none = summarize(["default", "compile", "odd", "none"], measured)
    assert (baseline.tokens_per_second, compiled.tokens_per_second) == (50, 100)
    assert compiled.ratio == (2, 2, 2)
    assert odd.tokens_per_second == 60 and odd.mfu == 42
    assert odd.ratio == (1, pytest.approx(0.9), pytest.approx(1.2)), "of repeats that the baseline has"
    assert none.repeats == 0 and none.tokens_per_second is None


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
