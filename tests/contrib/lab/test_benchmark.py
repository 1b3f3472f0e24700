"""The whole command, over a stand-in for the trainer (order, table, failure, signals, resume) and
over real runs.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from tests.contrib.lab.stand_in import SPEEDS
from tests.support.pool import Pools
from tests.support.processes import ROOT
from tests.support.run_folders import training_row, write_metrics
from tests.support.tiny import TWO_LAYERS, size
from titanlite import torchrun
from titanlite.assembly.build import build
from titanlite.cli import train
from titanlite.cli.main import main
from titanlite.config.load import load_file, read
from titanlite.contrib.lab import members
from titanlite.contrib.lab.benchmark import LEVELS, SWITCHES, common_flags, levels_of
from titanlite.contrib.lab.benchmark_figures import (
    RunFigures,
    after_warmup,
    measure,
    summarize,
)
from titanlite.dist.dist_env import DistEnv
from titanlite.resolve.load import check_config
from titanlite.runs.provenance import config_values
from titanlite.runs.read import read_run
from titanlite.trainer import Trainer

Benchmark = Callable[..., tuple[int, str, str]]
STAND_IN = [sys.executable, str(Path(__file__).with_name("stand_in.py"))]
ORDER = [
    "default-1",
    "compile-1",
    "more-1",
    "compile-2",
    "more-2",
    "default-2",
    "more-3",
    "default-3",
    "compile-3",
]


@pytest.fixture
def benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Benchmark:
    """`benchmark(*words)`: three levels, three repeats of six steps in out/; exit code, output,
    errors.
    """
    monkeypatch.setattr(torchrun, "command", lambda ranks, arguments: [*STAND_IN, *arguments])
    monkeypatch.setattr(train, "count_gpus", lambda: 0)
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    (tmp_path / "more.toml").write_text('[activation_checkpoint]\nmode = "full"\n')
    (tmp_path / "base.toml").write_text(
        '[compile]\nbackend = "aot_eager"\n[training]\nsteps = 100\n'
    )

    def run(*words: str) -> tuple[int, str, str]:
        skipped = (
            "--skip",
            "float8",
            "--skip",
            "float8-all-gather",
            "--overlay",
            f"more={tmp_path}/more.toml",
        )
        size = ("--steps", "6", "--warmup", "2", "--out", str(tmp_path / "out"))
        code = main(["benchmark", str(tmp_path / "base.toml"), *size, *skipped, *words])
        return code, *capsys.readouterr()

    return run


def log(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().split()


def results(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "benchmark.json").read_text())


@pytest.mark.slow
def test_levels_take_turns_and_the_results_are_printed_and_written(
    benchmark: Benchmark, tmp_path: Path
) -> None:
    code, out, err = benchmark()
    assert code == 0, err
    assert log(tmp_path) == ORDER
    rows = {
        line.split()[0]: line.split()
        for line in out.splitlines()
        if line.split() and line.split()[0] in SPEEDS
    }
    # Two ranks; the machine halves its speed with every repeat, so the median is that of the
    # second.
    assert rows["default"] == [
        "default",
        "1,000",
        "1.00",
        "(1.00–1.00)",
        "–",
        "2.50",
        "8.4000",
        "–",
        "3",
        "of",
        "3",
    ]
    assert rows["compile"][1:5] == ["1,500", "1.50", "(1.50–1.50)", "–"]
    assert rows["compile"][-5:] == ["8.4010", "0.001", "3", "of", "3"]
    assert rows["more"][1:3] == ["500", "0.50"]
    assert rows["more"][-4] == "0.002"
    said = [line[9:] for line in err.splitlines()]
    assert said[0].startswith("default-1 starts; its output: ")
    assert said[2] == "run 1 of 9: default, repeat 1 is done"

    folder = tmp_path / "out"
    assert sorted(path.name for path in folder.iterdir()) == ["benchmark.json", "runs"]
    found = results(tmp_path)
    assert found["levels"][1]["ratio"] == [1.5, 1.5, 1.5]
    assert found["levels"][1]["tokens_per_second"] == 1500
    assert found["runs"][0]["losses"]["6"] == pytest.approx(8.4)
    assert found["config"]["more"]["activation_checkpoint.mode"] == "full"
    assert benchmark("--warmup", "3")[0] == 0  # only counts other steps
    assert log(tmp_path) == ORDER, "finished runs are kept"


@pytest.mark.slow
def test_after_a_failed_run_the_same_command_makes_the_missing_runs(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAIL", "more-1")
    code, out, err = benchmark("--repeats", "1")
    assert code == 1
    assert log(tmp_path) == ORDER[:3]
    assert "0 of 1" in out
    assert "run 3 of 3: more, repeat 1 failed with exit code 3" in err
    assert "    error: the cat sat on the keyboard\n" in err
    assert "--skip leaves a level out" in err
    monkeypatch.delenv("STAND_IN_FAIL")
    code, out, err = benchmark("--repeats", "1")
    assert code == 0
    assert log(tmp_path) == [*ORDER[:3], "more-1"]
    assert results(tmp_path)["levels"][1]["loss_difference"] == pytest.approx(0.001)


DEBUG = str(ROOT / "train_configs" / "debug_model.toml")
TINY = [*TWO_LAYERS, "--training.batch_size=2", "--compile.backend=aot_eager"]
SHORT = ["--ranks", "1", "--steps", "3", "--warmup", "1", "--repeats", "1"]


def _train(world: DistEnv, arguments: list[str]) -> None:
    """One run of a benchmark, on ranks that exist already."""
    _, run = check_config(arguments, world.size)
    Trainer(build(run, world)).train()


@pytest.mark.slow
def test_all_four_levels_train_in_the_pool(
    pool: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command without torchrun: every level's own file, trained by real ranks."""

    def run(command: list[str], console: Path, **more: Any) -> int:
        pool(1).run(_train, command[command.index("train") + 1 :], timeout=600)
        return 0

    monkeypatch.setattr(members, "run", run)
    monkeypatch.setattr(train, "count_gpus", lambda: 0)
    words = [*TINY, *size(64, 1, 4, 16), "--compile.backend=eager", "--out", str(tmp_path), *SHORT]
    assert main(["benchmark", DEBUG, *words]) == 0
    found = json.loads((tmp_path / "benchmark.json").read_text())
    losses = {run["level"]: run["losses"] for run in found["runs"]}
    assert list(losses) == ["default", "compile", "float8", "float8-all-gather"]
    assert losses["compile"]["1"] == pytest.approx(losses["default"]["1"], abs=1e-5)
    assert losses["compile"]["3"] == pytest.approx(losses["default"]["3"], abs=1e-4)
    for level in ("float8", "float8-all-gather"):
        assert losses[level]["1"] == pytest.approx(
            losses["default"]["1"], abs=0.02
        )  # the same weights and text
        assert losses[level]["3"] == pytest.approx(losses["default"]["3"], abs=0.05)
        # And yet other products; by then, as the first step of a small model may show none.
        assert losses[level]["3"] != losses["compile"]["3"]


CONFIGS = ROOT / "train_configs"
SHIPPED = ("level1_default", "level2_compile", "level3_float8", "level4_float8_all_gather")


def values(*arguments: str) -> dict[str, Any]:
    """A config without its place and description."""
    config, problems = read(arguments)
    assert not problems
    found = to_builtins(config.sections)
    job = {
        k: v
        for k, v in found["job"].items()
        if k not in ("dump_folder", "description", "config_file", "extends")
    }
    return {**found, "job": job}


def test_the_shipped_levels_are_those_of_the_command() -> None:
    levels = levels_of(str(CONFIGS / "llama3_8b.toml"), [], [])
    for i, (words, name) in enumerate(zip(levels.values(), SHIPPED, strict=True)):
        shipped = CONFIGS / f"llama3_8b_{name}.toml"
        assert values(*words) == values(f"--job.config_file={shipped}")
        config = load_file(shipped)
        assert config.sections.job.dump_folder == f"./outputs/{shipped.stem}"
        assert config.files[0].endswith("llama3_8b.toml")
        assert len(config.files) == i + 2


def test_each_level_adds_to_the_one_before_and_an_overlay_to_the_first(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        "[training]\ncompile = true\nseq_len = 64\n[float8]\nenable_float8_linear = true\n"
    )
    (tmp_path / "over.toml").write_text(
        '[activation_checkpoint]\nmode = "full"\n[training]\nseq_len = 32\n'
    )
    (tmp_path / "on.toml").write_text("training.compile = true\n")
    overlays = [f"full={tmp_path}/over.toml", f"on={tmp_path}/on.toml"]
    levels = levels_of(str(tmp_path / "base.toml"), overlays, [])
    configs = [read(words)[0] for words in levels.values()]
    on: list[str] = []
    for (_, adds), config in zip(LEVELS.values(), configs, strict=False):
        on += adds
        assert [key for key in SWITCHES if config.value(key)] == on
        assert config.value("training.seq_len") == 64
    full, switched = configs[4:]
    assert (full.value("training.compile"), full.value("training.seq_len")) == (False, 32)
    assert full.value("activation_checkpoint.mode") == "full"
    assert [key for key in SWITCHES if switched.value(key)] == ["training.compile"]


def test_the_runs_are_the_first_steps_of_the_configs_own_schedule(tmp_path: Path) -> None:
    (default,) = levels_of(str(CONFIGS / "llama3_8b.toml"), [], list(LEVELS)[1:]).values()
    flags = common_flags(default, ["--training.seq_len=64"], 20, ranks=2)
    for flag in ("--training.steps=20", "--training.seed=0", "--lr_scheduler.total_steps=50000"):
        assert flag in flags
    assert flags[-1] == "--training.seq_len=64"
    for off in ("checkpoint.enable_checkpoint", "validation.enable", "metrics.enable_tensorboard"):
        assert f"--{off}=false" in flags
    seeded = tmp_path / "seeded.toml"
    seeded.write_text(
        '[training]\nseed = 7\n[checkpoint]\nenable_checkpoint = true\nstart = "resume"'
    )
    flags = common_flags(levels_of(str(seeded), [], [])["default"], [], 20, ranks=2)
    assert "--training.seed=7" in flags
    assert "--checkpoint.start=resume-or-fresh" in flags
    load_file(seeded, flags)  # without a checkpoint "resume" would be a contradiction


def test_keys_that_need_checkpoints_or_validation_do_not_refuse_a_config(tmp_path: Path) -> None:
    folder = json.dumps(str(tmp_path))
    text = (
        f"[checkpoint]\nenable_checkpoint = true\nfolder = {folder}\ninitial_load_path = {folder}\n"
        'start = "resume"\ncreate_seed_checkpoint = true\nmilestones = [1]\n'
        '[validation]\nenable = true\n[guard]\npolicy = "rollback"\n'
        '[metrics]\ntrackers = ["mlflow"]\n'
        '[compile]\nbackend = "aot_eager"\n'
    )
    for found in check(tmp_path, text):
        assert (found["checkpoint.enable_checkpoint"], found["guard.policy"]) == (False, "stop")
        assert found["metrics.trackers"] == []


def check(tmp_path: Path, text: str) -> list[dict[str, Any]]:
    """The values of a config of each level that needs no float8."""
    (tmp_path / "base.toml").write_text(text)
    levels = levels_of(str(tmp_path / "base.toml"), [], ["float8", "float8-all-gather"])
    common = common_flags(levels["default"], [], 5, ranks=2)
    found = []
    for words in levels.values():
        config, _ = check_config([*words, *common], 2)
        found.append(config_values(config.to_toml()))
    return found


def test_the_problems_of_all_levels_are_told_before_the_first_run(
    benchmark: Benchmark, tmp_path: Path
) -> None:
    (tmp_path / "wrong.toml").write_text("[training]\nseq_len = 0\n")
    code, out, err = benchmark("--overlay", f"wrong={tmp_path}/wrong.toml")
    assert (code, out) == (2, "")
    assert f"{tmp_path}/wrong.toml:2: training.seq_len" in err
    (tmp_path / "odd.toml").write_text("[training]\nbatch_size = 3\nglobal_batch_size = 8\n")
    code, out, err = benchmark("--overlay", f"odd={tmp_path}/odd.toml")
    assert (code, out) == (2, "")
    assert "odd-1 cannot start; nothing was started\n" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nosuch.toml"], 'no file "nosuch.toml"'),
        (["debug_model.toml", "--steps", "5", "--warmup", "5"], "--steps 5"),
        (["debug_model.toml", "--skip", "compiled"], "the levels are default, comp"),
        (["debug_model.toml", "--overlay", "x.toml"], "--overlay x.toml: expected NAME=FILE.toml"),
        (
            ["debug_model.toml", "--overlay", "compile={config}"],
            "a plain name other than default, compile",
        ),
        (["debug_model.toml", "--optimizer.lr=1e-3", "--training.tokens=500"], "--steps"),
    ],
)
def test_a_wrong_command_line_is_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.replace("{config}", str(CONFIGS / "debug_model.toml")) for word in words]
    try:
        assert main(["benchmark", *words]) == 2
    except SystemExit as end:  # argparse's own
        assert end.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert not list(tmp_path.iterdir())


def made(
    level: str, repeat: int, speed: float, losses: dict[int, float] | None = None, **more: Any
) -> RunFigures:
    return RunFigures(level, repeat, speed, more.get("mfu"), more.get("memory"), losses or {1: 5.0})


def test_the_warm_up_is_left_out_of_speed_and_mfu_and_not_of_memory_and_losses(
    tmp_path: Path,
) -> None:
    rows = [training_row(1, 8.0, 1, mfu=0.1, memory_gib=3.0), training_row(2, 7.0, 900, mfu=90.0)]
    rows += [training_row(3 + i, 6 - i, tps, mfu=tps / 5) for i, tps in enumerate((100, 130, 110))]
    run = read_run(write_metrics(tmp_path, rows))
    found = measure(run, "default", 1, warmup=2)
    assert found.tokens_per_second == pytest.approx(220)  # 110 on each of two devices
    assert found.mfu == 22
    assert found.memory_gib == 3.0
    assert found.losses == {1: 8.0, 2: 7.0, 3: 6.0, 4: 5.0, 5: 4.0}
    # A row of which a part lies in the warm-up does not count.
    assert [
        row["step"] for row in after_warmup([{"step": float(n)} for n in (1, 10, 20, 25)], 5)
    ] == [20, 25]


def test_ratios_are_taken_repeat_by_repeat() -> None:
    """On a machine that becomes half as fast with each repeat, a level that is twice as fast is
    just that.
    """
    measured = [made("default", i + 1, 100 / 2**i) for i in range(3)]
    measured += [made("compile", i + 1, 200 / 2**i) for i in range(3)]
    measured += [
        made("odd", 1, 90, mfu=40),
        made("odd", 2, 60, mfu=44),
        made("odd", 3, 25),
        made("odd", 4, 60),
    ]
    baseline, compiled, odd, none = summarize(["default", "compile", "odd", "none"], measured)
    assert (baseline.tokens_per_second, compiled.tokens_per_second) == (50, 100)
    assert compiled.ratio == (2, 2, 2)
    assert odd.tokens_per_second == 60
    assert odd.mfu == 42
    assert odd.ratio == (1, pytest.approx(0.9), pytest.approx(1.2)), (
        "of repeats that the baseline has"
    )
    assert none.repeats == 0
    assert none.tokens_per_second is None


def test_losses_differ_by_the_largest_difference_at_equal_steps() -> None:
    base = {1: 8.0, 2: 7.0, 3: 6.0}
    measured = [made("default", 1, 1, base), made("default", 2, 1, {**base, 2: 7.25})]
    measured += [
        made("compile", 1, 1, {1: 8.0, 2: 6.5, 3: 6.125, 4: 99.0}),
        made("compile", 2, 1, base),
    ]
    default, compiled = summarize(["default", "compile"], measured)
    assert default.loss_difference is None
    assert default.loss_spread == 0.25
    assert compiled.loss_difference == 0.5  # and 0.25 in the second repeat
    assert default.loss == 6.0
    assert compiled.loss == pytest.approx((99 + 6) / 2)


def test_a_loss_that_is_no_number_is_not_hidden() -> None:
    for losses in ({1: math.nan, 2: 7.5}, {1: 8.5, 2: math.nan}):
        measured = [made("default", 1, 1, {1: 8.0, 2: 7.0}), made("compile", 1, 1, losses)]
        difference = summarize(["default", "compile"], measured)[1].loss_difference
        assert difference is not None
        assert math.isnan(difference)
