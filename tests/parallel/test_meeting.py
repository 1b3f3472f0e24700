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

from titanlite import exit_codes
from titanlite.observe.console import logger
from titanlite.parallel.meeting import MeetingError, come, connect, meet
from titanlite.parallel.world import World

ROOT = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _come(size: int, *ranks: int) -> list[dist.Store]:
    port = _free_port()
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
    port = _free_port()
    serve = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True); input()"
    with subprocess.Popen([sys.executable, "-c", serve, str(port)], stdin=subprocess.PIPE) as server:
        store = come(1, 2, ("127.0.0.1", port), limit=90)
        server.kill()
        server.wait()
        with pytest.raises(MeetingError, match="rank 1 on .* lost the store of the run while it waited"):
            meet(store, 1, 2, patience=90)


def test_a_store_that_cannot_be_reached_is_named() -> None:
    port = _free_port()
    with pytest.raises(MeetingError, match=f"rank 1 on {HOST} cannot reach the store of the run at 127.0.0.1:{port} "):
        come(1, 2, ("127.0.0.1", port), limit=1)


def test_ranks_that_cannot_connect_are_told_which_interface_to_look_at() -> None:
    store, _ = _come(2, 0, 1)
    with pytest.raises(MeetingError, match="all 2 ranks are there, but rank 0 on .*GLOO_SOCKET_IFNAME"):
        connect("gloo", store, 0, 2, limit=1)
    assert not dist.is_initialized()


def test_one_process_alone_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with World.open(device_type="cpu") as world:
        assert (world.rank, world.size) == (0, 1)


@pytest.mark.slow
def test_train_py_without_its_peer_ends_as_a_lost_peer(tmp_path: Path) -> None:
    """Rank 1 of 2, whose rank 0 with the store is never started."""
    environment = {**os.environ, "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
    script = tmp_path / "short.py"
    script.write_text(
        "import functools\n"
        "from titanlite import app\n"
        "app.join_store = functools.partial(app.join_store, 1.0)\n"
        "app.main()\n"
    )
    flags = ["--job.config_file=debug_model.toml", f"--job.dump_folder={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, str(script), *flags], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == exit_codes.LOST_PEER, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: rank 1 on {HOST} cannot reach the store of the run at ")
    assert "Traceback" not in done.stderr
