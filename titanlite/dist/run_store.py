"""The key-value store of a run: a rank connects to it, and notes there that its process is up."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from titanlite.exit_codes import attempt
from titanlite.dist import ParallelismError
from titanlite.dist.launch_env import RENDEZVOUS_SECONDS
from titanlite.dist.rendezvous import RendezvousError, first_line

_RETRY_SECONDS = 0.2


def register(
    rank: int,
    size: int,
    address: tuple[str, int],
    is_master: bool = False,
    limit: float = RENDEZVOUS_SECONDS,
) -> dist.Store:
    """Connect to the run's TCP store, and note there that this process is up.

    Something must listen within `limit` seconds, and answer within as many. Raises RendezvousError,
    and ParallelismError if a serving process finds the port taken.
    """
    tcp = _open_store(rank, size, address, is_master, limit)
    # torchrun's store survives a restart of the workers, so each attempt needs its own keys:
    # without the prefix a restarted attempt reads the dead one's addresses and hangs.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "0")
    store = dist.PrefixStore(f"titanlite/{run}/{attempt()}", tcp)
    store.set(f"up/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
    store.add("up", 1)
    return store


def _open_store(
    rank: int, size: int, address: tuple[str, int], is_master: bool, limit: float
) -> dist.TCPStore:
    host, port = address
    who = f"rank {rank} on {socket.gethostname()}"
    made: queue.SimpleQueue[dist.TCPStore | Exception] = queue.SimpleQueue()

    def make() -> None:
        try:
            seconds = timedelta(seconds=limit)
            made.put(
                dist.TCPStore(host, port, size, is_master, timeout=seconds, wait_for_workers=False)
            )
        except Exception as error:
            made.put(error)

    try:
        if not is_master:
            _await_listener(address, limit)
        # In a thread, because torch waits forever for the answer of a listener that is no store.
        threading.Thread(target=make, name="store", daemon=True).start()
        store = made.get(timeout=limit)
    except (OSError, UnicodeError, queue.Empty) as error:
        # UnicodeError: no host can have that name.
        store = error
    if not isinstance(store, Exception):
        return store
    reason = first_line(store)
    if "failed to listen" in reason:
        raise ParallelismError(
            f"{who} cannot open port {port} (MASTER_PORT) for the other ranks: "
            f"{reason.rpartition('message: ')[2]}. If another program or run listens there, end "
            "it, or set another MASTER_PORT on all ranks"
        ) from None
    raise RendezvousError(
        f"{who} cannot reach the store of the run at {host}:{port} (MASTER_ADDR, MASTER_PORT) "
        f"within {limit:.0f} s. Rank 0 has not started or has ended, the name means another host "
        f"here, a firewall is between, or another program listens there ({reason or 'no answer'})"
    ) from None


def _await_listener(address: tuple[str, int], limit: float) -> None:
    """Rank 0 may start late. Raises OSError."""
    until = time.monotonic() + limit
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection(address, timeout=max(left, 0.1)).close()
            return
        except OSError:
            if left < _RETRY_SECONDS:
                raise
        time.sleep(_RETRY_SECONDS)
