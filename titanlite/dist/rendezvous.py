"""How the ranks of a run find each other.

Within a minute all are there, or a message names the missing ones.

store = register(rank, size, address)             # as soon as the process is up
with report_failure(store, rank, size):           # an error before the barrier ends the other ranks
too
    share_from_rank_0(store, rank, size, "lock", take_lock, patience=300)
    ...  # read the text, which may take longer on one node than on another
    barrier(store, rank, size, patience=300)      # all ranks are ready for collectives
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from titanlite import exit_codes
from titanlite.dist.launch_env import RENDEZVOUS_SECONDS
from titanlite.utils import logger

T = TypeVar("T")

#: The longest that a failing rank waits until the others have read its error. It may be the one
#: that serves the store.
_REPORT_SECONDS = 15.0
#: Ranks and hosts that a message names at most.
_MOST_NAMED = 8


class RendezvousError(RuntimeError):
    """Another rank is missing or cannot be reached."""

    exit_code = exit_codes.LOST_PEER


def barrier(
    store: dist.Store, rank: int, size: int, patience: float, limit: float = RENDEZVOUS_SECONDS
) -> None:
    """Wait until all ranks call this.

    Raises RendezvousError if a process is not up within `limit` seconds or not ready within
    `patience`, and at once if one has ended (`report_failure`).
    """

    def late() -> str:
        ranks = [other for other in range(size) if not store.check([f"ready/{other}"])]
        return f"{_ranks(ranks)} not ready ({_process(store, ranks[0]) if ranks else 'all came'})"

    with _explain_store_errors(rank):
        store.set(f"ready/{rank}", "")
        if store.add("ready", 1) == size:
            store.set("go", "")
        _wait(store, rank, size, "go", late, patience, limit)


def share_from_rank_0(
    store: dist.Store,
    rank: int,
    size: int,
    name: str,
    make: Callable[[], T],
    patience: float,
) -> T:
    """Return on all ranks what `make` returns on rank 0, before a process group exists.

    Rank 0 does not wait. Raises RendezvousError as `barrier` does; on rank 0 what `make` raises.
    """
    if rank == 0:
        made = make()
        with _explain_store_errors(rank):
            store.set(name, base64.b64encode(pickle.dumps(made)).decode())
        return made
    with _explain_store_errors(rank):
        limits = (patience, RENDEZVOUS_SECONDS)
        _wait(store, rank, size, name, lambda: f"rank 0 does not have {name}", *limits)
        # From a process of the same run.
        shared: T = pickle.loads(base64.b64decode(store.get(name)))
        return shared


@contextlib.contextmanager
def report_failure(store: dist.Store | None, rank: int, size: int) -> Iterator[None]:
    """Around all code before `barrier`: an error of this rank also ends the others, with its text.

    Once the process group exists, the watchdog does that.
    """
    try:
        yield
    except BaseException as error:
        if store is None or isinstance(error, RendezvousError) or dist.is_initialized():
            raise
        reason = str(error) or type(error).__name__
        # A signal leaves no time to wait for others; most likely it has reached them as well.
        seconds = _REPORT_SECONDS if isinstance(error, Exception) else 0.0
        until = time.monotonic() + seconds
        with contextlib.suppress(dist.DistError):
            store.set("failure", f"rank {rank} ({_process(store, rank)}) has ended: {reason}")
            store.add("read", 1)
            while store.add("read", 0) < size and time.monotonic() < until:
                time.sleep(0.1)
        raise


@contextlib.contextmanager
def _explain_store_errors(rank: int) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RendezvousError(
            f"rank {rank} on {socket.gethostname()} lost the store of the run while it waited for "
            "the others. The process that serves it (rank 0, or the first torchrun) has ended, "
            f"see its output ({first_line(error)})"
        ) from None


def _wait(  # noqa: PLR0913
    store: dist.Store,
    rank: int,
    size: int,
    key: str,
    late: Callable[[], str],
    patience: float,
    limit: float,
) -> None:
    """Wait for a key of the store; `late` tells who is missing. Each wait costs two reads."""
    began = reported = time.monotonic()
    while not store.check([key]) and not store.check(["failure"]):
        now = time.monotonic()
        if now - began > limit and store.add("up", 0) < size:
            missing: list[int] = []
            hosts: set[str] = set()
            for other in range(size):
                if store.check([f"up/{other}"]):
                    hosts.add(_process(store, other).partition(",")[0])
                else:
                    missing.append(other)
            have = "has" if len(missing) == 1 else "have"
            raise RendezvousError(
                f"{_ranks(missing)} of {size} {have} not come within {limit:.0f} s; the others "
                f"are on {', '.join(sorted(hosts)[:_MOST_NAMED])}. The missing were not started, "
                "have ended, or cannot reach the store of the run (another MASTER_ADDR or "
                "MASTER_PORT, a firewall): see their output"
            )
        if now - began > patience:
            raise RendezvousError(
                f"{late()} after {patience:.0f} s (init_timeout_seconds): still reading its text, "
                "or ended since it came; see its output"
            )
        if rank == 0 and now - reported > limit:
            reported = now
            logger.warning(f"{late()} after {now - began:.0f} s; the others wait")
        time.sleep(max(0.1, size / 2000))
    if store.check(["failure"]):
        store.add("read", 1)
        raise RendezvousError(store.get("failure").decode())


def connect(
    backend: str, store: dist.Store, rank: int, size: int, limit: float = RENDEZVOUS_SECONDS
) -> None:
    """Make the default process group of ranks that are all up, with `limit` seconds for
    collectives.

    Raises RendezvousError if the ranks cannot connect.
    """
    seconds = timedelta(seconds=limit)
    store.set_timeout(seconds)
    try:
        # No device_id: torch would make a communicator for each dimension of a mesh, used or not.
        # Barriers would go through NCCL, which does not notice that a peer has ended.
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=seconds)
    except RuntimeError as error:
        message = (
            f"all {size} ranks are there, but rank {rank} on {socket.gethostname()} could not "
            f"connect to them within {limit:.0f} s: one has ended since, a firewall is between "
            "the hosts, or a network interface is chosen that the others cannot reach "
            f"(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) ({first_line(error)})"
        )
        from titanlite.dist.interfaces import INTERFACES, interface_problem

        for variable in INTERFACES:
            problem = interface_problem(variable)
            if problem:
                message += f"\nOn this host {problem}"
        raise RendezvousError(message) from error


def _process(store: dist.Store, rank: int) -> str:
    return store.get(f"up/{rank}").decode() if store.check([f"up/{rank}"]) else "not there"


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def first_line(error: BaseException) -> str:
    """Return the first line of torch's error; others may be a C++ stack."""
    return str(error).partition("\n")[0]
