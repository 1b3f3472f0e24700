"""Copies of parts on other nodes, so that a lost node costs no more than the local interval."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from titanlite.checkpoint.dcp_files import Written
from titanlite.checkpoint.manifest import FAST_HASH, file_digest, new_hash
from titanlite.contrib.resilience.folder import LocalFolder, part_path, remove
from titanlite.dist.dist_env import DistEnv, gather_objects, log_once
from titanlite.utils import logger, new_file, sync

#: Bytes that are sent at a time.
BLOCK = 32 << 20
#: A node that takes or sends no block for so long is lost, or its link is.
PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True)
class Copies:
    """Who keeps copies of whose parts, as this rank sees it."""

    folder: LocalFolder
    #: The ranks that keep copies of this rank's part.
    keepers: tuple[int, ...] = ()
    #: The ranks of whose parts this rank keeps copies.
    owners: tuple[int, ...] = ()

    def exchange(
        self,
        part: Path,
        written: Sequence[Written],
        step: int,
        read_back: bool,
        group: dist.ProcessGroup,
    ) -> list[Path]:
        """Send this rank's part to its keepers while it receives others'; return the folders of
        copies.

        All ranks call it together. written: size and hash of each part. A copy that cannot be kept
        is a warning on its rank. Raises RuntimeError, perhaps on few ranks, where a connection is
        lost.
        """
        incoming = {}
        for owner in self.owners:
            folder = self.folder.copy(owner, step)
            # An earlier copy of this step is replaced.
            remove(folder)
            incoming[owner] = Incoming(part_path(folder, part.stem), written[owner])
        size = written[self.folder.rank].size
        transfer({keeper: (part, size) for keeper in self.keepers}, incoming, group)
        kept = []
        for owner, one in incoming.items():
            if problem := one.finish(read_back):
                logger.warning(f"no copy of the part of rank {owner} is kept: {problem}")
            else:
                kept.append(one.path.parent)
        return kept


def plan_copies(
    number: int, folder: LocalFolder, world: DistEnv, group: dist.ProcessGroup | None
) -> Copies:
    """Return who keeps what, with `number` copies of each part. All ranks call it together."""
    stat = os.stat(folder.root)
    found = gather_objects((socket.gethostname(), stat.st_dev, stat.st_ino), group)
    places = places_of(found)
    keepers = keepers_of(places, number)
    nodes = len(set(places))
    if nodes <= number:
        log_once(
            logging.WARNING,
            f"checkpoint.local_copies = {number} needs {number + 1} nodes, and this run has "
            f"{nodes}: each part gets {nodes - 1}",
        )
    owners = [rank for rank, others in enumerate(keepers) if world.rank in others]
    return Copies(folder, tuple(keepers[world.rank]), tuple(owners))


def places_of(found: Sequence[tuple[str, int, int]]) -> list[Hashable]:
    """Return what stands for each rank's node, from host name, device and number of the folder.

    Disks of a node that are lost together are one place. On a single host they stand for nodes.
    """
    hosts = [host for host, _, _ in found]
    if len(set(hosts)) > 1:
        return list(hosts)
    return list(found)


def keepers_of(places: Sequence[Hashable], number: int) -> list[list[int]]:
    """Return for each rank the ranks on the next nodes that keep its copies. places: equal for
    ranks of one node.
    """
    nodes: dict[Hashable, list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place, []).append(rank)
    order = list(nodes.values())
    keepers: list[list[int]] = [[] for _ in places]
    for index, ranks in enumerate(order):
        for ahead in range(1, min(number, len(order) - 1) + 1):
            target = order[(index + ahead) % len(order)]
            for place, rank in enumerate(ranks):
                keepers[rank].append(target[place % len(target)])
    return keepers


def transfer(
    outgoing: Mapping[int, tuple[Path, int]],
    incoming: Mapping[int, Incoming],
    group: dist.ProcessGroup | None,
) -> None:
    """Send files (rank → path and size) while those of other ranks arrive, block by block.

    All ranks call it together. Unreadable bytes are sent as zeros, which the hash reveals. Raises
    RuntimeError, perhaps on few ranks, where a connection is lost.
    """
    sizes = [size for _, size in outgoing.values()]
    sizes += [one.written.size for one in incoming.values()]
    with contextlib.ExitStack() as stack:
        streams: dict[int, BinaryIO] = {}
        for rank, (path, _) in outgoing.items():
            with contextlib.suppress(OSError):
                streams[rank] = stack.enter_context(path.open("rb"))
        for start in range(0, max(sizes, default=0), BLOCK):
            blocks = []
            requests = []
            for rank, (_, size) in outgoing.items():
                if start < size:
                    blocks.append(_read_block(streams.get(rank), min(BLOCK, size - start)))
                    requests.append(dist.isend(blocks[-1], rank, group))
            arrived = {}
            for rank, one in incoming.items():
                if start < one.written.size:
                    count = min(BLOCK, one.written.size - start)
                    arrived[rank] = torch.empty(count, dtype=torch.uint8)
                    requests.append(dist.irecv(arrived[rank], rank, group))
            for request in requests:
                assert request is not None, "all ranks are in the group"
                request.wait(PATIENCE)
            for rank, block in arrived.items():
                incoming[rank].write(block)


class Incoming:
    """A part that another rank sends, and that this rank writes."""

    def __init__(self, path: Path, written: Written) -> None:
        self.path = path
        self.written = written
        self._problem = ""
        self._hash = new_hash(FAST_HASH)
        self._stream: BinaryIO | None = None
        with self._problems():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = new_file(path)

    def write(self, block: torch.Tensor) -> None:
        self._hash.update(block.numpy().data)
        with self._problems():
            if self._stream is not None and not self._problem:
                self._stream.write(block.numpy().data)

    def finish(self, read_back: bool = False) -> str:
        """Make the part durable, and compare it; return what is wrong with it, "": nothing. A bad
        one is deleted.
        """
        with self._problems():
            if self._stream is not None:
                sync(self._stream)
                self._stream.close()
            found = f"{FAST_HASH}:{self._hash.hexdigest()}"
            if read_back and not self._problem:
                found = file_digest(self.path, FAST_HASH)
            if found != self.written.digest:
                self._problem = self._problem or f"{self.path} is not what was sent"
        if self._problem:
            remove(self.path.parent)
        return self._problem

    @contextlib.contextmanager
    def _problems(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._problem = self._problem or f"{self.path}: {error.strerror}"


def _read_block(stream: BinaryIO | None, count: int) -> torch.Tensor:
    """Return the next bytes [count, uint8], zeros where they cannot be read."""
    data = b""
    with contextlib.suppress(OSError):
        data = stream.read(count) if stream else b""
    return torch.frombuffer(bytearray(data.ljust(count, b"\0")), dtype=torch.uint8)
