"""Each rank gets and reads its part of a local save: its own, or one with the same hash.

Such a part may be its own on another node, where the ranks have changed places. Or it is that of
a replica, which holds the same shards.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.checkpoint.dcp_files import Written
from titanlite.checkpoint.manifest import FAST_HASH, FILE, SAFE_HASH, Manifest, file_digest
from titanlite.checkpoint.state_dict import RNG, Tensors
from titanlite.contrib.resilience.copies import Incoming, transfer
from titanlite.contrib.resilience.folder import (
    GENERATORS,
    LocalFolder,
    id_of,
    part_name,
    part_path,
    remove,
)
from titanlite.contrib.resilience.part import read_part
from titanlite.dist.dist_env import DistEnv, gather_objects
from titanlite.dist.local_parts import plain_local
from titanlite.utils import atomic_write, counted, logger


@dataclass(frozen=True)
class Offer:
    """A local save of which at least one rank has the manifest."""

    manifest: Manifest
    #: Rank → the ranks whose parts it finds on its node with the right length.
    parts: tuple[tuple[int, ...], ...]

    @property
    def save(self) -> str:
        return id_of(self.manifest)


@dataclass(frozen=True)
class Source:
    """Source of a rank's part: `holder` finds on its node the part of `owner`."""

    holder: int
    owner: int


@dataclass
class LocalReader:
    """Reads one local save. All ranks make one and make the same calls.

    hashes: compare each part with its hash; otherwise with its length alone.
    """

    offer: Offer
    local: LocalFolder
    world: DistEnv
    group: dist.ProcessGroup | None
    hashes: bool
    #: Lines for the start report.
    notes: list[str]
    #: After `collect`: this rank's part, and the random generators of all ranks.
    path: Path = Path()
    generators: bytes = b""
    #: Faults of a part, by its source.
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

    @property
    def folder(self) -> Path:
        return self.local.step(self.manifest.step)

    def collect(self) -> str | None:
        """Find, compare and copy the parts; return why that cannot be, the same on all ranks.

        A damaged part of this rank is deleted.
        """
        sources = self._verified()
        problem = self._share_generators()
        if Source(self.world.rank, self.world.rank) in self._bad:
            remove(self.folder)
        plan = [source for source in sources if source is not None]
        if len(plan) < len(sources):
            text = (
                f"the local save of step {self.manifest.step}: no node has the part of rank "
                f"{sources.index(None)}, nor a replica's"
            )
            return "; ".join([text, *sorted(set(self._bad.values()))[:3]])
        problem = problem or self._copy(plan)
        if problem is None and self.path.parent == self.folder:
            # Files that this rank's part lacks, such as the manifest.
            try:
                atomic_write(self.folder / GENERATORS, self.generators)
                atomic_write(self.folder / FILE, self.manifest.to_json().encode())
            except OSError as error:
                logger.warning(f"{self.folder} stays incomplete: {error}")
        return problem

    def read(self, state: Tensors) -> None:
        """Fill this rank's part of tensors. Raises CheckpointError."""
        read_part(self.path, {name: tensor for name, tensor in state.items() if name != RNG})
        if RNG in state:
            row = plain_local(state[RNG])
            rows = torch.frombuffer(bytearray(self.generators), dtype=torch.uint8)
            row.copy_(rows.view(-1, row.numel())[self.world.rank])

    def _verified(self) -> list[Source | None]:
        """Return a compared source for each rank, or None."""
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

        With several nodes each rank sends its own, to share the work.
        """
        sources = self._by_hash[self.manifest.hashes[part_name(rank)]]
        return min(
            (source for source in sources if source not in self._bad),
            key=lambda one: (one.holder != rank, one.owner != rank, one.holder != one.owner),
            default=None,
        )

    def _fault(self, source: Source) -> str:
        if not self.hashes:
            return ""
        path = self.local.path_of(source.owner, self.manifest)
        try:
            found = file_digest(path, FAST_HASH)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
        if found != self.manifest.hashes[part_name(source.owner)]:
            return f"{path} has changed since it was written"
        return ""

    def _share_generators(self) -> str | None:
        mine = b""
        for owner in self.offer.parts[self.world.rank]:
            path = self.local.path_of(owner, self.manifest).parent / GENERATORS
            with contextlib.suppress(OSError):
                if file_digest(path, SAFE_HASH) == self.manifest.hashes[GENERATORS]:
                    mine = path.read_bytes()
        have = gather_objects(bool(mine), self.group)
        if True not in have:
            return f"the local save of step {self.manifest.step}: no node has its {GENERATORS}"
        sent = [mine]
        dist.broadcast_object_list(sent, src=have.index(True), group=self.group)
        self.generators = sent[0]
        return None

    def _copy(self, plan: Sequence[Source]) -> str | None:
        """Give each rank a path to its part, over the network if need be; return what failed, the
        same on all ranks.
        """
        rank = self.world.rank
        self.path = self.local.path_of(plan[rank].owner, self.manifest)
        moves = [(to, source) for to, source in enumerate(plan) if source.holder != to]
        outgoing = {}
        incoming = {}
        for to, source in moves:
            name = part_name(source.owner)
            written = Written(self.manifest.files[name], self.manifest.hashes[name])
            if source.holder == rank:
                outgoing[to] = self.local.path_of(source.owner, self.manifest), written.size
            elif to == rank:
                self.path = part_path(self.folder, self.offer.save)
                incoming[source.holder] = Incoming(self.path, written)
        transfer(outgoing, incoming, self.group)
        problems = gather_objects([one.finish() for one in incoming.values()], self.group)
        if moves:
            to, source = moves[0]
            self.notes.append(
                f"{counted(len(moves), 'ranks')} got their part of the local save from another "
                f"node, as rank {to} from that of rank {source.holder}"
            )
        return next((text for found in problems for text in found if text), None)
