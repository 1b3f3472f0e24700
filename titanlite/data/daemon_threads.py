"""Threads that end with the process, even while they wait for a source that never answers."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")
_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]

#: Set when the process ends: who waits for a source gives up.
ending = threading.Event()


class Pool:
    """Runs calls in daemon threads, in order, until `stop` or until this is collected.

    The process waits `at_exit` seconds for a call at its end: ending a thread within a library may
    crash.
    """

    def __init__(self, most: int, name: str, at_exit: float = 1.0) -> None:
        self._most, self._name, self.at_exit = most, name, at_exit
        self._calls: _Calls = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._calls, self._threads).atexit = False
        _pools.add(self)

    def submit(self, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        future: Future[_T] = Future()
        self._calls.put((future, call, arguments))
        if len(self._threads) < self._most:
            name = f"{self._name}_{len(self._threads)}"
            self._threads.append(
                threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
            )
            self._threads[-1].start()
        return future

    def stop(self, patience: float) -> bool:
        """Cancel what has not begun; return False if threads outlast `patience` seconds."""
        _end(self._calls, self._threads)
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _stop_all() -> None:
    ending.set()
    began = time.monotonic()
    for pool in sorted(
        _pools, key=lambda pool: -pool.at_exit
    ):  # those that the others wait for first
        pool.stop(max(began + pool.at_exit - time.monotonic(), 0.1))


# As concurrent.futures does: before the functions of atexit, some of which close the connections
# that the threads use.
threading._register_atexit(_stop_all)  # type: ignore[attr-defined]


def _end(calls: _Calls, threads: list[threading.Thread]) -> None:
    with suppress(queue.Empty):
        while True:
            if (item := calls.get_nowait()) is not None:
                item[0].cancel()
    for _ in threads:
        calls.put(None)


def _work(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        future, call, arguments = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)
        del item, future, call, arguments  # they may hold the pool
