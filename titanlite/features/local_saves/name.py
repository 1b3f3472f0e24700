"""The folder of a run's local saves on this node."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manifest import digest_of
from titanlite.checkpoint.paths import AnyPath, to_path, write_new
from titanlite.checkpoint.storage import on_each_rank, on_rank_0
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.launch_env import this_rank
from titanlite.features.local_saves.folder import RUN_ID

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint

_LETTERS = 16


def local_root(config: Checkpoint, world: DistEnv, group: dist.ProcessGroup | None) -> Path:
    """Return the folder of this run's local saves on this node. All ranks call it together.

    The name depends on an id beside the shared checkpoints, and on their place. So runs never mix:
    a run begun anew, or a copy of one, has another name.

    Raises CheckpointError, on all ranks, where one of them cannot write there.
    """
    name = on_rank_0(world, lambda: _run_name(to_path(config.folder)), group)
    folder = Path((config.local_folder or "").replace("{local_rank}", str(this_rank().local_rank)))
    root = folder / name

    def make() -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.local_folder: {root} cannot be made: {error.strerror}"
            ) from None
        if not os.access(root, os.W_OK):
            raise CheckpointError(f"checkpoint.local_folder: {root} cannot be written to")

    assert group is not None
    on_each_rank(make, group)
    return root


def _run_name(shared: AnyPath) -> str:
    """On rank 0: return the name of a run's local folders. The first start makes its id."""
    path = shared / RUN_ID
    if isinstance(shared, Path):
        shared.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        write_new(path, uuid.uuid4().hex.encode())
    return name_of(shared, path.read_bytes().decode(errors="replace"))


def name_of(shared: AnyPath, identity: str) -> str:
    """Return the name of the local folders of the run whose shared checkpoints lie in a folder."""
    place = str(shared)
    if isinstance(shared, Path):
        place = os.path.realpath(shared)
    return "run-" + digest_of(f"{identity} {place}".encode()).partition(":")[2][:_LETTERS]
