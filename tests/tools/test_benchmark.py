"""The whole command, over a stand-in for the trainer (order, table, failure, signals, resume) and over real runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.pool import Pools
from tests.tiny import TWO_LAYERS, size
from tests.tools.stand_in import SPEEDS
from titanlite.build import build
from titanlite.fit import check_config
from titanlite.parallel.dist_env import DistEnv
from titanlite.tools import benchmark as room
from titanlite.tools.cli import main
from titanlite.trainer import Trainer

ROOT = Path(__file__).parents[2]
Benchmark = Callable[..., tuple[int, str, str]]
STAND_IN = [sys.executable, str(ROOT / "tests" / "tools" / "stand_in.py")]
ORDER = ["default-1", "compile-1", "more-1", "compile-2", "more-2", "default-2", "more-3", "default-3", "compile-3"]
FILES = ("benchmark.md", "benchmark.json", "losses.png", "throughput.png")


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Benchmark:
    """`benchmark(*words)`: three levels, three repeats of six steps in out/; exit code, output, errors."""
    monkeypatch.setattr(room.torchrun, "command", lambda ranks, arguments: [*STAND_IN, *arguments])
    monkeypatch.setattr(room, "probe", lambda: room.Machine("CPU (made up)"))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    (tmp_path / "more.toml").write_text('[activation_checkpoint]\nmode = "full"\n')
    (tmp_path / "base.toml").write_text('[compile]\nbackend = "aot_eager"\n[training]\nsteps = 100\n')

    def run(*words: str) -> tuple[int, str, str]:
        skipped = ("--skip", "float8", "--skip", "float8-all-gather", "--overlay", f"more={tmp_path}/more.toml")
        size = ("--steps", "6", "--warmup", "2", "--out", str(tmp_path / "out"))
        code = main(["benchmark", str(tmp_path / "base.toml"), *size, *skipped, *words])
        return code, *capsys.readouterr()

    return run


def log(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().split()


def results(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "benchmark.json").read_text())


@pytest.mark.slow
def test_levels_take_turns_and_the_results_are_printed_and_written(benchmark: Benchmark, tmp_path: Path) -> None:
    code, out, err = benchmark()
    assert code == 0, err
    assert log(tmp_path) == ORDER
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split() and line.split()[0] in SPEEDS}
    # Two ranks; the machine halves its speed with every repeat, so the median is that of the second.
    assert rows["default"] == ["default", "1,000", "1", "–", "2.50", "8.4000", "baseline", "3", "of", "3"]
    assert rows["compile"][1:5] == ["1,500", "1.50", "(1.50–1.50)", "–"]
    assert rows["compile"][-5:] == ["8.4010", "0.001", "3", "of", "3"]
    assert rows["more"][1:3] == ["500", "0.50"] and rows["more"][-4] == "0.002"
    said = [line[9:] for line in err.splitlines()]
    assert said[0].startswith("run 1 of 9: default, repeat 1 starts") and "2,000 tokens/s, loss 8.4000" in said[1]

    folder = tmp_path / "out"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "levels", "runs"])
    assert out.endswith(f"written: {', '.join(str(folder / n) for n in FILES)}\n")
    found = results(tmp_path)
    assert found["levels"][1]["ratio"] == [1.5, 1.5, 1.5] and found["levels"][1]["tokens_per_second"] == 1500
    assert found["hardware"] == {"device": "CPU (made up)", "world_size": 2, "cores": os.cpu_count()}
    assert found["runs"][0]["losses"]["6"] == pytest.approx(8.4)
    assert found["config"]["more"]["activation_checkpoint.mode"] == "full"
    page = (folder / "benchmark.md").read_text()
    assert all(line in page for line in out.splitlines() if line[:4] in ("defa", "comp", "more"))
    assert "(losses.png)" in page and f"more: {tmp_path}/more.toml over default" in page
    assert all(Image.open(folder / name).size[0] > 500 for name in FILES[2:])
    assert benchmark("--warmup", "3")[0] == 0  # only counts other steps
    assert log(tmp_path) == ORDER, "finished runs are kept"


@pytest.mark.slow
def test_after_a_failed_run_the_same_command_makes_the_missing_runs(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAIL", "more-1")
    code, out, err = benchmark("--repeats", "1")
    assert code == 1 and log(tmp_path) == ORDER[:3] and "0 of 1" in out
    assert "run 3 of 3: more, repeat 1 failed with exit code 3" in err
    assert "    error: the cat sat on the keyboard\n" in err and "--skip more" in err
    monkeypatch.delenv("STAND_IN_FAIL")
    (tmp_path / "more.toml").write_text("[training]\nglobal_batch_size = 32\n[data]\nseed = 5\n")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = benchmark("--repeats", "1")
    assert code == 0 and log(tmp_path) == [*ORDER[:3], "more-1"]
    assert "more differs from default in data.seed, sequences per step: losses not compared" in out
    levels = results(tmp_path)["levels"]
    assert levels[2]["loss_difference"] is None and levels[1]["loss_difference"] == pytest.approx(0.001)
    assert "throughput.png are not drawn" in err and out.endswith("benchmark.json\n")


@pytest.mark.slow
def test_runs_of_another_benchmark_are_refused_with_the_differences(benchmark: Benchmark, tmp_path: Path) -> None:
    words = ("--repeats", "1", "--skip", "more", "--skip", "compile")
    assert benchmark(*words)[0] == 0
    record = tmp_path / "out" / "runs" / "default-1" / "run.json"
    for flag, difference in (
        ("--optimizer.lr=0.5", "optimizer.lr: 0.0008 there, 0.5 now"),
        ("--ranks=1", "ranks: 2 there, 1 now"),
        ("--repeats=1", 'version of torch: "2.0" there'),
    ):
        if "torch" in difference:
            attempts = json.loads(record.read_text())
            attempts["attempts"][0]["versions"]["torch"] = "2.0"
            record.write_text(json.dumps(attempts))
        code, out, err = benchmark(*words, flag)
        assert code == 2 and out == "" and difference in err
    assert log(tmp_path) == ["default-1"]


DEBUG = str(ROOT / "train_configs" / "debug_model.toml")
TINY = [*TWO_LAYERS, "--training.batch_size=2", "--compile.backend=aot_eager"]
SHORT = ["--ranks", "1", "--steps", "3", "--warmup", "1", "--repeats", "1"]


def _train(world: DistEnv, arguments: list[str]) -> None:
    """One run of a benchmark, on ranks that exist already."""
    _, run = check_config(arguments, world.size)
    try:
        Trainer(build(run, world)).train()
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
def test_all_four_levels_train_in_the_pool(
    pool: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command without torchrun: every level's own file, trained by real ranks."""

    def run(command: list[str], console: Path, device_type: str) -> int:
        pool(1).run(_train, command[command.index("train") + 1 :], timeout=600)
        return 0

    monkeypatch.setattr(room, "run", run)
    monkeypatch.setattr(room, "probe", lambda: room.Machine("CPU (made up)"))
    words = [*TINY, *size(64, 1, 4, 16), "--compile.backend=eager", "--out", str(tmp_path), *SHORT]
    assert main(["benchmark", DEBUG, *words]) == 0
    found, said = json.loads((tmp_path / "benchmark.json").read_text()), capsys.readouterr().out
    losses = {run["level"]: run["losses"] for run in found["runs"]}
    assert list(losses) == ["default", "compile", "float8", "float8-all-gather"]
    assert losses["compile"]["1"] == pytest.approx(losses["default"]["1"], abs=1e-5)
    assert losses["compile"]["3"] == pytest.approx(losses["default"]["3"], abs=1e-4)
    for level in ("float8", "float8-all-gather"):
        assert losses[level]["1"] == pytest.approx(losses["default"]["1"], abs=0.02)  # the same weights and text
        assert losses[level]["3"] == pytest.approx(losses["default"]["3"], abs=0.05)
        # And yet other products; by then, as the first step of a small model may show none.
        assert losses[level]["3"] != losses["compile"]["3"]
    assert "float8 is emulated in float8, float8-all-gather: compare their losses, not their speed" in said
