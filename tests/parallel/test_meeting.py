"""Ranks that do not come, are not ready or cannot be reached are named, with what it may be."""

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
from titanlite.parallel.environment import WorldError
from titanlite.parallel.meeting import MeetingError, after_rank_0, come, connect, leaving_word, meet
from titanlite.parallel.world import World
from titanlite.runs.lock import RunLock
from titanlite.signals import StopRequested
from titanlite.utils import logger

ROOT = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()


def _come(size: int, *ranks: int) -> list[dist.Store]:
    port = free_port()
    return [come(rank, size, ("127.0.0.1", port), is_master=rank == ranks[0]) for rank in ranks]


def _all(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_ranks_that_all_come_meet_at_once() -> None:
    stores = _come(3, 0, 1, 2)
    began = time.monotonic()
    _all(*(lambda rank=rank, store=store: meet(store, rank, 3, 90, 90) for rank, store in enumerate(stores)))
    assert time.monotonic() - began < 30


def test_ranks_that_have_not_come_are_named() -> None:
    store, _ = _come(4, 0, 2)
    with pytest.raises(MeetingError) as told:
        meet(store, 0, 4, patience=90, limit=0.3)
    assert str(told.value).startswith(f"ranks 1, 3 of 4 have not come within 0 s; the others are on {HOST}. ")
    assert "MASTER_ADDR" in str(told.value) and "firewall" in str(told.value)


def test_a_rank_that_is_busy_gets_more_time_than_one_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    store, _ = _come(2, 0, 1)
    logger.propagate = True
    with pytest.raises(MeetingError) as told:
        meet(store, 0, 2, patience=1.0, limit=0.3)
    where = f"rank 1 is not ready ({HOST}, process {os.getpid()}) after 1 s (comm.init_timeout_seconds): it is still"
    assert str(told.value).startswith(where)
    assert "rank 1 is not ready" in caplog.text and "the others wait" in caplog.text


def test_a_store_whose_process_ends_is_named() -> None:
    port = free_port()
    serve = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True); input()"
    with subprocess.Popen([sys.executable, "-c", serve, str(port)], stdin=subprocess.PIPE) as server:
        store = come(1, 2, ("127.0.0.1", port), limit=90)
        server.kill()
        server.wait()
        with pytest.raises(MeetingError, match="rank 1 on .* lost the store of the run while it waited"):
            meet(store, 1, 2, patience=90)


def test_a_store_that_cannot_be_reached_is_named() -> None:
    port = free_port()
    with pytest.raises(MeetingError, match=f"rank 1 on {HOST} cannot reach the store of the run at 127.0.0.1:{port} "):
        come(1, 2, ("127.0.0.1", port), limit=1)


def test_a_rank_0_that_starts_late_is_waited_for() -> None:
    port = free_port()
    serve = threading.Timer(0.5, lambda: kept.append(come(0, 2, ("127.0.0.1", port), is_master=True)))
    kept: list[dist.Store] = []
    serve.start()
    kept.append(come(1, 2, ("127.0.0.1", port), limit=90))
    serve.join()
    assert kept[0].add("came", 0) == 2


def test_a_port_that_a_silent_program_holds_is_named_in_time() -> None:
    """Rank 0 cannot open it; the others connect to it and get no answer."""
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    server.detach()  # open as long as this process: torch goes on waiting for it
    with pytest.raises(WorldError, match=f"rank 0 on {HOST} cannot open port {address[1]} .*: address already in use"):
        come(0, 2, address, is_master=True, limit=90)
    began = time.monotonic()
    told = f"rank 1 on {HOST} gets no answer from the store of the run at 127.0.0.1:{address[1]} "
    with pytest.raises(MeetingError, match=f"{told}.*something else listens there"):
        come(1, 2, address, limit=1)
    assert time.monotonic() - began < 10


def test_ranks_that_cannot_connect_are_told_which_interface_to_look_at() -> None:
    store, _ = _come(2, 0, 1)
    with pytest.raises(MeetingError, match="all 2 ranks are there, but rank 0 on .*GLOO_SOCKET_IFNAME"):
        connect("gloo", store, 0, 2, limit=1)
    assert not dist.is_initialized()


def test_what_a_rank_raises_before_the_meeting_ends_the_others_with_its_words() -> None:
    """Rank 1 waits for the meeting already, rank 2 for rank 0; rank 3 comes to it later. Nobody waits for a limit."""
    stores = _come(4, 0, 1, 2, 3)
    raised: dict[int, str] = {}
    seconds: dict[int, float] = {}

    def attempt(rank: int, wait: Callable[[dist.Store, int, int, float, float], None]) -> None:
        began = time.monotonic()
        try:
            with leaving_word(stores[rank], rank, 4):
                wait(stores[rank], rank, 4, 90, 90)
        except (MeetingError, OSError) as error:
            raised[rank] = str(error)
        seconds[rank] = time.monotonic() - began

    def fail(*_: object) -> None:
        time.sleep(0.3)
        raise OSError("the folder is taken")

    def late(store: dist.Store, rank: int, size: int, patience: float, limit: float) -> None:
        time.sleep(1)
        meet(store, rank, size, patience, limit)

    waits = [fail, meet, after_rank_0, late]
    _all(*(lambda rank=rank, wait=wait: attempt(rank, wait) for rank, wait in enumerate(waits)))
    told = f"rank 0 ({HOST}, process {os.getpid()}) has ended: the folder is taken"
    assert raised == {0: "the folder is taken", 1: told, 2: told, 3: told}
    assert max(seconds.values()) < 30
    assert seconds[0] > 0.7, "the one that serves the store stays until the last has read it"


def test_ranks_that_fail_alike_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.parallel.meeting._HEARD_SECONDS", 60.0)
    stores = _come(2, 0, 1)

    def attempt(rank: int) -> None:
        with pytest.raises(ValueError, match="no such file"), leaving_word(stores[rank], rank, 2):
            raise ValueError("no such file")

    began = time.monotonic()
    _all(lambda: attempt(0), lambda: attempt(1))
    with pytest.raises(StopRequested), leaving_word(_come(2, 0, 1)[0], 0, 2):
        raise StopRequested("SIGTERM before the first step")  # a grace period is short: nobody is waited for
    assert time.monotonic() - began < 30


def test_one_process_alone_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with World.open(device_type="cpu") as world:
        assert (world.rank, world.size) == (0, 1)


@pytest.mark.slow
def test_train_py_without_its_peer_ends_as_a_lost_peer(tmp_path: Path) -> None:
    """Rank 1 of 2, whose rank 0 with the store is never started."""
    environment = {**os.environ, "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    script = tmp_path / "short.py"
    script.write_text(
        "import functools\n"
        "from titanlite import main\n"
        "from titanlite.parallel import world\n"
        "world.join_store = functools.partial(world.join_store, 1.0)\n"
        "main.main()\n"
    )
    flags = ["--job.config_file=debug_model.toml", f"--job.dump_folder={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, str(script), *flags], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == exit_codes.LOST_PEER, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: rank 1 on {HOST} cannot reach the store of the run at ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_that_the_lock_refuses_ends_on_all_ranks_with_its_words(tmp_path: Path) -> None:
    """Two ranks without torchrun, so nobody ends the one that waits but itself."""
    environment = {**os.environ, "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(ROOT / "train.py"), f"--job.dump_folder={tmp_path}/run"]
    with RunLock(tmp_path / "run"):
        processes = [
            subprocess.Popen(
                command, env={**environment, "RANK": rank, "LOCAL_RANK": "0"}, stderr=subprocess.PIPE, text=True
            )
            for rank in ("0", "1")
        ]
        codes, errors = zip(*((p.wait(240), p.communicate()[1].splitlines()[-1]) for p in processes), strict=True)
    assert codes == (exit_codes.CHECKPOINT, exit_codes.LOST_PEER)
    refused = f"{tmp_path}/run belongs to a run that is alive: process {os.getpid()} on {HOST}"
    assert errors[0].startswith(f"error: {refused}")
    assert errors[1].startswith(f"error: rank 0 ({HOST}, process {processes[0].pid}) has ended: {refused}")
