"""Where the ranks of a run meet: within a minute all are there, or it is said who is missing and what it may be.

store = come(rank, size)                     # as soon as the process is up
with leaving_word(store, rank, size):        # who ends before all are there says why, and the others end too
    ...                                      # rank 0 takes the run's folder
    after_rank_0(store, rank, size, patience=300)
    ...                                      # read the text, which may take longer on one node than on another
    meet(store, rank, size, patience=300)    # all are ready for collectives
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from titanlite import exit_codes
from titanlite.parallel.environment import WorldError
from titanlite.utils import logger

#: The longest that a rank waits for the others' processes, and for connections to them.
LIMIT_SECONDS = 60
#: The longest that a rank which ends waits for the others to read why: it may be the one that serves the store.
_HEARD_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_NAMED = 8
_TEXT = 2000


class MeetingError(RuntimeError):
    """A rank has not come, or cannot be reached."""

    exit_code = exit_codes.LOST_PEER


def come(
    rank: int, size: int, address: tuple[str, int], is_master: bool = False, limit: float = LIMIT_SECONDS
) -> dist.Store:
    """Connect to the run's TCP store, and leave a word there that this process is up.

    address: host and port of the store. is_master: this process serves it. limit: seconds for something to listen
    there, and as many for it to answer. Raises MeetingError; WorldError when the port is taken that this process is to
    serve at.
    """
    tcp = _open_store(rank, size, address, is_master, limit)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "titanlite")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # The agent's store survives a restart of the workers, so each attempt needs keys of its own: without the prefix a
    # restarted attempt reads the dead one's addresses and hangs.
    store = dist.PrefixStore(f"titanlite/{run}/{attempt}", tcp)
    store.set(f"came/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
    store.add("came", 1)
    return store


def _open_store(rank: int, size: int, address: tuple[str, int], is_master: bool, limit: float) -> dist.TCPStore:
    host, port = address
    who, where = f"rank {rank} on {socket.gethostname()}", f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
    if not is_master and (reason := _nobody_listens(address, limit)):
        raise MeetingError(
            f"{who} cannot reach the store of the run at {where} within {limit:.0f} s: the process that serves it has "
            f"not started or has ended, the name means another host here, or a firewall is between ({reason})"
        )
    made: queue.SimpleQueue[dist.TCPStore | Exception] = queue.SimpleQueue()

    def make() -> None:
        try:
            seconds = timedelta(seconds=limit)
            made.put(dist.TCPStore(host, port, size, is_master, timeout=seconds, wait_for_workers=False))
        except Exception as error:
            made.put(error)

    # In a thread, because torch waits without end for an answer from what listens there.
    threading.Thread(target=make, name="store", daemon=True).start()
    try:
        store = made.get(timeout=limit)
    except queue.Empty:
        store = TimeoutError("silence")
    if not isinstance(store, Exception):
        return store
    reason = _first_line(store)
    if "failed to listen" in reason:
        raise WorldError(
            f"{who} cannot open port {port} (MASTER_PORT) for the other ranks: {reason.rpartition('message: ')[2]}. "
            "If another program or run listens there, end it, or set another MASTER_PORT on all ranks"
        ) from None
    raise MeetingError(
        f"{who} gets no answer from the store of the run at {where} within {limit:.0f} s: something else listens "
        f"there, or MASTER_ADDR is not the host of rank 0. Set a free MASTER_PORT on all ranks ({reason})"
    ) from None


def _nobody_listens(address: tuple[str, int], limit: float) -> str:
    """Wait until something listens there: rank 0 may start late. Returns why nothing does, or an empty string."""
    until = time.monotonic() + limit
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection(address, timeout=max(left, 0.1)).close()
            return ""
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
            reason = str(error)
        if left < _RETRY_SECONDS:
            return reason
        time.sleep(_RETRY_SECONDS)


def meet(store: dist.Store, rank: int, size: int, patience: float, limit: float = LIMIT_SECONDS) -> None:
    """Wait until all ranks call this.

    Raises MeetingError when a process has not come within `limit` seconds, or one that has is not ready within
    `patience` seconds, and at once when one has ended (`leaving_word`). Costs the store two reads of a counter per rank
    and tenth of a second, fewer from 200 ranks on.
    """

    def all_ready() -> bool:
        return store.add("ready", 0) >= size

    with _named(rank):
        store.set(f"ready/{rank}", "")
        store.add("ready", 1)
        _wait(store, rank, size, all_ready, lambda: _not_ready(store, size), "preparing its text", patience, limit)


def after_rank_0(store: dist.Store, rank: int, size: int, patience: float, limit: float = LIMIT_SECONDS) -> None:
    """Wait until rank 0 has come here, which itself does not wait. Raises MeetingError as `meet` does."""
    with _named(rank):
        if rank == 0:
            store.set("first", "")
        else:
            late = "rank 0 does not have the run's folder"
            _wait(store, rank, size, lambda: store.check(["first"]), lambda: late, "waiting for it", patience, limit)


@contextlib.contextmanager
def leaving_word(store: dist.Store | None, rank: int, size: int) -> Iterator[None]:
    """Around all that comes before `meet`: what a rank raises there ends the others too, with its words.

    Later on others look after that (`titanlite.metrics.watchdog`). store: None for one process alone.
    """
    try:
        yield
    except BaseException as error:
        if store is not None and not isinstance(error, MeetingError) and not dist.is_initialized():
            # A signal leaves no time to wait for others; most likely it has reached them as well.
            seconds = _HEARD_SECONDS if isinstance(error, Exception) else 0.0
            with contextlib.suppress(dist.DistError):
                _give_up(store, rank, size, str(error) or type(error).__name__, seconds)
        raise


def _give_up(store: dist.Store, rank: int, size: int, reason: str, seconds: float) -> None:
    store.set("over", f"rank {rank} ({socket.gethostname()}, process {os.getpid()}) has ended: {reason}"[:_TEXT])
    store.set("first", "")
    store.add("ready", size)  # ends every wait
    store.add("heard", 1)
    until = time.monotonic() + seconds
    while store.add("heard", 0) < size and time.monotonic() < until:
        time.sleep(0.1)


@contextlib.contextmanager
def _named(rank: int) -> Iterator[None]:
    """Failures of the store as what they mean."""
    try:
        yield
    except dist.DistError as error:
        raise MeetingError(
            f"rank {rank} on {socket.gethostname()} lost the store of the run while it waited for the others: the "
            f"process that serves it (rank 0, or the first torchrun) has ended, see its output ({_first_line(error)})"
        ) from None


def _wait(
    store: dist.Store,
    rank: int,
    size: int,
    done: Callable[[], bool],
    late: Callable[[], str],
    doing: str,
    patience: float,
    limit: float,
) -> None:
    began = said = time.monotonic()
    while not done():
        now = time.monotonic()
        if now - began > limit and store.add("came", 0) < size:
            raise MeetingError(_not_there(store, size, limit))
        if now - began > patience:
            raise MeetingError(
                f"{late()} after {patience:.0f} s (comm.init_timeout_seconds): it is still {doing}, or has ended since "
                "it came; see its output"
            )
        if rank == 0 and now - said > limit:
            said = now
            logger.warning(f"{late()} after {now - began:.0f} s; the others wait")
        time.sleep(max(0.1, size / 2000))
    if store.check(["over"]):
        store.add("heard", 1)
        raise MeetingError(store.get("over").decode())


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
