"""From the same weights and batches titanlite and torchtitan 0.2.2 log the same losses.

torchtitan's side is stored: `python benchmarks/torchtitan_losses.py --write` runs it and renews
torchtitan_losses.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.equal_start import train_titanlite
from titanlite.dist.dist_env import DistEnv

GOLDEN = json.loads((Path(__file__).parent / "torchtitan_losses.json").read_text())
#: Nats per token. When stored, the largest difference was 1e-6: one rounding of a float32 of that
#: size.
WITHIN = 1e-5
Rows = list[dict[str, float]]


def _torchtitan(ranks: int) -> Rows:
    (steps,) = [
        run["steps"] for run in GOLDEN["runs"] if (run["dtype"], run["ranks"]) == ("float32", ranks)
    ]
    return steps


def _train(world: DistEnv, folder: str, *flags: str) -> Rows:
    return train_titanlite(world, Path(folder), *flags)


def _largest_difference(name: str, ours: Rows, theirs: Rows) -> float:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [1, 2, 3, 4]
    return max(abs(a[name] - b[name]) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_float32_losses_are_torchtitans(pool, tmp_path, ranks, sync):
    """Both average over the step's valid tokens, wherever they are; `max_loss` is the mean loss of
    the worst rank.
    """
    ours = pool(ranks).run(_train, str(tmp_path), f"--training.gradient_sync={sync}")[0]
    theirs = _torchtitan(ranks)
    assert [row["lr"] for row in ours] == pytest.approx([row["lr"] for row in theirs], rel=1e-12)
    assert _largest_difference("loss", ours, theirs) <= WITHIN
    assert _largest_difference("max_loss", ours, theirs) <= WITHIN
    if ranks > 1:
        assert max(row["max_loss"] - row["loss"] for row in theirs) > 1000 * WITHIN, (
            "ranks of unequal weight"
        )
    assert [row["grad_norm"] for row in ours] == pytest.approx(
        [row["grad_norm"] for row in theirs], rel=1e-5
    )
