"""The axes of pictures."""

from __future__ import annotations

import pytest

from titanlite.cli.pictures import Axis, ticks


@pytest.mark.parametrize(
    "losses",
    [
        [2.0, 2.0],
        [0.0, 0.0],
        [1.0, 1.0 + 2e-16],
        [3.0, 3.0 + 1e-9],
        [1e15, 1e15 + 0.1],
    ],
)
def test_losses_that_hardly_differ_have_ticks(losses: list[float]) -> None:
    lines = Axis(ticks(*losses, 6), 0, 100).lines()
    assert 2 <= len(lines) == len(dict(lines)) <= 12
    assert lines[-1][1] == 100
