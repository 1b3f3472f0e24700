"""Checkpoints: written aside by `torch.distributed.checkpoint`, published by one rename, or in a store by its manifest.

What needs torch is imported when it is first used: `titanlite checkpoint` lists and verifies without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.manifest import CheckpointError, Manifest

if TYPE_CHECKING:
    from titanlite.checkpoint.checkpointer import Checkpointer
    from titanlite.checkpoint.loading import LoadedState
    from titanlite.checkpoint.resume_guard import ResumeGuard

__all__ = ["CheckpointError", "Checkpointer", "LoadedState", "Manifest", "ResumeGuard"]

_HOMES = {"Checkpointer": "checkpointer", "LoadedState": "loading", "ResumeGuard": "resume_guard"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
