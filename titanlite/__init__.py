"""titanlite trains Llama-family language models with PyTorch FSDP2 from one TOML file.

    config = load_config("debug_model.toml", world.size)
    Trainer(build(config, world)).train()

Importing it is quick: `import titanlite` loads neither torch nor any room. The names below, and rooms such as
`titanlite.parallel`, are imported when they are first used.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from titanlite._version import __version__

if TYPE_CHECKING:
    from titanlite.build import TrainingComponents, build, read_datasets
    from titanlite.callbacks import Callback
    from titanlite.checkpoint import Checkpointer
    from titanlite.fit import load_config
    from titanlite.guard import FiniteGuard
    from titanlite.parallel.dist_env import DistEnv
    from titanlite.signals import StopSignal
    from titanlite.step import PlainRunner, StepResult, TrainStep, validate
    from titanlite.trainer import Trainer

#: Public name → where it is.
_NAMES = {
    "Callback": "callbacks:Callback",
    "Checkpointer": "checkpoint.manager:Checkpointer",
    "FiniteGuard": "guard:FiniteGuard",
    "PlainRunner": "step:PlainRunner",
    "StepResult": "step:StepResult",
    "StopSignal": "signals:StopSignal",
    "TrainStep": "step:TrainStep",
    "Trainer": "trainer:Trainer",
    "TrainingComponents": "build:TrainingComponents",
    "DistEnv": "parallel.dist_env:DistEnv",
    "build": "build:build",
    "load_config": "fit:load_config",
    "read_datasets": "build:read_datasets",
    "validate": "step:validate",
}
__all__ = [
    "Callback",
    "Checkpointer",
    "FiniteGuard",
    "PlainRunner",
    "StepResult",
    "StopSignal",
    "TrainStep",
    "Trainer",
    "TrainingComponents",
    "DistEnv",
    "__version__",
    "build",
    "load_config",
    "read_datasets",
    "validate",
]


def _rooms() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        module, _, attribute = _NAMES[name].partition(":")
        return getattr(importlib.import_module(f"titanlite.{module}"), attribute)
    if name.startswith("_") or name not in _rooms():
        raise AttributeError(f"module 'titanlite' has no attribute {name!r}")
    return importlib.import_module(f"titanlite.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, *_rooms()})
