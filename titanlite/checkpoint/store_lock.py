"""At most one live run writes below a URL. A store has no locks, but it lists what is there as it is at that moment.

Each run puts an object `run.lock-<token>` of its own beside the checkpoints, then looks: who sees another's steps back.
Of two that start together at least one sees the other, so two never go on. No conditional requests are needed.
"""

from __future__ import annotations

import json
import random
import secrets
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from titanlite.checkpoint.manifest import CheckpointError
from titanlite.checkpoint.paths import AnyPath, StoreError, StorePath, modified
from titanlite.runs.attempts import this_process, timestamp
from titanlite.runs.lock import DEAD_SECONDS, RENEW_SECONDS, LockedError, is_alive, words_of
from titanlite.utils import logger

_NAME = "run.lock-"
_POLL_SECONDS = 2.0
#: Times that runs which start together step back, and at most how long each time.
_TRIES, _BACK_SECONDS = 6, 2.0


class StoreLock:
    """Holds `root` against other runs while the block runs, as `titanlite.runs.lock.RunLock` holds a folder.

        with StoreLock(StorePath("s3://bucket/run/checkpoint")):
            train()

    One left behind is taken over, with a line in the log: of this machine when its process is gone, else when nobody
    renews it for `dead_seconds`, which are waited for. A run that was taken for dead and lives notices it with its next
    save, which fails, or within `renew_seconds`.
    Raises LockedError when another run is alive, and CheckpointError when the store cannot be written to.
    """

    def __init__(
        self, root: StorePath, renew_seconds: float = RENEW_SECONDS, dead_seconds: float = DEAD_SECONDS
    ) -> None:
        self._root = root
        self._renew_seconds, self._dead_seconds = renew_seconds, dead_seconds
        self.path = root / f"{_NAME}{secrets.token_hex(8)}"
        holder = {"host": socket.gethostname(), "process": this_process(), "since": timestamp()}
        self._content = json.dumps(holder).encode()
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StoreLock:
        try:
            _locks(self._root)  # what is wrong with the store is better said of the URL than of a lock there
            for _ in range(_TRIES):
                if self._take():
                    break
                time.sleep(random.uniform(0, _BACK_SECONDS))
            else:
                raise LockedError(f"{self._root}: other runs start there at this moment; start this one again")
        except StoreError as error:
            raise CheckpointError(f"checkpoint.folder: {error}") from None
        self._thread = threading.Thread(target=self._renew, name="titanlite-store-lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _take(self) -> bool:
        """Try once; False when others were there, all of them dead."""
        self.path.write_bytes(self._content)
        times = _locks(self._root)
        now = times.pop(self.path.name, None)
        if now is None:
            raise StoreError(f"{self._root}: what is written there is not listed: is it another store than it seems?")
        if not times:
            return True
        self.path.unlink(missing_ok=True)
        for name, then in times.items():
            self._take_over(self._root / name, then, now - then)
        return False

    def _take_over(self, lock: StorePath, then: float, age: float) -> None:
        """Delete a lock that was left behind. Raises LockedError for a live one."""
        holder = _read(lock)
        if holder is None:
            return
        alive = is_alive(holder)
        if alive is None:
            alive = self._is_renewed(lock, holder, then, age)
        if alive:
            raise LockedError(
                f"{self._root} belongs to a run that is alive: {words_of(holder)}. Wait for its end or stop it, or "
                f"give this run another --checkpoint.folder. If there is no such run, delete {lock}"
            )
        lock.unlink(missing_ok=True)
        logger.warning(f"the lock of a run that has died is taken over: {words_of(holder)}")

    def _is_renewed(self, lock: StorePath, holder: dict[str, Any], then: float, age: float) -> bool:
        """Watch a lock whose process cannot be looked for: True as soon as it is renewed. Times are the store's."""
        wait = self._dead_seconds - age
        if wait <= 0:
            return False
        logger.warning(
            f"{lock} is of another machine or container: {words_of(holder)}. Watching for up to {wait:.0f} s whether "
            "it is alive"
        )
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            time.sleep(min(_POLL_SECONDS, wait))
            now = _locks(self._root).get(lock.name)
            if now is None:
                return False
            if now != then:
                return True
        return False

    def _renew(self) -> None:
        while not self._released.wait(self._renew_seconds):
            try:
                names = _locks(self._root)
                others = [name for name in names if name != self.path.name]
                if self.path.name in names and not others:
                    self.path.write_bytes(self._content)
                    continue
                if others:  # one that starts just now steps back when it sees this one
                    time.sleep(min(_BACK_SECONDS, self._renew_seconds))
                    names = _locks(self._root)
                    others = [name for name in others if name in names]
                    if self.path.name in names and not others:
                        continue
                who = f"taken over: {words_of(_read(self._root / others[0]) or {})}" if others else "deleted"
                logger.error(f"{self.path} was {who}. Two runs may be writing into {self._root}: stop one")
                if others:
                    self.path.unlink(missing_ok=True)
                return
            except OSError:
                continue  # a store that is away for a while


def check_reachable(key: str, path: AnyPath) -> None:
    """Raises CheckpointError, naming the key, when a store cannot be asked about `path`; whatever it holds."""
    if isinstance(path, StorePath):
        try:
            path.is_dir()
        except StoreError as error:
            raise CheckpointError(f"{key}: {error}") from None


class Fence:
    """Notices, before anything is written, that another run has taken the place since the first look."""

    def __init__(self, root: AnyPath) -> None:
        self._root = root
        self._known: frozenset[str] | None = None

    def look(self) -> None:
        """Raises CheckpointError when there is a lock that was not there at first. In a file system nothing is done."""
        if not isinstance(self._root, StorePath):
            return
        names = frozenset(_locks(self._root))
        if self._known is None:
            self._known = names
        for name in names - self._known:
            holder = _read(self._root / name)
            if holder is not None:
                raise CheckpointError(
                    f"{self._root} was taken over by another run: {words_of(holder)}. Nothing is written there any "
                    "more: stop one of the two"
                )


def _locks(root: StorePath) -> dict[str, float]:
    """Name of each lock → when it was renewed, by the store's clock."""
    return {name: modified(entry) for name, entry in root.listing().items() if name.startswith(_NAME)}


def _read(lock: StorePath) -> dict[str, Any] | None:
    """What a lock says; None for one that is gone."""
    try:
        found = json.loads(lock.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
