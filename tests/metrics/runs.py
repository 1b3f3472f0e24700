"""Trainers of tiny runs, inside the pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.training.test_run import TINY
from titanlite.build import build
from titanlite.fit import load_config
from titanlite.parallel.dist_env import DistEnv
from titanlite.trainer import Trainer

#: Stands in for what a callback does not read.
ANY: Any = None


def at_step(step: int) -> Any:
    """What a callback that only asks for the step needs of a trainer."""
    return SimpleNamespace(step=step, phase=lambda _: None)


def make_trainer(world: DistEnv, folder: str, *flags: str) -> Trainer:
    """A trainer of the debug model, as `train.py` makes it."""
    config = load_config("debug_model.toml", world.size, [*TINY, f"--job.dump_folder={folder}", *flags])
    return Trainer(build(config, world))
