"""run.lock: at most one live run writes into a folder, or below the URL of an object store.

The lock is a file (an object) that names its holder. Creating it is exclusive, and a thread renews
its time. This lease is the run's one sign of life: `titanlite runs` reads it too. Locks of the file
system are not used. Not all shared file systems honour them, and they do not name the holder.

filelock's SoftFileLease is no replacement (4.2.11): it takes the live lease of another machine that
has the same host name. It waits a whole lease for an abandoned one of any age.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite import exit_codes
from titanlite.utils import atomic_write, logger, not_a_link, parse_json, timestamp

if TYPE_CHECKING:
    from titanlite.checkpoint.store_paths import StorePath

FILE = "run.lock"
RENEW_SECONDS = 15.0
#: A lock that was not renewed for so long is abandoned, where its process cannot be looked up.
LEASE_SECONDS = 180.0
#: Names hosts that the job of this run has lost, with commas between them: their locks are
#: abandoned.
LOST_HOSTS = "TITANLITE_LOST_HOSTS"
_POLL_SECONDS = 0.5
#: A live run that was asked to stop has so long for its last save before another start is refused.
ENDING_SECONDS = 240.0
#: How soon a run that was asked to stop says so in its lock.
_NOTICE_SECONDS = 1.0
#: Entry of a lock whose holder was asked to stop, and is saving.
_ENDING = "ending"
#: Entry of a lock whose holder could not delete it.
RELEASED = "released"


class LockedError(RuntimeError):
    """Another run holds the folder; the text names the holder and the remedy."""

    exit_code = exit_codes.CHECKPOINT


class LockLostError(OSError):
    """Another run has taken the folder over."""


class RunLock:
    """Holds `folder/run.lock` while the block runs. Rank 0 of a run takes it for all ranks.

        with RunLock(Path("outputs/a")):
            train()

    An abandoned lock is taken over, with a warning. On the same machine its process is looked up.
    Elsewhere, as in another container, it must not have been renewed for `LEASE_SECONDS`, by the
    times of the file system or store; the rest of them is waited for. A run that loses its lock
    logs an error, and its next save fails (`OwnershipCheck`).

    It waits for a run that was asked to stop and is saving. Where the launcher was killed, the next
    start may come before that run ends.

    key: config key of the folder, for messages. ending: whether this run was asked to stop. Raises
    LockedError when another run is alive, and OSError when the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path | StorePath,
        key: str = "job.dump_folder",
        ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self.folder = folder
        self.path = folder / FILE
        self._key = key
        self._ending = ending
        #: Distinguishes this hold from all others, also of the same process.
        self._token = secrets.token_hex(8)
        self._content = b""
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="titanlite-lock", daemon=True)

    def __enter__(self) -> RunLock:
        holder = {
            "token": self._token,
            "host": socket.gethostname(),
            "process": process_of(os.getpid()),
        }
        self._content = (json.dumps({**holder, "since": timestamp()}) + "\n").encode()
        if isinstance(self.folder, Path):
            self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._take(self.path)
            self._thread.start()
        except BaseException:
            # Also of a signal.
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        if self._thread.ident is not None:
            self._thread.join()
        with suppress(OSError):
            held = (read_lock(self.path) or {}).get("token") == self._token
            if held and not _remove(self.path):
                # The store forbids deletions.
                released = {**json.loads(self._content), RELEASED: True}
                self.path.write_bytes(json.dumps(released).encode())

    def _take(self, path: Path | StorePath) -> None:
        """Raises LockedError."""
        while not self._create(path):
            holder = read_lock(path)
            if holder == {}:
                # Perhaps it is being written at this moment.
                time.sleep(_POLL_SECONDS)
                holder = read_lock(path)
            if holder is None:
                # Released in between.
                continue
            if self._is_alive(path, holder):
                if self._outlasts(path, holder):
                    continue
                raise LockedError(
                    f"{self.folder} belongs to a run that is alive: {_describe(holder)}. Wait for "
                    f"its end or stop it, or give this run another --{self._key}. If there is no "
                    f"such run, delete {path}"
                )
            # Several runs may see the same abandoned lock. Only the holder of a lock on the token
            # deletes the token. So no run deletes the lock of a faster one.
            claim = self.folder / f".{FILE}.dead.{holder.get('token', '')}"
            self._take(claim)
            try:
                now = read_lock(path)
                if now is None or now.get("token") != holder.get("token"):
                    continue
                if not holder.get(RELEASED):
                    logger.warning(
                        f"the lock of a run that has died is taken over: {_describe(holder)}"
                    )
                if not _remove(path):
                    path.write_bytes(self._content)
                    return
            finally:
                _remove(claim)

    def _create(self, path: Path | StorePath) -> bool:
        try:
            if not isinstance(path, Path):
                path.write_new(self._content)
                return True
            # O_EXCL is atomic on NFS 3 and later: open(2).
            with path.open("xb") as stream:
                try:
                    stream.write(self._content)
                    stream.flush()
                except BaseException:
                    # A full disk, or a signal.
                    path.unlink(missing_ok=True)
                    raise
        except FileExistsError:
            return False
        return True

    def _is_alive(self, path: Path | StorePath, holder: dict[str, Any]) -> bool:
        """A lock that is released meanwhile counts as dead."""
        host = str(holder.get("host")).partition(".")[0]
        is_lost = host and host in os.environ.get(LOST_HOSTS, "").split(",")
        if holder.get(RELEASED) or is_lost:
            return False
        alive = process_is_alive(holder)
        if alive is not None:
            return alive
        probe = self.folder / f".{FILE}.now.{self._token}"
        try:
            # Ages are by the clock of the file system or the store.
            probe.write_bytes(b"")
            now = modified_at(probe)
            seen = modified_at(path)
        finally:
            _remove(probe)
        if now is None or seen is None:
            return False
        deadline = time.monotonic() + LEASE_SECONDS - max(now - seen, 0.0)
        wait = deadline - time.monotonic()
        if wait > 0:
            logger.warning(
                f"{path} is held by another machine or container: {_describe(holder)}. Watching "
                f"for up to {wait:.0f} s whether it is alive"
            )
        while time.monotonic() < deadline:
            time.sleep(min(_POLL_SECONDS, wait))
            now = modified_at(path)
            if now != seen:
                return now is not None
        return False

    def _outlasts(self, path: Path | StorePath, holder: dict[str, Any]) -> bool:
        """Wait for a holder that was asked to stop; return whether it has gone."""
        if not holder.get(_ENDING):
            return False
        logger.warning(
            f"{self.folder} belongs to a run that was asked to stop and is ending: "
            f"{_describe(holder)}. Waiting for up to {ENDING_SECONDS:.0f} s for its last save"
        )
        deadline = time.monotonic() + ENDING_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            now = read_lock(path)
            if now is None or now.get(RELEASED) or process_is_alive(holder) is False:
                return True
            if now and now.get("token") != holder.get("token"):
                # Another run was faster.
                return True
        return False

    def _renew(self) -> None:
        check = OwnershipCheck(self.folder, self._token)
        due = time.monotonic() + RENEW_SECONDS
        announced = False
        while not self._released.wait(min(_NOTICE_SECONDS, RENEW_SECONDS)):
            ends = not announced and self._ending()
            if not ends and time.monotonic() < due:
                continue
            due = time.monotonic() + RENEW_SECONDS
            try:
                check.look()
                if ends:
                    content = {**json.loads(self._content), _ENDING: True}
                    self._content = json.dumps(content).encode() + b"\n"
                if not isinstance(self.path, Path):
                    self.path.write_bytes(self._content)
                elif ends:
                    atomic_write(self.path, self._content)
                else:
                    os.utime(self.path)
                announced = announced or ends
            except (LockLostError, FileNotFoundError) as error:
                logger.error(f"{error}: two runs may be writing into {self.folder}")
                return
            except OSError:
                # The file system or the store does not answer; try again.
                continue


class OwnershipCheck:
    """Notices that another run has taken a folder, so that nothing more is published there."""

    def __init__(self, folder: Path | StorePath, token: object = None) -> None:
        self._path = folder / FILE
        self._token = token
        self._looked = token is not None

    def look(self) -> None:
        """Raise LockLostError when the lock is another run's than at the first call, OSError if
        unknown.
        """
        holder = read_lock(self._path)
        if not self._looked:
            self._looked = True
            self._token = (holder or {}).get("token")
        elif holder is not None and holder.get("token") != self._token:
            raise LockLostError(
                f"{self._path} was taken over by another run: {_describe(holder)}. Nothing is "
                "written there any more: stop one of the two"
            )


def _remove(path: Path | StorePath) -> bool:
    """Return False where a store forbids it. Raises OSError for a file."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        if isinstance(path, Path):
            raise
        return False
    return True


def read_lock(path: Path | StorePath) -> dict[str, Any] | None:
    """Return {} if damaged, None if there is no lock. Raises OSError."""
    try:
        if isinstance(path, Path):
            with open(path, "rb", opener=not_a_link) as stream:
                found = parse_json(stream.read())
        else:
            found = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def modified_at(path: Path | StorePath) -> float | None:
    """Return when a lock was renewed, by the clock of its file system; None: there is none."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _describe(holder: dict[str, Any]) -> str:
    process = holder.get("process")
    if not isinstance(process, dict) or "id" not in process:
        return "its lock does not name its holder"
    return f"process {process['id']} on {holder.get('host')}, since {holder.get('since')}"


def process_is_alive(holder: dict[str, Any]) -> bool | None:
    """Return whether a holder's process runs; None where this machine or container cannot know."""
    process = holder.get("process")
    space = process_of(os.getpid()).get("space")
    if not isinstance(process, dict) or space is None or process.get("space") != space:
        return None
    number = process.get("id")
    return isinstance(number, int) and 0 < number < 2**31 and process_of(number) == process


def process_of(pid: int) -> dict[str, Any]:
    """Return id, start time (clock ticks since boot) and space of a process; at least its id.

    The space is this boot and the PID namespace, as an id means the same process only there.
    Machines and containers may share a host name.
    """
    try:
        # The name in parentheses may contain spaces and parentheses. A zombie (Z, X) has ended.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        space = (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} "
            f"{os.readlink('/proc/self/ns/pid')}"
        )
    except OSError:
        return {"id": pid}
    if fields[0] in "ZX":
        return {"id": pid}
    return {"id": pid, "started": int(fields[19]), "space": space}
