"""Checkpoints of earlier titanlites load, with their values, on one rank and on two."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.golden import CONFIG, HERE, PRINTS, STEP, TRAIN, expected, make, named
from tests.checkpoint.runs import flip, options
from tests.pool import Pools
from titanlite.checkpoint import Checkpointer, CheckpointError
from titanlite.checkpoint.manifest import FORMAT, find, read_manifest
from titanlite.parallel.dist_env import DistEnv


def _load(world: DistEnv, folder: str) -> dict[str, Any]:
    model, optimizer = make()
    loaded = Checkpointer(options(folder, start="resume"), world, PRINTS).load(model, optimizer)
    assert loaded is not None
    draw = torch.rand(())
    wrong = [
        name for name, tensor in named(model, optimizer).items() if not torch.equal(tensor, expected(name, tensor))
    ]
    return {"step": loaded.step, "train": loaded.train, "notices": loaded.notices, "wrong": wrong, "draw": draw.item()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("format", range(1, FORMAT + 1))
def test_golden_checkpoint_loads(pool: Pools, format: int, ranks: int) -> None:
    folder = HERE / f"format-{format}"
    before = {path.name: path.read_bytes() for path in (folder / f"step-{STEP}").iterdir()}
    assert read_manifest(folder / f"step-{STEP}").format == format
    for found in pool(ranks).run(_load, str(folder)):
        assert found["wrong"] == [] and found["step"] == STEP and found["train"] == TRAIN
        assert any("without hashes" in line for line in found["notices"]) == (format == 1)
        if ranks == 1:
            torch.manual_seed(1234)
            assert found["draw"] == torch.rand(()).item(), "the random generator is part of a checkpoint"
    assert {path.name: path.read_bytes() for path in (folder / f"step-{STEP}").iterdir()} == before


def test_golden_checkpoints_are_small_and_hold_their_config() -> None:
    files = [path for path in HERE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 96 << 10
    manifest, _ = find(HERE / f"format-{FORMAT}")
    assert manifest is not None and manifest.config == CONFIG


def test_a_changed_old_one_is_not_told_from_a_good_one(tmp_path: Path) -> None:
    """What format 1 cannot do, and why its loading is noted; what its manifest says by shape is still checked."""
    folder = shutil.copytree(HERE / "format-1" / "step-3", tmp_path / "step-3")
    flip(folder / "__0_0.distcp")
    assert read_manifest(folder).hashes == {}
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(folder)
