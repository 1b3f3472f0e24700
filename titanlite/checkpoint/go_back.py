"""Go back to the newest good checkpoint of the same run, as a rollback does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.load import Loader
from titanlite.checkpoint.loaded import LoadedState
from titanlite.checkpoint.manifest import find, step_folder
from titanlite.checkpoint.paths import to_path
from titanlite.checkpoint.retention import quarantine


def load_newest(
    loader: Loader,
    on_rank_0: Callable[[Callable[[], Any]], Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    suspect: Callable[[int], str] | None,
) -> LoadedState:
    """Load as `Checkpointer.load_newest` says. All ranks call it together.

    on_rank_0: returns on all ranks what a function returns on rank 0.
    """
    step = None
    if suspect is not None:
        step = on_rank_0(lambda: _exclude_newest(loader, suspect))
    loaded = None
    if step is not None:
        with contextlib.suppress(CheckpointError):
            loaded = loader.load_newest(model, optimizer)
        replaced = loaded is not None
        on_rank_0(lambda: _settle(loader, step, replaced))
    return loaded or loader.load_newest(model, optimizer)


def _exclude_newest(loader: Loader, suspect: Callable[[int], str]) -> int | None:
    """On rank 0: exclude the newest checkpoint from loading if it is suspect, and return its
    step.
    """
    newest = find(to_path(loader.config.folder), known_bad=loader.bad).manifest
    if newest is None:
        return None
    reason = suspect(newest.step)
    if not reason:
        return None
    loader.bad[newest.step] = reason
    return newest.step


def _settle(loader: Loader, step: int, replaced: bool) -> None:
    """On rank 0: quarantine the suspect one; without another, use it after all."""
    reason = loader.bad.pop(step)
    if replaced:
        quarantine(step_folder(to_path(loader.config.folder), step), reason)
