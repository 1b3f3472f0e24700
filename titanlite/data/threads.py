"""Threads that no process waits for at its end: a source that does not answer may hold one for minutes."""

from __future__ import annotations

import atexit
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

#: Seconds that a process waits at its end for calls to finish: a thread that ends within a library may crash it.
_AT_EXIT = 1.0


class Pool:
    """Runs calls in daemon threads, in their order. The threads end with `stop`, or when this is collected."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: _Calls = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._calls, self._threads).atexit = False
        _pools.add(self)

    def submit(self, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Run a call as soon as a thread is free."""
        future: Future[_T] = Future()
        self._calls.put((future, call, arguments))
        if len(self._threads) < self._most:
            name = f"{self._name}_{len(self._threads)}"
            self._threads.append(threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True))
            self._threads[-1].start()
        return future

    def stop(self, patience: float) -> bool:
        """Cancel what has not begun and end the threads; return False if some do not end in `patience` seconds."""
        _end(self._calls, self._threads)
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    deadline = time.monotonic() + _AT_EXIT
    for pool in list(_pools):
        pool.stop(max(deadline - time.monotonic(), 0))


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
