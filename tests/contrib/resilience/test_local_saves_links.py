"""Local saves whose copies go over a connection that breaks."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.support.checkpoints import RUN
from tests.support.harness import Run
from tests.support.local_saves import parts_of, same_end, straight, train_both
from tests.support.pool import Pools
from titanlite.checkpoint import async_save
from titanlite.contrib.resilience.copies import Copies
from titanlite.contrib.resilience.write import LocalWriter
from titanlite.dist.dist_env import DistEnv

#: The step in whose local save a connection breaks.
BROKEN = 6


@pytest.mark.slow
def test_a_connection_that_breaks_in_mid_copy_ends_nothing(pool: Pools, tmp_path: Path) -> None:
    nodes = [0, 1, 2, 3]
    found = pool(4).run(_train_until_a_connection_breaks, RUN, tmp_path, nodes)
    same_end(found, straight(pool, RUN, tmp_path, 4, 7))
    told = [line for line in found[0]["said"] if "no local save was written" in line]
    assert len(told) == 1, found[0]["said"]
    assert f"step {BROKEN}: " in told[0]
    assert parts_of(tmp_path, 1, 1, BROKEN) == []
    pool(4).run(train_both, RUN, tmp_path, 7, nodes, 7, local_copies=1)


def _train_until_a_connection_breaks(
    world: DistEnv, run: Run, folder: Path, nodes: list[int]
) -> dict[str, Any]:
    """Steps to 7. In the save of step 6 the connection of ranks 0 and 1 is shut as rank 0 sends.

    What that save leaves must not take the space of the next.
    """
    new_group = async_save.new_group
    exchange = Copies.exchange
    write_part = LocalWriter._write_part
    #: Of the latest group.
    numbers: list[int] = []

    def write_without_the_broken(writer: LocalWriter, *more: Any) -> Any:
        assert not writer.folder.step(BROKEN).exists()
        return write_part(writer, *more)

    def noting(timeout: timedelta) -> dist.ProcessGroup:
        before = _connections()
        group = new_group(timeout)
        numbers[:] = _connections().keys() - before.keys()
        return group

    def breaking(copies: Copies, part: Path, written: Any, step: int, *more: Any) -> list[Path]:
        if step == BROKEN:
            mine = [_connections()[number] for number in numbers]
            ports: list[Any] = [None] * world.size
            dist.all_gather_object(ports, [here for here, _ in mine], more[-1])
            for number, (_, there) in zip(numbers, mine, strict=True):
                if world.rank == 0 and there in ports[1]:
                    with socket.socket(fileno=os.dup(number)) as sock:
                        sock.shutdown(socket.SHUT_RDWR)
        return exchange(copies, part, written, step, *more)

    with (
        patch.object(async_save, "new_group", noting),
        patch.object(Copies, "exchange", breaking),
        patch.object(LocalWriter, "_write_part", write_without_the_broken),
    ):
        return train_both(world, run, folder, 7, nodes, async_mode="async", local_copies=1)


def _connections() -> dict[int, tuple[int, int]]:
    """Return both ports of the connections of this process, by their numbers."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family != socket.AF_UNIX:
                    found[int(name)] = (sock.getsockname()[1], sock.getpeername()[1])
    return found
