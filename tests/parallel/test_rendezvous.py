"""Ranks that are missing, late or unreachable are named, with the likely causes."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tests.support.pool import free_port
from titanlite.dist import rendezvous
from titanlite.dist.rendezvous import (
    RendezvousError,
    barrier,
    connect,
    report_failure,
    share_from_rank_0,
)
from titanlite.dist.run_store import register

HOST = socket.gethostname()


def _register(size: int, *ranks: int) -> list[dist.Store]:
    address = "127.0.0.1", free_port()
    return [register(rank, size, address, is_master=rank == ranks[0]) for rank in ranks]


def test_missing_ranks_are_named_and_a_busy_one_gets_more_time():
    with pytest.raises(RendezvousError) as error:
        barrier(_register(4, 0, 2)[0], 0, 4, patience=900, limit=0.3)
    assert str(error.value).startswith(
        f"ranks 1, 3 of 4 have not come within 0 s; the others are on {HOST}. "
    )
    with pytest.raises(RendezvousError) as error:
        barrier(_register(2, 0, 1)[0], 0, 2, patience=1.0, limit=0.3)
    who = f"rank 1 not ready ({HOST}, process {os.getpid()}) after 1 s (init_timeout_seconds)"
    assert str(error.value).startswith(who)


def test_a_store_that_cannot_be_reached_is_named_but_rank_0_may_start_late():
    address = "127.0.0.1", free_port()
    with pytest.raises(
        RendezvousError,
        match=f"rank 1 on {HOST} cannot reach the store of the run at {address[0]}:",
    ):
        register(1, 2, address, limit=0.3)
    with ThreadPoolExecutor() as threads:
        early = threads.submit(register, 1, 2, address, limit=300)
        time.sleep(0.5)
        store = register(0, 2, address, is_master=True)
        early.result()
    assert store.add("up", 0) == 2
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(RendezvousError, match="no answer"),
    ):
        register(1, 2, silent.getsockname(), limit=0.3)


def test_ranks_that_cannot_connect_learn_which_interface_to_check():
    store, _ = _register(2, 0, 1)
    with pytest.raises(
        RendezvousError, match="all 2 ranks are there, but rank 0 on .*GLOO_SOCKET_IFNAME"
    ):
        connect("gloo", store, 0, 2, limit=0.3)
    assert not dist.is_initialized()


def test_an_error_before_the_barrier_ends_the_other_ranks_with_its_text(monkeypatch):
    """Rank 1 waits in the barrier already, rank 2 for rank 0; rank 3 comes to it later.

    No rank waits for a limit.
    """
    stores = _register(4, 0, 1, 2, 3)
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 300.0)
    began = time.monotonic()

    def attempt(rank):
        """Return the error of a rank, and when it came to the barrier and ended."""
        try:
            with report_failure(stores[rank], rank, 4):
                time.sleep({0: 0.3, 3: 1.0}.get(rank, 0))
                came = time.monotonic()
                if rank == 0:
                    raise OSError("the folder is taken")
                if rank == 2:
                    share_from_rank_0(stores[rank], rank, 4, "lock", int, 900)
                barrier(stores[rank], rank, 4, 900, 900)
        except (RendezvousError, OSError) as error:
            return str(error), came, time.monotonic()

    with ThreadPoolExecutor(4) as threads:
        raised, came, ended = zip(*threads.map(attempt, range(4)), strict=True)
    reported = f"rank 0 ({HOST}, process {os.getpid()}) has ended: the folder is taken"
    assert raised == ("the folder is taken", *[reported] * 3)
    assert max(ended) - began < 200
    assert ended[0] > came[3], "the rank that serves the store stays until the last has read it"
