"""Where the ranks of a run meet: within a minute all are there, or it is said who is missing and what it may be.

store = come(rank, size)                 # as soon as the process is up
...                                      # read the text, which may take longer on one node than on another
meet(store, rank, size, patience=300)    # all are ready for collectives
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from titanlite.observe.console import logger

#: The longest that a rank waits for the others' processes, and for connections to them.
LIMIT_SECONDS = 60
_NAMED = 8


class MeetingError(RuntimeError):
    """A rank has not come, or cannot be reached."""


def come(
    rank: int, size: int, address: tuple[str, int], is_master: bool = False, limit: float = LIMIT_SECONDS
) -> dist.Store:
    """Connect to the run's TCP store, and leave a word there that this process is up. Raises MeetingError.

    address: host and port of the store. is_master: this process serves it. limit: seconds.
    """
    host, port = address
    try:
        tcp = dist.TCPStore(
            host, port, size, is_master=is_master, timeout=timedelta(seconds=limit), wait_for_workers=False
        )
    except (dist.DistError, OSError) as error:
        raise MeetingError(
            f"rank {rank} on {socket.gethostname()} cannot reach the store of the run at {host}:{port} (MASTER_ADDR, "
            f"MASTER_PORT) within {limit:.0f} s: the process that serves it has not started or has ended, the name "
            f"means another host here, or a firewall is between ({_first_line(error)})"
        ) from None
    run = os.environ.get("TORCHELASTIC_RUN_ID", "titanlite")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # The agent's store survives a restart of the workers, so each attempt needs keys of its own: without the prefix a
    # restarted attempt reads the dead one's addresses and hangs.
    store = dist.PrefixStore(f"titanlite/{run}/{attempt}", tcp)
    store.set(f"came/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
    store.add("came", 1)
    return store


def meet(store: dist.Store, rank: int, size: int, patience: float, limit: float = LIMIT_SECONDS) -> None:
    """Wait until all ranks call this.

    Raises MeetingError when a process has not come within `limit` seconds, or one that has is not ready within
    `patience` seconds. Costs the store two reads of a counter per rank and tenth of a second, fewer from 200 ranks on.
    """
    try:
        _meet(store, rank, size, patience, limit)
    except dist.DistError as error:
        raise MeetingError(
            f"rank {rank} on {socket.gethostname()} lost the store of the run while it waited for the others: the "
            f"process that serves it (rank 0, or the first torchrun) has ended, see its output ({_first_line(error)})"
        ) from None


def _meet(store: dist.Store, rank: int, size: int, patience: float, limit: float) -> None:
    store.set(f"ready/{rank}", "")
    store.add("ready", 1)
    began = said = time.monotonic()
    while store.add("ready", 0) < size:
        now = time.monotonic()
        if now - began > limit and store.add("came", 0) < size:
            raise MeetingError(_not_there(store, size, limit))
        if now - began > patience:
            raise MeetingError(
                f"{_not_ready(store, size)} after {patience:.0f} s (comm.init_timeout_seconds): it is still preparing "
                "its text, or has ended since it came; see its output"
            )
        if rank == 0 and now - said > limit:
            said = now
            logger.warning(f"{_not_ready(store, size)} after {now - began:.0f} s; the others wait")
        time.sleep(max(0.1, size / 2000))


def connect(backend: str, store: dist.Store, rank: int, size: int, limit: float = LIMIT_SECONDS) -> None:
    """Make the default process group, of ranks that are all there. Its collectives have `limit` seconds too.

    Raises MeetingError when the ranks cannot connect to each other.
    """
    seconds = timedelta(seconds=limit)
    store.set_timeout(seconds)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=seconds)
    except RuntimeError as error:
        raise MeetingError(
            f"all {size} ranks are there, but rank {rank} on {socket.gethostname()} could not connect to them within "
            f"{limit:.0f} s: one has ended since, a firewall is between the hosts, or a network interface is chosen "
            f"that the others cannot reach (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) ({_first_line(error)})"
        ) from error


def _not_there(store: dist.Store, size: int, limit: float) -> str:
    missing = [rank for rank in range(size) if not store.check([f"came/{rank}"])]
    hosts = {store.get(f"came/{rank}").decode().partition(",")[0] for rank in range(size) if rank not in missing}
    verb = "has" if len(missing) == 1 else "have"
    return (
        f"{_ranks(missing)} of {size} {verb} not come within {limit:.0f} s; the others are on "
        f"{', '.join(sorted(hosts)[:_NAMED])}. The missing were not started, have ended, or cannot reach the store of "
        "the run (another MASTER_ADDR or MASTER_PORT, a firewall): see their output"
    )


def _not_ready(store: dist.Store, size: int) -> str:
    late = [rank for rank in range(size) if not store.check([f"ready/{rank}"])]
    first = store.get(f"came/{late[0]}").decode() if late and store.check([f"came/{late[0]}"]) else "not there"
    return f"{_ranks(late)} {'is' if len(late) == 1 else 'are'} not ready ({first})"


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_NAMED]))}{more}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
