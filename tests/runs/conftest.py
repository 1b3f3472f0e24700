from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from titanlite.prepare import checked_plans
from titanlite.runs import folder as folder_module
from titanlite.runs.folder import RunRecord, begin


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunRecord]:
    """`start(folder, *flags, **more)`: begin a run there on two made-up ranks, without asking git."""
    monkeypatch.setattr(
        folder_module.provenance, "git_state", lambda: folder_module.provenance.GitState({"commit": "c0"})
    )

    def started(folder: Path, *flags: str, **more: Any) -> RunRecord:
        argv = [f"--job.dump_folder={folder}", "--training.steps=40", *flags]
        plans = checked_plans(argv, 2, training=False)[1]
        return begin(folder, plans, **{"world_size": 2, "device": "CPU (made up)", "argv": ["train.py", *argv], **more})

    return started


def training_row(step: int, loss: float | str, tps: float = 100.0, time: float = 0.0, **more: Any) -> dict[str, Any]:
    """A row as two ranks write it: 1,000 tokens a step over both of them."""
    return {
        "step": step,
        "time": time or 1_000_000.0 + step,
        "loss": loss,
        "tps": tps,
        "seconds_per_step": 500 / tps,
        "tokens_seen": 1000 * step,
        "memory_gib": 1.5,
        **more,
    }


def write_metrics(folder: Path, rows: list[Mapping[str, Any]], name: str = "metrics.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
