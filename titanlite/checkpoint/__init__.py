"""Checkpoints: written aside by `torch.distributed.checkpoint`, then published with a manifest by one rename."""

from titanlite.checkpoint.checkpointer import Checkpointer, LoadedState
from titanlite.checkpoint.manifest import CheckpointError, Manifest

__all__ = ["CheckpointError", "Checkpointer", "LoadedState", "Manifest"]
