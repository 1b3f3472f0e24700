from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and no launcher's numbers of ranks."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "NGPU"):
        monkeypatch.delenv(name, raising=False)
