"""The statement of data and compute beside exported weights, by hand arithmetic."""

from __future__ import annotations

import json
import shutil
import sys
import types
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pool import Pools
from tests.support.run_folders import strict_lines, written
from tests.support.steps import train_rows
from titanlite import load_config
from titanlite.assembly.datasets import read_datasets
from titanlite.cli.hub.export_weights import convert
from titanlite.config.load import load_file
from titanlite.contrib.hub.data_statement import sources_of
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, load_tokenizer
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics.energy import EnergyMeter

SEQ, STEPS, BATCH = 64, 8, 4
FLAGS = [
    f"--training.seq_len={SEQ}",
    "--training.batch_size=2",
    "--model.overrides.n_layers=1",
    "--lr_scheduler.total_steps=8",
    "--training.warmup_steps=1",
    "--checkpoint.enable_checkpoint",
    "--no-validation.enable",
    "--data.skip_steps=[2]",
]


def _train(world: DistEnv, folder: str, *flags: str) -> float:
    """Return the peak memory in GiB by the rows that are there."""
    return max(row["memory_gib"] for row in train_rows(world, folder, *flags) if "loss" in row)


@pytest.fixture(scope="module")
def made(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], float]:
    """A run of two sources on two ranks, resumed once; its flags, and its peak memory."""
    folder = tmp_path_factory.mktemp("statement")
    for name, words in {"a": "one two three", "b": "red green"}.items():
        lines = [json.dumps({"text": f"{words} {number} " * 9}) for number in range(100)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [
        f'{{path = "{folder}/a.jsonl", weight = 2.0, license = "CC-BY-4.0"}}',
        f'{{name = "bee", path = "{folder}/b.jsonl"}}',
    ]
    flags = [*FLAGS, f"--data.source=[{', '.join(sources)}]"]
    run = folder / "run"
    for steps in (STEPS // 2, STEPS):
        peak = pool(2).run(_train, str(run), *flags, f"--training.steps={steps}")[0]
    return run, flags, peak


def statement(run: Path, target: Path) -> tuple[dict[str, Any], str]:
    convert(run, target, "hf")
    return json.loads((target / "statement.json").read_bytes()), (
        target / "statement.md"
    ).read_text()


def test_tokens_of_sources_hours_and_flops(
    made: tuple[Path, list[str], float], tmp_path: Path
) -> None:
    run, flags, peak = made
    found, page = statement(run, tmp_path / "hf")
    text = read_datasets(load_config("debug_model.toml", 2, flags)).train
    # Step 2 is left out: nine steps of sequences without the second.
    trained = [index for index in range((STEPS + 1) * BATCH) if index // BATCH != 1]
    names = [text.text_at(index)[0] for index in trained]
    tokenizer = load_tokenizer(str(BUNDLED_TOKENIZER))
    for source, name, file in zip(
        found["sources"], (str(run.parent / "a.jsonl"), "bee"), "ab", strict=True
    ):
        lines = (run.parent / f"{file}.jsonl").read_text().splitlines()
        # Each document has a BOS and an EOS.
        epoch = sum(len(tokenizer.encode(json.loads(line)["text"])) + 2 for line in lines)
        tokens = SEQ * names.count(name)
        assert source["tokens"] == tokens
        assert source["share"] == tokens / (STEPS * BATCH * SEQ)
        assert source["epochs"] == pytest.approx(tokens / epoch)
    first, second = found["sources"]
    assert found["tokens"] == first["tokens"] + second["tokens"] == STEPS * BATCH * SEQ
    assert (first["name"], first["license"]) == ("…/a.jsonl", "CC-BY-4.0")
    assert (second["name"], second["license"]) == ("bee", None)
    # Attention, SwiGLU of width 768, three norms, the head; scores and weighted values.
    weights = 4 * 256**2 + 3 * 256 * 768 + 3 * 256 + 2304 * 256
    assert found["flops_per_token"] == 6 * weights + 12 * 256 * SEQ
    assert found["flops"] == found["tokens"] * found["flops_per_token"]
    lines = strict_lines(run / "attempts.jsonl")
    ends = [line["time"] for line in lines if line["event"] in ("start", "end")]
    times = [datetime.fromisoformat(end).timestamp() for end in ends]
    hours = [(times[1] - times[0]) / 3600, (times[3] - times[2]) / 3600]
    assert found["hours"] == pytest.approx(hours)
    assert found["device_hours"] == pytest.approx(2 * sum(hours))
    assert (found["ranks"], found["skipped_steps"]) == ([2, 2], [2])
    assert found["gpu_energy_kwh"] is None
    assert found["peak_memory_gib"] == peak
    assert "| bee | not stated | " in page
    assert "| energy | not measured |" in page
    assert "- Steps left out: 2." in page
    assert str(run.parent) not in page + json.dumps(found)


def test_without_the_run_what_only_it_knows_is_not_stated_and_measured_energy_is(
    made: tuple[Path, list[str], float], tmp_path: Path
) -> None:
    run = made[0]
    moved = shutil.copytree(run / "checkpoint" / f"step-{STEPS}", tmp_path / f"step-{STEPS}")
    found, page = statement(moved, tmp_path / "hf")
    assert (found["hours"], found["peak_memory_gib"]) == ([], None)
    assert "| time | not stated |" in page
    copy = shutil.copytree(run, tmp_path / "run")
    lines = strict_lines(run / "attempts.jsonl")
    written(copy, *(one | {"joules": 1.8e6} if one["event"] == "end" else one for one in lines))
    found, page = statement(copy, tmp_path / "again")
    assert found["gpu_energy_kwh"] == 1.0
    assert "| energy | 1.000 kWh of the GPUs, by NVML |" in page


def test_one_text_alone_has_all_tokens() -> None:
    config = load_file("debug_model.toml", ["--data.license=MIT"]).sections
    train = {"data": {"next_sequence": 3}, "tokens_seen": 10, "epoch_tokens": {"": 4}}
    expected = {"name": "c4_test", "license": "MIT", "tokens": 10, "share": 1.0, "epochs": 2.5}
    assert sources_of(config, train) == [expected]


def test_energy_of_this_machine_stands_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millijoules of two GPUs, of a run on eight."""
    counters = {0: 5_000, 1: 7_000}
    nvml = types.ModuleType("pynvml")
    nvml.nvmlDeviceGetTotalEnergyConsumption = counters.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", lambda index: index)
    meter = EnergyMeter(8)
    counters.update({0: 6_000, 1: 9_500})
    assert meter.figures() == {"joules": (1.0 + 2.5) * 4}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert meter.figures() == EnergyMeter(8).figures() == {}
