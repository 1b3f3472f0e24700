"""Checkpoints: written aside by `torch.distributed.checkpoint`, then published with a manifest by one rename.

What needs torch is imported when it is first used: `titanlite checkpoint` lists and verifies without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.manifest import CheckpointError, Manifest

if TYPE_CHECKING:
    from titanlite.checkpoint.checkpointer import Checkpointer, LoadedState

__all__ = ["CheckpointError", "Checkpointer", "LoadedState", "Manifest"]


def __getattr__(name: str) -> Any:
    if name not in ("Checkpointer", "LoadedState"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from titanlite.checkpoint import checkpointer

    return getattr(checkpointer, name)
