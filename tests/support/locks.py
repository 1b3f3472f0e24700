"""Threads that compete for a lock."""

from __future__ import annotations

import threading

from tests.support.processes import until
from titanlite.checkpoint.store_paths import AnyPath
from titanlite.runs.lock import LockedError, RunLock


def compete(place: AnyPath, count: int) -> tuple[int, int]:
    """Take a lock from so many threads at once; how many held it and how many were refused."""
    gate = threading.Barrier(count)
    over = threading.Event()
    outcomes = list[str]()

    def attempt() -> None:
        gate.wait()
        try:
            with RunLock(place):
                outcomes.append("held")
                over.wait(300)
        except LockedError:
            outcomes.append("refused")

    threads = [threading.Thread(target=attempt) for _ in range(count)]
    for thread in threads:
        thread.start()
    until(lambda: len(outcomes) == count)
    over.set()
    for thread in threads:
        thread.join()
    return outcomes.count("held"), outcomes.count("refused")
