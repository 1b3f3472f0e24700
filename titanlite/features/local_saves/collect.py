"""Each rank gets its part of a local save: its own, or one with the same hash.

Such a part may be its own on another node, where the ranks have changed places. Or it is that of
a replica, which holds the same shards.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from titanlite.checkpoint.manifest import FAST_HASH, SAFE_HASH, Manifest, file_digest, new_hash
from titanlite.dist.dist_env import DistEnv, gather_objects
from titanlite.features.local_saves.copies import BLOCK, read_block
from titanlite.features.local_saves.folder import (
    GENERATORS,
    LocalFolder,
    part_name,
    part_path,
)
from titanlite.features.local_saves.survey import Offer
from titanlite.utils import counted, new_file, sync

#: Copies that the start report names.
_TOLD = 4


@dataclass(frozen=True)
class Source:
    """Where a rank gets its part from: `holder` finds on its node the part of `owner`."""

    holder: int
    owner: int


@dataclass
class Collector:
    """Collects the parts of one local save. All ranks make one and make the same calls.

    hashes: compare each part with its hash; otherwise with its length alone.
    """

    offer: Offer
    folder: LocalFolder
    world: DistEnv
    group: dist.ProcessGroup | None
    hashes: bool
    #: Lines for the start report.
    notes: list[str]
    #: After `collect`: this rank's part, and the random generators of all ranks.
    path: Path = Path()
    generators: bytes = b""
    #: What is wrong with a part, by its source.
    _bad: dict[Source, str] = field(default_factory=dict)
    #: Hash of a part → where such parts are.
    _by_hash: dict[str, list[Source]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for holder, owners in enumerate(self.offer.parts):
            for owner in owners:
                digest = self.manifest.hashes[part_name(owner)]
                self._by_hash[digest].append(Source(holder, owner))

    @property
    def manifest(self) -> Manifest:
        return self.offer.manifest

    def collect(self) -> str | None:
        """Find, compare and copy the parts; return why that cannot be, the same on all ranks.

        A part of this rank that is found to be damaged is set aside.
        """
        sources = self._verified()
        missing = [rank for rank, source in enumerate(sources) if source is None]
        problem = self._share_generators()
        damage = self._bad.get(Source(self.world.rank, self.world.rank), "")
        if damage:
            self.folder.set_aside(self.manifest.step, damage)
        if missing:
            return self._why(missing)
        plan = [source for source in sources if source is not None]
        return problem or self._copy(plan)

    def _why(self, missing: Sequence[int]) -> str:
        step = self.manifest.step
        ranks = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        text = (
            f"the local save of step {step}: no node has the part of "
            f"{'rank' if len(missing) == 1 else 'ranks'} {ranks}, nor a replica's"
        )
        faults = sorted(set(self._bad.values()))
        return "; ".join([text, *faults[:3]])

    def _verified(self) -> list[Source | None]:
        """Return a source for each rank, compared; None: there is none."""
        compared: set[Source] = set()
        while True:
            plan = [self._source(rank) for rank in range(self.world.size)]
            new = {source for source in plan if source is not None} - compared
            if not new:
                return plan
            compared |= new
            mine = {one: self._fault(one) for one in new if one.holder == self.world.rank}
            for faults in gather_objects(mine, self.group):
                self._bad |= {source: text for source, text in faults.items() if text}

    def _source(self, rank: int) -> Source | None:
        """Return where a rank gets its part from: its own, one on its node, one of another node.

        With several nodes each rank sends its own part, so that all share the work.
        """
        found = []
        for source in self._by_hash[self.manifest.hashes[part_name(rank)]]:
            if source not in self._bad:
                holder, owner = source.holder, source.owner
                found.append((holder != rank, owner != rank, holder != owner, source))
        return min(found, key=lambda one: one[:3])[3] if found else None

    def _fault(self, source: Source) -> str:
        """Return what is wrong with a part on this node; "": nothing."""
        if not self.hashes:
            return ""
        path = self.folder.path_of(source.owner, self.manifest)
        try:
            found = file_digest(path, FAST_HASH)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
        if found != self.manifest.hashes[part_name(source.owner)]:
            return f"{path} has changed since it was written"
        return ""

    def _share_generators(self) -> str | None:
        """Get the random generators of all ranks from the first rank that has them."""
        mine = self._read_generators()
        have = gather_objects(bool(mine), self.group)
        if True not in have:
            return f"the local save of step {self.manifest.step}: no node has its {GENERATORS}"
        sent = [mine]
        dist.broadcast_object_list(sent, src=have.index(True), group=self.group)
        self.generators = sent[0]
        return None

    def _read_generators(self) -> bytes:
        """Return the random generators of all ranks as this node has them; empty: it has not."""
        for owner in self.offer.parts[self.world.rank]:
            path = self.folder.path_of(owner, self.manifest).parent / GENERATORS
            with contextlib.suppress(OSError):
                if file_digest(path, SAFE_HASH) == self.manifest.hashes[GENERATORS]:
                    return path.read_bytes()
        return b""

    def _copy(self, plan: Sequence[Source]) -> str | None:
        """Give each rank a path to its part, over the network where its node has none.

        Return what failed, the same on all ranks.
        """
        rank = self.world.rank
        mine = plan[rank]
        self.path = self.folder.path_of(mine.owner, self.manifest)
        moves = [(to, source) for to, source in enumerate(plan) if source.holder != to]
        problem = ""
        # In the same order on all ranks: nobody waits in a circle.
        for to, source in moves:
            if source.holder == rank:
                self._send(to, source)
            elif to == rank:
                problem = self._receive(source)
        problems = gather_objects(problem, self.group)
        for to, source in moves[:_TOLD]:
            self.notes.append(
                f"rank {to} got its part of the local save from the node of rank {source.holder}"
            )
        if len(moves) > _TOLD:
            self.notes.append(f"so did {counted(len(moves) - _TOLD, 'other ranks')}")
        return next((text for text in problems if text), None)

    def _send(self, to: int, source: Source) -> None:
        """Send a part. The receiver compares it, so that a bad read needs no extra answer."""
        path = self.folder.path_of(source.owner, self.manifest)
        with contextlib.ExitStack() as stack:
            stream: BinaryIO | None = None
            with contextlib.suppress(OSError):
                stream = stack.enter_context(path.open("rb", buffering=0))
            for count in self._blocks(source):
                dist.send(read_block(stream, count), to, self.group)

    def _receive(self, source: Source) -> str:
        """Write a part that another rank sends; return what is wrong with it, "": nothing."""
        folder = self.folder.step(self.manifest.step)
        self.path = part_path(folder, self.offer.save)
        digest = new_hash(FAST_HASH)
        problem = ""
        with contextlib.ExitStack() as stack:
            stream: BinaryIO | None = None
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stream = stack.enter_context(new_file(self.path))
            except OSError as error:
                problem = f"{self.path} cannot be written: {error.strerror}"
            for count in self._blocks(source):
                block = torch.empty(count, dtype=torch.uint8)
                dist.recv(block, source.holder, self.group)
                digest.update(block.numpy().data)
                try:
                    if stream is not None and not problem:
                        stream.write(block.numpy().data)
                except OSError as error:
                    problem = f"{self.path} cannot be written: {error.strerror}"
            if stream is not None and not problem:
                problem = self._sync(stream)
        wanted = self.manifest.hashes[part_name(source.owner)]
        if not problem and f"{FAST_HASH}:{digest.hexdigest()}" != wanted:
            problem = f"the part of rank {source.owner} has changed on its way to {self.path}"
        return problem

    def _sync(self, stream: BinaryIO) -> str:
        """Make a part durable, since its manifest follows; return why it could not be."""
        try:
            sync(stream)
        except OSError as error:
            return f"{self.path} cannot be written: {error.strerror}"
        return ""

    def _blocks(self, source: Source) -> Iterator[int]:
        """Yield the bytes of each block in which a part is sent."""
        size = self.manifest.files[part_name(source.owner)]
        for start in range(0, size, BLOCK):
            yield min(BLOCK, size - start)
