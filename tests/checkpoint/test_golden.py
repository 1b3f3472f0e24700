"""Checkpoints of earlier titanlites load, with their values, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.checkpoint.golden import CONFIG, HERE, PRINTS, STEP, TRAIN, expected, make, named
from tests.support.checkpoints import options
from tests.support.texts import contents
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.manifest import FORMAT, read_manifest
from titanlite.dist.dist_env import DistEnv


def _load(world: DistEnv, folder: str) -> dict[str, Any]:
    model, optimizer = make()
    loaded = Checkpointer(options(folder, start="resume"), world, PRINTS).load(model, optimizer)
    draw = torch.rand(()).item()
    wrong = [
        name
        for name, tensor in named(model, optimizer).items()
        if not torch.equal(tensor, expected(name, tensor))
    ]
    return {"loaded": loaded, "wrong": wrong, "draw": draw}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("format", range(1, FORMAT + 1))
def test_golden_checkpoint_loads(pool, format, ranks):
    folder = HERE / f"format-{format}"
    step = folder / f"step-{STEP}"
    before = contents(step)
    assert read_manifest(step).format == format
    for found in pool(ranks).run(_load, str(folder)):
        assert found["wrong"] == []
        loaded = found["loaded"]
        assert (loaded.step, loaded.train, loaded.config) == (STEP, TRAIN, CONFIG)
        assert any("without hashes" in line for line in loaded.notices) == (format == 1)
        if ranks == 1:
            torch.manual_seed(1234)
            assert found["draw"] == torch.rand(()).item(), (
                "the random generator is part of a checkpoint"
            )
    assert contents(step) == before
