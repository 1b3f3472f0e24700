"""Checkpoints: written by `torch.distributed.checkpoint`, and published by a manifest that is written last.

Modules that need torch are imported when they are first used: `titanlite checkpoint` lists and verifies without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.manifest import CheckpointError, Manifest

if TYPE_CHECKING:
    from titanlite.checkpoint.load import LoadedState
    from titanlite.checkpoint.manager import Checkpointer
    from titanlite.checkpoint.resume_check import ResumeCheck

__all__ = ["CheckpointError", "Checkpointer", "LoadedState", "Manifest", "ResumeCheck"]

_MODULES = {"Checkpointer": "manager", "LoadedState": "load", "ResumeCheck": "resume_check"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
