"""run.lock: at most one live run writes into a folder.

The file names who holds it, and its time is renewed by a thread. No lock of the file system is used: those of shared
ones cannot be relied on, and none tells who holds it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from titanlite import exit_codes
from titanlite.runs.attempts import process_space, process_start, this_process, timestamp
from titanlite.utils import logger

FILE = "run.lock"
RENEW_SECONDS = 15.0
#: A lock of a process that cannot be looked for counts as left behind when it was not renewed for so long.
DEAD_SECONDS = 180.0
_POLL_SECONDS = 0.5


class LockedError(RuntimeError):
    """Another run holds the folder; the text names it and says what to do."""

    exit_code = exit_codes.CHECKPOINT


class RunLock:
    """Holds `folder/run.lock` while the block runs. Rank 0 of a run takes it, for all ranks.

        with RunLock(Path("outputs/a")):
            train()

    One left behind is taken over, with a line in the log: on this machine when the process is gone, else (another
    machine, another container) when nobody renews it for `dead_seconds`, which are waited for. key: of the config, that
    names the folder.
    Raises LockedError when another run is alive, and OSError when the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        key: str = "job.dump_folder",
        renew_seconds: float = RENEW_SECONDS,
        dead_seconds: float = DEAD_SECONDS,
    ) -> None:
        self.path = Path(folder) / FILE
        self._key = key
        self._renew_seconds, self._dead_seconds = renew_seconds, dead_seconds
        #: Tells this hold from any other, of this process too.
        self._token = secrets.token_hex(8)
        self._released = threading.Event()
        self._thread: threading.Thread | None = None
        self._made_folder = False

    def __enter__(self) -> RunLock:
        self._made_folder = not self.path.parent.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while not self._create():
            self._take_over()
        self._thread = threading.Thread(target=self._renew, name="titanlite-lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):
            if _read(self.path).get("token") == self._token:
                self.path.unlink()
            if self._made_folder:
                self.path.parent.rmdir()  # only if nothing was written there

    def _create(self) -> bool:
        """Make the file; False when there is one."""
        return self._write_new(self.path)

    def _write_new(self, path: Path) -> bool:
        """Write who this is to a file that must not exist; False when it does."""
        holder = {"token": self._token, "host": socket.gethostname(), "process": this_process(), "since": timestamp()}
        # Written aside, so that nobody ever reads half of it; a link fails where there is a file, on NFS too.
        aside = self.path.with_name(f".{FILE}.{self._token}")
        try:
            aside.write_text(json.dumps(holder) + "\n")
            try:
                os.link(aside, path)
            except FileExistsError:
                return False
            except OSError:  # a file system without links
                try:
                    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                except FileExistsError:
                    return False
                with os.fdopen(file, "w") as stream:
                    stream.write(json.dumps(holder) + "\n")
        finally:
            aside.unlink(missing_ok=True)
        return True

    def _take_over(self) -> None:
        """Put aside a lock that was left behind. Raises LockedError for a live one."""
        holder = _read(self.path)
        if not holder and not self.path.exists():
            return
        alive = is_alive(holder)
        if alive is None:
            alive = self._is_renewed(holder)
        if alive:
            raise LockedError(
                f"{self.path.parent} belongs to a run that is alive: {words_of(holder)}. Wait for its end or stop it, "
                f"or give this run another --{self._key}. If there is no such run, delete {self.path}"
            )
        # Several may have found it dead: only who holds the claim on this very lock deletes it, and nobody writes it.
        claim = self.path.with_name(f".{FILE}.dead.{holder.get('token', '')}")
        if not self._write_new(claim):
            other = _read(claim)
            if is_alive(other) is False:  # died in the moment between
                claim.unlink(missing_ok=True)
            elif other:
                raise LockedError(
                    f"{self.path.parent} is being taken at this moment by another run: {words_of(other)}. If there is "
                    f"no such run, delete {claim}"
                )
            return
        try:
            if _read(self.path).get("token") != holder.get("token"):
                return  # somebody else was quicker; look again
            self.path.unlink(missing_ok=True)
        finally:
            claim.unlink(missing_ok=True)
        logger.warning(f"the lock of a run that has died is taken over: {words_of(holder)}")

    def _is_renewed(self, holder: dict[str, Any]) -> bool:
        """Watch a lock whose process cannot be looked for: True as soon as it is renewed, or if it is gone."""
        seen = _time(self.path)
        age = self._age()
        if age >= self._dead_seconds:
            return False
        wait = self._dead_seconds - age
        logger.warning(
            f"{self.path} is held by another machine or container: {words_of(holder)}. Watching for up to {wait:.0f} s "
            "whether it is alive"
        )
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            time.sleep(min(_POLL_SECONDS, wait))
            now = _time(self.path)
            if now is None:
                return False
            if now != seen:
                return True
        return False

    def _age(self) -> float:
        """Seconds since the lock was renewed, both by the clock of the file system: machines' own clocks differ."""
        probe = self.path.with_name(f".{FILE}.now.{self._token}")
        try:
            probe.touch()
            now, then = _time(probe), _time(self.path)
        finally:
            probe.unlink(missing_ok=True)
        return 0.0 if now is None or then is None else max(now - then, 0.0)

    def _renew(self) -> None:
        while not self._released.wait(self._renew_seconds):
            try:
                holder = _read(self.path)
                if holder.get("token") != self._token:
                    who = f"taken over: {words_of(holder)}" if holder else "deleted"
                    logger.error(f"{self.path} was {who}. Two runs may be writing into {self.path.parent}: stop one")
                    return
                os.utime(self.path)
            except OSError:
                continue  # a file system that is away for a while


def is_alive(holder: dict[str, Any]) -> bool | None:
    """Whether the holder's process runs; None where that cannot be looked up from here."""
    process = holder.get("process")
    if not isinstance(process, dict) or not process.get("space") or process["space"] != process_space():
        return None
    return process_start(int(process.get("id", 0))) == process.get("started")


def _read(path: Path) -> dict[str, Any]:
    """What a lock says; empty for one that is gone or not ours to read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def words_of(holder: dict[str, Any]) -> str:
    process = holder.get("process")
    pid = process.get("id") if isinstance(process, dict) else None
    if pid is None:
        return "its lock does not say whose it is"
    return f"process {pid} on {holder.get('host')}, since {holder.get('since')}"
