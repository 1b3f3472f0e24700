"""Ranks that are missing, late or unreachable are named, with the likely causes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.pool import free_port
from titanlite import exit_codes
from titanlite.parallel.rendezvous import (
    RendezvousError,
    barrier,
    connect,
    register,
    report_failure,
    wait_for_rank_0,
)
from titanlite.runs.lock import RunLock
from titanlite.utils import logger

ROOT = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()


def _register(size: int, *ranks: int) -> list[dist.Store]:
    address = "127.0.0.1", free_port()
    return [register(rank, size, address, is_master=rank == ranks[0]) for rank in ranks]


def _all(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_ranks_that_are_all_there_go_on_at_once() -> None:
    stores = _register(3, 0, 1, 2)
    began = time.monotonic()
    _all(*(lambda rank=rank, store=store: barrier(store, rank, 3, 90, 90) for rank, store in enumerate(stores)))
    assert time.monotonic() - began < 30


def test_missing_ranks_are_named() -> None:
    store, _ = _register(4, 0, 2)
    with pytest.raises(RendezvousError) as error:
        barrier(store, 0, 4, patience=90, limit=0.3)
    assert str(error.value).startswith(f"ranks 1, 3 of 4 have not come within 0 s; the others are on {HOST}. ")
    assert "MASTER_ADDR" in str(error.value) and "firewall" in str(error.value)


def test_a_busy_rank_gets_more_time_than_a_missing_one(caplog: pytest.LogCaptureFixture) -> None:
    store, _ = _register(2, 0, 1)
    logger.propagate = True
    with pytest.raises(RendezvousError) as error:
        barrier(store, 0, 2, patience=1.0, limit=0.3)
    who = f"rank 1 is not ready ({HOST}, process {os.getpid()}) after 1 s (init_timeout_seconds)"
    assert str(error.value).startswith(who)
    assert "rank 1 is not ready" in caplog.text and "the others wait" in caplog.text


def test_a_store_that_cannot_be_reached_is_named_but_rank_0_may_start_late() -> None:
    address = "127.0.0.1", free_port()
    with pytest.raises(RendezvousError, match=f"rank 1 on {HOST} cannot reach the store of the run at {address[0]}:"):
        register(1, 2, address, limit=1)
    kept: list[dist.Store] = []
    serve = threading.Timer(0.5, lambda: kept.append(register(0, 2, address, is_master=True)))
    serve.start()
    kept.append(register(1, 2, address, limit=90))
    serve.join()
    assert kept[0].add("up", 0) == 2


def test_ranks_that_cannot_connect_learn_which_interface_to_check() -> None:
    store, _ = _register(2, 0, 1)
    with pytest.raises(RendezvousError, match="all 2 ranks are there, but rank 0 on .*GLOO_SOCKET_IFNAME"):
        connect("gloo", store, 0, 2, limit=1)
    assert not dist.is_initialized()


def test_an_error_before_the_barrier_ends_the_other_ranks_with_its_text() -> None:
    """Rank 1 waits in the barrier already, rank 2 for rank 0; rank 3 comes to it later. No rank waits for a limit."""
    stores = _register(4, 0, 1, 2, 3)
    raised: dict[int, str] = {}
    seconds: dict[int, float] = {}

    def attempt(rank: int, wait: Callable[[dist.Store, int, int, float, float], None]) -> None:
        began = time.monotonic()
        try:
            with report_failure(stores[rank], rank, 4):
                wait(stores[rank], rank, 4, 90, 90)
        except (RendezvousError, OSError) as error:
            raised[rank] = str(error)
        seconds[rank] = time.monotonic() - began

    def fail(*_: object) -> None:
        time.sleep(0.3)
        raise OSError("the folder is taken")

    def late(store: dist.Store, rank: int, size: int, patience: float, limit: float) -> None:
        time.sleep(1)
        barrier(store, rank, size, patience, limit)

    waits = [fail, barrier, wait_for_rank_0, late]
    _all(*(lambda rank=rank, wait=wait: attempt(rank, wait) for rank, wait in enumerate(waits)))
    reported = f"rank 0 ({HOST}, process {os.getpid()}) has ended: the folder is taken"
    assert raised == {0: "the folder is taken", 1: reported, 2: reported, 3: reported}
    assert max(seconds.values()) < 30
    assert seconds[0] > 0.7, "the rank that serves the store stays until the last has read it"


@pytest.mark.slow
def test_a_run_that_the_lock_refuses_ends_on_all_ranks_with_its_text(tmp_path: Path) -> None:
    """Two ranks without torchrun, so only the waiting rank itself can end it."""
    environment = {**os.environ, "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    command = [sys.executable, str(ROOT / "train.py"), f"--job.dump_folder={tmp_path}/run"]
    with RunLock(tmp_path / "run"):
        processes = [
            subprocess.Popen(command, env={**environment, "RANK": rank}, stderr=subprocess.PIPE, text=True)
            for rank in ("0", "1")
        ]
        codes, errors = zip(*((p.wait(240), p.communicate()[1].splitlines()[-1]) for p in processes), strict=True)
    assert codes == (exit_codes.CHECKPOINT, exit_codes.LOST_PEER)
    refused = f"{tmp_path}/run belongs to a run that is alive: process {os.getpid()} on {HOST}"
    assert errors[0].startswith(f"error: {refused}")
    assert errors[1].startswith(f"error: rank 0 ({HOST}, process {processes[0].pid}) has ended: {refused}")
