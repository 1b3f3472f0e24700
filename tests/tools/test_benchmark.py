"""The whole command, over a stand-in for the trainer (order, table, failure, signals, resume) and over real runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.pool import Pools
from tests.tiny import TWO_LAYERS, size
from tests.tools.stand_in import SPEEDS
from titanlite.build import build
from titanlite.config.load import load_file
from titanlite.fit import check_config
from titanlite.parallel.dist_env import DistEnv
from titanlite.tools import benchmark as room
from titanlite.tools import processes
from titanlite.tools.benchmark import LEVELS, SWITCHES
from titanlite.tools.cli import main
from titanlite.tools.plots import COLORS
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
    assert [line["level"] for line in found["levels"]] == ["default", "compile", "more"]
    assert found["levels"][1]["ratio"] == [1.5, 1.5, 1.5] and found["levels"][1]["tokens_per_second"] == 1500
    assert found["hardware"] == {"device": "CPU (made up)", "world_size": 2, "cores": os.cpu_count()}
    assert found["versions"]["torch"] and found["command"][0] == "titanlite"
    assert found["runs"][0]["losses"]["6"] == pytest.approx(8.4)
    assert found["config"]["more"]["activation_checkpoint.mode"] == "full"
    page = (folder / "benchmark.md").read_text()
    assert "| compile | 1,500 | 1.50 (1.50–1.50) | – | 2.50 | 8.4010 | 0.001 | 3 of 3 |" in page
    assert "![losses](losses.png)" in page and f"more: {tmp_path}/more.toml over default" in page
    # A bar as long as its speed: compile's, the fastest, three times that of more.
    pixels = np.asarray(Image.open(folder / "throughput.png").convert("RGB")).astype(int)
    colors = [np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) for color in COLORS[:3]]
    lengths = [(np.abs(pixels - color).max(axis=2) < 12).sum(axis=1).max() for color in colors]
    assert lengths[1] / lengths[0] == pytest.approx(1.5, rel=0.03)
    assert lengths[1] / lengths[2] == pytest.approx(3.0, rel=0.03)
    assert Image.open(folder / "losses.png").size[0] > 500

    assert benchmark("--warmup", "3")[0] == 0  # only counts other steps
    assert log(tmp_path) == ORDER, "finished runs are kept"


@pytest.mark.slow
def test_after_a_failed_run_the_same_command_makes_the_missing_runs(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAIL", "more-1")
    code, out, err = benchmark("--repeats", "1")
    assert code == 1 and log(tmp_path) == ORDER[:3]
    assert "run 3 of 3: more, repeat 1 failed with exit code 3. Its last lines:" in err
    assert "    error: the cat sat on the keyboard\n" in err and "--skip more" in err
    assert "0 of 1" in out and "2,000" in out
    assert len(results(tmp_path)["runs"]) == 2
    assert benchmark("--repeats", "1", "--skip", "more")[0] == 0 and log(tmp_path) == ORDER[:3]
    monkeypatch.delenv("STAND_IN_FAIL")
    code, _, err = benchmark("--repeats", "2")
    assert code == 0 and "2 of 6 runs are in" in err
    assert log(tmp_path) == [*ORDER[:3], "more-1", *ORDER[3:6]]


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


@pytest.mark.soak
def test_other_text_or_weights_are_not_compared_by_loss(benchmark: Benchmark, tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text("[training]\nglobal_batch_size = 32\n[data]\nseed = 5\n")
    code, out, _ = benchmark("--repeats", "1")
    assert code == 0
    assert "more differs from default in data.seed, sequences per step: losses not compared" in out
    levels = results(tmp_path)["levels"]
    assert levels[2]["loss_difference"] is None and levels[1]["loss_difference"] == pytest.approx(0.001)


@pytest.mark.soak
def test_a_signal_ends_the_current_run_and_keeps_the_others(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_HANG", "compile-1")
    number = signal.SIGTERM

    def send() -> None:
        while not (tmp_path / "hangs").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    began = time.monotonic()
    code, out, err = benchmark()
    sender.join()
    assert time.monotonic() - began < 30
    assert code == 128 + number and f"stopped by {number.name}" in err
    assert "2,000" in out and "1 of 3" in out
    assert all((tmp_path / "out" / name).exists() for name in FILES)
    assert subprocess.run(["pgrep", "-f", f"{tmp_path}/out/runs/compile-1"]).returncode == 1, "it is alive"
    monkeypatch.delenv("STAND_IN_HANG")
    assert benchmark()[0] == 0 and log(tmp_path) == [*ORDER[:2], *ORDER[1:]]


@pytest.mark.soak
def test_without_matplotlib_there_is_still_a_table(
    benchmark: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = benchmark("--repeats", "1")
    assert code == 0 and "throughput.png are not drawn" in err and "pip install 'titanlite[plots]'" in err
    assert "png" not in (tmp_path / "out" / "benchmark.md").read_text() and out.endswith("benchmark.json\n")


def test_the_report_of_torchrun_is_no_last_line(tmp_path: Path) -> None:
    (tmp_path / "console").write_text(
        "step: 1\nerror: out of cats\n"
        "W1121 12:00:00.123000 4242 torch/distributed/elastic/multiprocessing/api.py:1010] Sending process 1\n"
        "E1121 12:00:00.456000 4242 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1)\n"
        "Traceback (most recent call last):\n  ...\n"
    )
    assert processes.last_lines(tmp_path / "console") == ["step: 1", "error: out of cats"]


DEBUG = str(ROOT / "train_configs" / "debug_model.toml")
TINY = [*TWO_LAYERS, "--training.batch_size=2", "--compile.backend=aot_eager"]
SHORT = ["--ranks", "1", "--steps", "3", "--warmup", "1", "--repeats", "1"]


@pytest.mark.slow
def test_one_level_trains_for_real(tmp_path: Path) -> None:
    skipped = [word for level in LEVELS[1:] for word in ("--skip", level.name)]
    command = [sys.executable, "-m", "titanlite.tools.cli", "ladder", DEBUG, *TINY, *skipped, *SHORT]
    found = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    variables = {**found, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "outputs/benchmark/debug_model"
    (run,) = json.loads((out / "benchmark.json").read_text())["runs"]
    rows = (out / "runs/default-1/metrics.jsonl").read_text().splitlines()
    losses = {str(row["step"]): row["loss"] for row in map(json.loads, rows)}
    assert run["losses"] == losses and len(losses) == 3 and 7.5 < losses["1"] < 8.5
    assert run["tokens_per_second"] > 0
    assert re.search(r"^default +[\d,]+ +1 +– ", done.stdout, re.MULTILINE)


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
    on: list[str] = []
    for level in LEVELS:
        config = load_file(tmp_path / "runs" / f"{level.name}-1" / "config.toml")
        on += level.adds
        assert [key for key in SWITCHES if config.value(key)] == on
        assert config.value("float8.emulate") == config.value("float8.enable_float8_linear")
