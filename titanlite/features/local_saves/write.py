"""One local save, on all ranks together."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.checkpoint.async_save import Copy
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manager import Save, check_finite
from titanlite.checkpoint.manifest import FAST_HASH, Manifest, digest_of, file_digest
from titanlite.checkpoint.storage import RNG, Tensors, Written, on_each_rank, on_rank_0
from titanlite.dist.dist_env import DistEnv, gather_objects
from titanlite.dist.local import plain_local
from titanlite.features.local_saves.abandoned import LINE, SHARED, Past
from titanlite.features.local_saves.copies import Copies
from titanlite.features.local_saves.folder import (
    ABOUT,
    GENERATORS,
    LocalFolder,
    part_name,
    part_path,
    publish,
    remove,
)
from titanlite.features.local_saves.part import bytes_of, write_part
from titanlite.utils import human_bytes, sync

#: Beside a part: manifest and generators.
_SMALL_FILES = 16 << 20


@dataclass(frozen=True)
class LocalWriter:
    """Writes local saves. All ranks make one and call it together.

    keep: saves that stay on a node. read_back: compare each file with its hash after the write.
    layout: hash of where all ranks' tensors lie.
    """

    world: DistEnv
    folder: LocalFolder
    keep: int
    read_back: bool
    layout: str
    past: Past
    copies: Copies

    def write(self, save: Save, copy: Copy, group: dist.ProcessGroup) -> None:
        """Write the parts of all ranks, then the manifest beside each.

        Raises WeightsError, on all ranks, for a value that is not finite. Raises CheckpointError,
        on all ranks, where one fails: then no rank keeps its part.
        """
        check_finite(save, group)
        # They would take the space of this one.
        self._drop_failed(group)
        if save.proven:
            # Saves that were not proven may have left more than `keep`.
            on_each_rank(lambda: self.folder.prune(self.keep), group)
        state = on_each_rank(lambda: copy(save.tensors), group)
        step = save.draft.step
        identity = on_rank_0(self.world, lambda: uuid.uuid4().hex[:16], group)
        rows = state[RNG]
        state = {name: tensor for name, tensor in state.items() if name != RNG}
        self._check_space(state, group)
        try:
            written = on_each_rank(lambda: self._write_part(step, identity, state), group)
            parts = gather_objects((written, plain_local(rows).numpy().tobytes()), group)
            generators = b"".join(row for _, row in parts)
            files = [file for file, _ in parts]
            past = {LINE: self.past.line, SHARED: self.past.newest}
            about = {"save": identity, "layout": self.layout, **past}
            manifest = _manifest(save.draft, about, files, generators)
            content = on_rank_0(self.world, lambda: manifest.to_json().encode(), group)
            own = self.folder.step(step)
            path = part_path(own, identity)
            folders = [own, *self.copies.exchange(path, files, step, self.read_back, group)]
            on_each_rank(lambda: self._finish(folders, path, written, generators), group)
            # Each part is whole: from the first manifest on this is a save.
            on_each_rank(lambda: publish(folders, content), group)
        except CheckpointError:
            # All ranks know of it, also where some have published: a part without a manifest would
            # keep its space. Where a rank is lost, the next start decides.
            remove(self.folder.step(step))
            for owner in self.copies.owners:
                remove(self.folder.copy(owner, step))
            raise
        if save.proven:
            on_each_rank(lambda: self.folder.prune(self.keep), group)

    def _drop_failed(self, group: dist.ProcessGroup) -> None:
        """Delete parts of saves of which no rank has a manifest."""
        published = gather_objects(on_each_rank(self.folder.published, group), group)
        on_each_rank(lambda: self.folder.drop_failed(set().union(*published)), group)

    def _check_space(self, state: Tensors, group: dist.ProcessGroup) -> None:
        """Raise CheckpointError, on all ranks, where a node has too little space for its parts."""
        place, free = on_each_rank(self._place, group)
        # Copies of others are about as large.
        need = (bytes_of(state) + _SMALL_FILES) * (1 + len(self.copies.owners))
        needs = gather_objects((place, need), group)
        total = sum(need for other, need in needs if other == place)

        def check() -> None:
            if free < total:
                raise CheckpointError(
                    f"{self.folder.root} has {human_bytes(free)} free, and the parts of this node "
                    f"take {human_bytes(total)}: free space, or lower "
                    "checkpoint.local_keep_latest_k"
                )

        on_each_rank(check, group)

    def _place(self) -> tuple[tuple[str, int], int]:
        """Return the disk that this rank writes to, and its free bytes."""
        self.folder.mine.mkdir(parents=True, exist_ok=True)
        device = os.stat(self.folder.mine).st_dev
        return (socket.gethostname(), device), shutil.disk_usage(self.folder.root).free

    def _write_part(self, step: int, identity: str, state: Tensors) -> Written:
        folder = self.folder.step(step)
        # An earlier save of this step is replaced.
        remove(folder)
        folder.mkdir(parents=True)
        return write_part(part_path(folder, identity), state)

    def _finish(
        self, folders: Sequence[Path], part: Path, written: Written, generators: bytes
    ) -> None:
        """Write the generators, and read back what this rank has written."""
        for folder in folders:
            with (folder / GENERATORS).open("wb") as stream:
                stream.write(generators)
                sync(stream)
        if self.read_back and file_digest(part, FAST_HASH) != written.digest:
            raise CheckpointError(f"what was written could not be read back: {part} has changed")


def _manifest(
    draft: Manifest, about: dict[str, Any], parts: list[Written], generators: bytes
) -> Manifest:
    files = {GENERATORS: len(generators)}
    hashes = {GENERATORS: digest_of(generators)}
    for rank, part in enumerate(parts):
        files[part_name(rank)] = part.size
        hashes[part_name(rank)] = part.digest
    return replace(draft, train={**draft.train, ABOUT: about}, files=files, hashes=hashes)
