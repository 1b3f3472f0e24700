from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.run_folders import Start
from titanlite.runs import provenance, record

CONFIG = '[job]\ndump_folder = "x"\n\n[optimizer]\nlr = {lr}\n'


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start(folder, lr=…, **more)` records a start on two made-up ranks, without git; `begin`'s
    lines are `.lines`.
    """
    monkeypatch.setattr(provenance, "git_state", lambda: provenance.GitState({"commit": "c0"}))

    def started(
        folder: Path, lr: float = 0.001, more_config: str = "", **more: Any
    ) -> record.AttemptRecord:
        about = {
            "steps": 40,
            "ranks": 2,
            "device": "CPU (made up)",
            "resumed": more.get("step", 0) > 0,
            **more,
        }
        found, lines = record.begin(
            folder, record.Start(config_toml=CONFIG.format(lr=lr) + more_config, **about)
        )
        found.lines = lines  # type: ignore[attr-defined]
        return found

    return started
