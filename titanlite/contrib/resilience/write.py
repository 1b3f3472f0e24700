"""One local save, on all ranks together."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from titanlite.checkpoint.async_save import Copy
from titanlite.checkpoint.dcp_files import Written
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manifest import FAST_HASH, digest_of, file_digest
from titanlite.checkpoint.state_dict import (
    RNG,
    Save,
    Tensors,
    check_finite,
    on_each_rank,
    on_rank_0,
)
from titanlite.contrib.resilience.copies import Copies
from titanlite.contrib.resilience.folder import (
    ABOUT,
    GENERATORS,
    part_name,
    part_path,
    publish,
    remove,
)
from titanlite.contrib.resilience.part import write_part
from titanlite.dist.dist_env import DistEnv, gather_objects
from titanlite.dist.local_parts import plain_local
from titanlite.utils import atomic_write

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint


@dataclass(frozen=True)
class LocalWriter:
    """Writes local saves. All ranks make one and call it together.

    layout: hash of where all tensors lie. line: as `Past.line`.
    """

    world: DistEnv
    config: Checkpoint
    layout: str
    line: str
    copies: Copies

    def write(self, save: Save, copy: Copy, group: dist.ProcessGroup) -> None:
        """Write the parts of all ranks, then the manifest beside each.

        Raises WeightsError for a value that is not finite, and CheckpointError where one rank
        fails; then no rank keeps its part. All ranks raise it together.
        """
        check_finite(save, group)
        local = self.copies.folder
        if save.proven:
            # Saves that were not proven may have left more than these.
            on_each_rank(lambda: local.prune(self.config.local_keep_latest_k), group)
        state = on_each_rank(lambda: copy(save.tensors), group)
        step = save.draft.step
        identity = on_rank_0(self.world, lambda: uuid.uuid4().hex[:16], group)
        rows = state[RNG]
        state = {name: tensor for name, tensor in state.items() if name != RNG}
        try:
            written = on_each_rank(lambda: self._write_part(step, identity, state), group)
            parts = gather_objects((written, plain_local(rows).numpy().tobytes()), group)
            generators = b"".join(row for _, row in parts)
            files = [file for file, _ in parts]
            content = on_rank_0(
                self.world, lambda: self._manifest(save, identity, files, generators), group
            )
            own = local.step(step)
            path = part_path(own, identity)
            read_back = self.config.verify_saves
            folders = [own, *self.copies.exchange(path, files, step, read_back, group)]
            on_each_rank(lambda: self._finish(folders, path, written, generators), group)
            # Each part is whole: from the first manifest on this is a save.
            on_each_rank(lambda: publish(folders, content), group)
        except BaseException:
            # A part without a manifest would keep its space.
            remove(local.step(step))
            for owner in self.copies.owners:
                remove(local.copy(owner, step))
            raise
        if save.proven:
            on_each_rank(lambda: local.prune(self.config.local_keep_latest_k), group)

    def _write_part(self, step: int, identity: str, state: Tensors) -> Written:
        folder = self.copies.folder.step(step)
        # An earlier save of this step is replaced.
        remove(folder)
        folder.mkdir(parents=True)
        return write_part(part_path(folder, identity), state)

    def _finish(
        self, folders: Sequence[Path], part: Path, written: Written, generators: bytes
    ) -> None:
        for folder in folders:
            atomic_write(folder / GENERATORS, generators)
        if self.config.verify_saves and file_digest(part, FAST_HASH) != written.digest:
            raise CheckpointError(f"what was written could not be read back: {part} has changed")

    def _manifest(
        self, save: Save, identity: str, parts: Sequence[Written], generators: bytes
    ) -> bytes:
        files = {GENERATORS: len(generators)}
        hashes = {GENERATORS: digest_of(generators)}
        for rank, part in enumerate(parts):
            files[part_name(rank)] = part.size
            hashes[part_name(rank)] = part.digest
        about = {"save": identity, "layout": self.layout, "line": self.line}
        train = {**save.draft.train, ABOUT: about}
        return replace(save.draft, train=train, files=files, hashes=hashes).to_json().encode()
