"""The levels as files, and all that is checked before the first run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite.cli import main
from titanlite.config.errors import ConfigError
from titanlite.config.load import load_file
from titanlite.metrics.throughput import device_name
from titanlite.tools.benchmark_levels import (
    LEVELS,
    SWITCHES,
    BenchmarkError,
    Machine,
    check_levels,
    common_flags,
    make_levels,
    probe,
    refuse_own_keys,
    write_levels,
)

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "train_configs"
SHIPPED = ("level1_default", "level2_compile", "level3_float8", "level4_float8_all_gather")


def values(path: Path) -> dict[str, Any]:
    """The config of a file, without where it writes and what it is called."""
    found = load_file(path).dialect.model_dump()
    return {
        **found,
        "job": {k: v for k, v in found["job"].items() if k not in ("dump_folder", "description")} | NO_FILES,
    }


NO_FILES = {"config_file": None, "extends": []}


def test_the_shipped_levels_are_those_of_the_ladder(tmp_path: Path) -> None:
    levels = make_levels(CONFIGS / "llama3_8b.toml", [])
    write_levels(levels, tmp_path)
    assert len(levels) == len(SHIPPED)
    for level, name in zip(levels, SHIPPED, strict=True):
        shipped = CONFIGS / f"llama3_8b_{name}.toml"
        assert values(tmp_path / level.file) == values(shipped)
        config = load_file(shipped)
        assert config.dialect.job.dump_folder == f"./outputs/{shipped.stem}"
        assert config.files[0].endswith("llama3_8b.toml") and len(config.files) == levels.index(level) + 2


def test_each_level_adds_to_the_one_below(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[training]\ncompile = true\n[float8]\nenable_float8_linear = true\n")
    write_levels(make_levels(tmp_path / "base.toml", []), tmp_path / "levels")
    on: list[str] = []
    for level in LEVELS:
        config = load_file(tmp_path / "levels" / f"{level.name}.toml")
        on += level.adds
        assert [key for key in SWITCHES if config.value(key)] == on


def test_an_overlay_lies_over_the_first_level(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[training]\ncompile = true\nseq_len = 64\n")
    (tmp_path / "over.toml").write_text('[activation_checkpoint]\nmode = "full"\n[training]\nseq_len = 32\n')
    write_levels(make_levels(tmp_path / "base.toml", [f"full={tmp_path}/over.toml"]), tmp_path / "levels")
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
    (tmp_path / "seeded.toml").write_text(
        '[training]\nseed = 7\n[checkpoint]\nenable_checkpoint = true\nstart = "resume"'
    )
    flags = common_flags(str(tmp_path / "seeded.toml"), [], 20, ranks=2)
    assert "--training.seed=7" in flags and "--checkpoint.start=resume-or-fresh" in flags
    load_file(tmp_path / "seeded.toml", flags)  # without a checkpoint "resume" would be a contradiction


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("--training.steps=5", "use --steps"),
        ("--training.tokens=500", "use --steps"),
        ("--job.dump_folder=x", "--out names"),
        ("--training.compile", "the levels differ in this key"),
        ("--compile.enable=true", "the levels differ in this key"),
        ("--checkpoint.enable_checkpoint", "save no checkpoints"),
    ],
)
def test_flags_of_what_the_ladder_decides_are_refused(flag: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_own_keys(["--optimizer.lr=1e-3", flag])
    assert flag[2:].partition("=")[0] in str(caught.value) and advice in str(caught.value)
    assert len(caught.value.problems) == 1


def check(tmp_path: Path, text: str, *overlays: str) -> Any:
    (tmp_path / "base.toml").write_text(text)
    levels = make_levels(tmp_path / "base.toml", overlays)
    levels = [level for level in levels if not level.name.startswith("float8")]
    write_levels(make_levels(tmp_path / "base.toml", overlays), tmp_path / "levels")
    common = common_flags(str(tmp_path / "levels" / "default.toml"), [], 5, ranks=2)
    return check_levels(levels, tmp_path / "levels", common, 2, Machine("cpu", "CPU (made up)", 0))


def test_all_that_is_wrong_with_levels_is_said_at_once_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text("[training]\nseq_len = 0\nstepz = 4\n")
    (tmp_path / "unbuilt.toml").write_text("[experimental]\nenable_compiled_autograd = true\n")
    overlays = [f"{name}={tmp_path / name}.toml" for name in ("wrong", "unbuilt")]
    with pytest.raises(BenchmarkError) as caught:
        check(tmp_path, '[compile]\nbackend = "aot_eager"\n', *overlays)
    said = str(caught.value)
    assert said.startswith("2 of 4 levels cannot run; nothing was started\n  level wrong:\n")
    assert f"{tmp_path}/wrong.toml:3: training.stepz: unknown key\n        nearest: training.steps" in said
    assert f"{tmp_path}/wrong.toml:2: training.seq_len: expected" in said
    assert f"level unbuilt:\n    {tmp_path}/unbuilt.toml:2: experimental.enable_compiled_autograd: true is not" in said
    assert said.endswith("to run the others: --skip wrong --skip unbuilt")


def test_what_is_wrong_with_the_config_itself_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, "[training]\nbatchsize = 3\n")
    (problem,) = caught.value.problems
    assert problem.key == "training.batchsize"


def test_what_this_machine_lacks_is_found_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError) as caught:
        check(tmp_path, '[compile]\nbackend = "nosuch"\n')
    said = str(caught.value)
    assert 'level compile:\n    compile.backend: torch has no backend "nosuch"' in said
    assert said.endswith("to run the others: --skip compile")


def test_gpus_without_float8_are_found_before_the_first_run_and_cpus_emulate_it(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('[compile]\nbackend = "aot_eager"\n')
    levels = make_levels(tmp_path / "base.toml", [])
    write_levels(levels, tmp_path / "levels")
    common = common_flags(str(tmp_path / "levels" / "default.toml"), [], 5, ranks=2)
    old = Machine("cuda", "A100 (made up)", 2, ("A100 has compute capability 8.0", "set it to false"))
    with pytest.raises(BenchmarkError) as caught:
        check_levels(levels, tmp_path / "levels", common, 2, old)
    problem = "    float8.enable_float8_linear: A100 has compute capability 8.0\n        set it to false"
    assert str(caught.value).count(problem) == 2
    assert str(caught.value).endswith("--skip float8 --skip float8-all-gather")
    new = check_levels(levels, tmp_path / "levels", common, 2, Machine("cuda", "H100 (made up)", 2))
    assert [one.plans.float8.enable and one.plans.float8.emulate for one in new] == [False] * 4 and new[
        3
    ].plans.float8.precompute
    cpu = check_levels(levels, tmp_path / "levels", common, 2, Machine("cpu", "CPU (made up)", 0))
    assert [one.plans.float8.enable and one.plans.float8.emulate for one in cpu] == [False, False, True, True]


def test_this_machine_is_what_torch_sees() -> None:
    found = probe()
    assert found.gpus == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert found.device == device_name(torch.device("cuda" if found.gpus else "cpu"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nosuch.toml"], 'no file "nosuch.toml"'),
        (["debug_model.toml", "--steps", "5", "--warmup", "5"], "--steps 5: no step is left to count"),
        (["debug_model.toml", "--warmup", "0"], "--warmup 0: expected at least 1: the first step compiles"),
        (["debug_model.toml", "--repeats", "0"], "--repeats 0: expected at least 1"),
        (
            ["debug_model.toml", "--skip", "compiled"],
            "--skip compiled: unknown level; the levels are default, comp",
        ),
        (["debug_model.toml", *(w for level in LEVELS for w in ("--skip", level.name))], "--skip leaves no level"),
        (["debug_model.toml", "--overlay", "x.toml"], "--overlay x.toml: expected NAME=FILE.toml"),
        (["debug_model.toml", "--overlay", "../x=x.toml"], "expected NAME=FILE.toml"),
        (["debug_model.toml", "--overlay", "x=nosuch.toml"], "there is no file nosuch.toml"),
        (["debug_model.toml", "--overlay", "compile={config}"], "there is a level compile already"),
        (["debug_model.toml", "--training.compile"], "training.compile: cannot be set here"),
    ],
)
def test_mistakes_on_the_command_line_end_it_before_anything_is_written(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.replace("{config}", str(CONFIGS / "debug_model.toml")) for word in words]
    assert main(["benchmark", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert not list(tmp_path.iterdir())


def _tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


AMPERE = Machine("cuda", "A100 (made up)", 2, ("A100 has compute capability 8.0", "set it to false"))
#: words, machine, message
REFUSED: dict[str, tuple[list[str], Machine, str]] = {
    "config": (["--training.batchsize", "3"], Machine("cpu", "CPU", 0), "training.batchsize: unknown key"),
    "a level": (["--skip", "compile"], AMPERE, "A100 has compute capability 8.0"),
    "ranks": (["--ranks", "3"], AMPERE, "this machine has 2"),
    "numbers": (["--metrics.log_freq", "5"], Machine("cpu", "CPU", 0), "logs no steps between"),
}


@pytest.mark.parametrize("there", [False, True], ids=["no folder", "files of another benchmark"])
@pytest.mark.parametrize(("words", "machine", "said"), REFUSED.values(), ids=REFUSED)
def test_a_refused_benchmark_writes_nothing(
    words: list[str],
    machine: Machine,
    said: str,
    there: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("titanlite.tools.benchmark_levels.probe", lambda: machine)
    (tmp_path / "base.toml").write_text('[compile]\nbackend = "aot_eager"\n')
    (tmp_path / "more.toml").write_text('[activation_checkpoint]\nmode = "full"\n')
    if there:
        write_levels(make_levels(CONFIGS / "debug_model.toml", []), tmp_path / "outputs/benchmark/base/levels")
    before = _tree(tmp_path)
    sizes = ["--steps", "5", "--warmup", "4", "--repeats", "1"]
    assert main(["benchmark", "base.toml", "--overlay", "more=more.toml", *sizes, *words]) == 2
    assert said in capsys.readouterr().err
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("name", ["benchmark", "ladder"])
def test_help_names_the_levels(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["benchmark", "--help"])
    out = capsys.readouterr().out
    for words in (
        *(level.name for level in LEVELS),
        "--skip LEVEL",
        "--overlay NAME=FILE.toml",
        "Exit status",
        "emulated",
    ):
        assert words in out
