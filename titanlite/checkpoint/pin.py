"""A pin that keeps a run from deleting a checkpoint while another process reads it. No torch.

It is a file KEEP, as a user may make one, which names its process. It ends with that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from titanlite.checkpoint.manifest import PIN
from titanlite.checkpoint.paths import AnyPath, write_new
from titanlite.runs.lock import process_is_alive, process_of
from titanlite.utils import new_file, parse_json

#: How a pin of an upload begins; JSON follows.
_TEXT = b"titanlite push reads this checkpoint, and removes this file afterwards\n"
#: Seconds until a pin ends whose process cannot be looked up: it is on another machine.
_LONGEST = 86_400.0


@contextlib.contextmanager
def pinned(folder: AnyPath) -> Iterator[None]:
    """Pin a checkpoint inside of the block, unless it is pinned already, or cannot be written to.

    A pin that a user makes or touches meanwhile stays.
    """
    pin = folder / PIN
    written = int(time.time())
    holder = {"process": process_of(os.getpid()), "written": written}
    content = _TEXT + json.dumps(holder).encode() + b"\n"
    stamp = None
    with contextlib.suppress(OSError):
        stamp = _write(pin, content, written)
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
    try:
        text, _, rest = pin.read_bytes().partition(_TEXT)
        holder = parse_json(rest)
        written = float(holder["written"])
        is_touched = isinstance(pin, Path) and pin.stat().st_mtime != written
        alive = process_is_alive({"process": holder["process"]})
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return False
    if alive is None:
        alive = time.time() - written < _LONGEST
    return not (text or is_touched or alive)
