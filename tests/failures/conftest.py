from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.train_runs import STEPS, finish, flags, rows


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`straight(ranks)`: eight steps that nothing happens to, trained once."""

    @cache
    def trained(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("straight")
        finish(flags(folder), ranks, folder / "console")
        assert [row[0] for row in rows(folder)] == list(range(1, STEPS + 1))
        return folder

    return trained
