"""benchmarks/gpu.sh: its configs, and its pieces on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from titanlite.config.errors import ConfigError
from titanlite.prepare import load_plans, model_args

ROOT = Path(__file__).resolve().parents[2]


def _suite() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_suite", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "dim", "seq_len", "sequences"),
    [("ladder-8b", 4096, 8192, 1), ("loss-8b", 4096, 8192, 1), ("rival-7b", 4096, 4096, 8)],
)
def test_settings_are_the_published_ones(name: str, dim: int, seq_len: int, sequences: int) -> None:
    suite = _suite()
    setting = suite.SETTINGS[name]
    plans = load_plans(str(suite.CONFIGS / setting.config), 1, list(setting.flags))
    assert (plans.batch.seq_len, plans.batch.global_batch_size, plans.activations.mode) == (seq_len, sequences, "full")
    assert model_args(plans.model).dim == dim and plans.shard.param_dtype == "bfloat16"


def test_what_is_not_built_is_all_that_keeps_a_setting_back() -> None:
    suite = _suite()
    with pytest.raises(ConfigError) as caught:
        load_plans(str(suite.CONFIGS / suite.SETTINGS["kahan-8b"].config), 1, [])
    assert all("is not built yet" in problem.message for problem in caught.value.problems)


def test_a_piece_that_failed_is_told_as_such_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = _suite()
    monkeypatch.setattr(
        suite, "facts", lambda: {"device": "CPU", "driver and power limit": "", "cuda": "", "versions": {}}
    )
    odd = suite.Setting("llama3_8b.toml", 4, 2, 1, flags=("--model.overrides.n_heads=7",))
    suite.SETTINGS["odd"] = odd
    suite.PIECES = {"odd": lambda bench: suite.climb(bench, "odd")}
    bench = suite.Bench(tmp_path / "gpu", False, float("inf"))
    for _ in range(2):
        assert suite.run(bench, ["odd"], False) == 1
        said = capsys.readouterr().out
        assert "odd: running" in said and "Failed: model: " in said and "n_heads = 7 does not divide dim = 4096" in said


@pytest.mark.slow
def test_pieces_that_are_done_are_kept_and_what_does_not_run_is_told(tmp_path: Path) -> None:
    command = ["benchmarks/gpu.sh", "machine", "kahan-8b", "--toy", "--out", str(tmp_path / "gpu")]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}

    def run() -> str:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = run()
    assert "machine: running" in first and "copy within the device's memory" in first
    assert "Not measured: optimizer." in first and "is not built yet" in first
    found = json.loads((tmp_path / "gpu" / "machine.json").read_text())
    assert found["rows"][0]["value"] > 0 and found["versions"]["torch"] and found["sources"]
    second = run()
    assert "machine: done before" in second and "kahan-8b: done before" in second
    assert second[second.index("# On one GPU") :] == first[first.index("# On one GPU") :]
