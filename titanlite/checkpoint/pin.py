"""A pin that keeps a run from deleting a checkpoint while another process reads it. No torch.

It is a file KEEP, as a user may make one, which names its process. It ends with that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titanlite.checkpoint.manifest import PIN
from titanlite.checkpoint.paths import AnyPath, write_new
from titanlite.runs.lock import process_is_alive, process_of
from titanlite.utils import logger, new_file, parse_json

#: How a pin of an upload begins; JSON follows.
_TEXT = b"titanlite push reads this checkpoint, and removes this file afterwards\n"
#: Seconds until a pin ends whose process cannot be looked up: it is on another machine.
_LONGEST = 86_400.0
_POLL_SECONDS = 0.2


@contextlib.contextmanager
def pinned(folder: AnyPath, tell: Callable[[str], object] = logger.info) -> Iterator[None]:
    """Pin a checkpoint inside of the block, unless a user has.

    A pin that a user makes or touches meanwhile stays. A folder that cannot be written to is read
    without a pin. The pin of another process of this machine goes at its end, so that is awaited.
    """
    pin = folder / PIN
    process = process_of(os.getpid())
    content = b""
    stamp = None
    is_told = False
    while stamp is None:
        if _is_held(pin, process):
            if not is_told:
                tell(f"another push reads {folder}: waiting for its end")
            is_told = True
            time.sleep(_POLL_SECONDS)
            continue
        written = int(time.time())
        content = _TEXT + json.dumps({"process": process, "written": written}).encode() + b"\n"
        try:
            stamp = _write(pin, content, written)
        except FileExistsError:
            # Unless another push was faster, or has just ended: of a user or of another machine.
            is_there = os.path.lexists(pin) if isinstance(pin, Path) else pin.is_file()
            if is_there and not _is_held(pin, process) and not is_over(pin):
                break
        except OSError:
            break
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if pin.read_bytes() == content and pin.stat().st_mtime == stamp:
                pin.unlink(missing_ok=True)


def _write(pin: AnyPath, content: bytes, written: int) -> float:
    """Write a pin where there is none, or one that is over; return its time. Raises OSError."""
    if is_over(pin):
        pin.unlink(missing_ok=True)
    if not isinstance(pin, Path):
        write_new(pin, content)
        return pin.stat().st_mtime
    part = pin.with_name(f"{PIN}.{os.getpid()}.part")
    try:
        with new_file(part) as stream:
            stream.write(content)
        # Another time is that of a user's touch. Not all file systems let one set it.
        with contextlib.suppress(OSError):
            os.utime(part, (written, written))
        try:
            # Of two processes one fails.
            os.link(part, pin)
        except FileExistsError:
            raise
        except OSError:
            # A file system without links.
            if os.path.lexists(pin):
                raise FileExistsError from None
            part.rename(pin)
    finally:
        part.unlink(missing_ok=True)
    return pin.stat().st_mtime


def is_over(pin: AnyPath) -> bool:
    """Return whether a pin is of a process that has ended; False for one of a user."""
    holder = _holder(pin)
    if holder is None:
        return False
    alive = process_is_alive(holder)
    if alive is None:
        alive = time.time() - holder["written"] < _LONGEST
    return not alive


def _is_held(pin: AnyPath, process: dict[str, Any]) -> bool:
    """Return whether a pin is of another process of this machine that runs."""
    holder = _holder(pin)
    return holder is not None and holder["process"] != process and bool(process_is_alive(holder))


def _holder(pin: AnyPath) -> dict[str, Any] | None:
    """Return what the pin of a process tells; None for one of a user, or none."""
    try:
        text, _, rest = pin.read_bytes().partition(_TEXT)
        holder = parse_json(rest)
        written = float(holder["written"])
        if text or (isinstance(pin, Path) and pin.stat().st_mtime != written):
            return None
        return {"process": holder["process"], "written": written}
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
