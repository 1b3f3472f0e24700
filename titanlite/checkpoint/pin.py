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
from titanlite.utils import parse_json

#: How a pin of an upload begins; JSON follows.
_TEXT = b"titanlite push reads this checkpoint, and removes this file afterwards\n"
#: Seconds until a pin ends whose process cannot be looked up: it is on another machine.
_LONGEST = 86_400.0


@contextlib.contextmanager
def pinned(folder: AnyPath) -> Iterator[None]:
    """Pin a checkpoint inside of the block, unless a user has.

    A pin that a user makes or touches meanwhile stays. A folder that cannot be written to is read
    without a pin.
    """
    pin = folder / PIN
    written = int(time.time())
    holder = {"process": process_of(os.getpid()), "written": written}
    content = _TEXT + json.dumps(holder).encode() + b"\n"
    stamp = None
    with contextlib.suppress(OSError):
        if is_over(pin):
            pin.unlink(missing_ok=True)
        write_new(pin, content)
        if isinstance(pin, Path):
            # Another time is that of a user's touch. Not all file systems let one set it.
            with contextlib.suppress(OSError):
                os.utime(pin, (written, written))
        stamp = pin.stat().st_mtime
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if pin.read_bytes() == content and pin.stat().st_mtime == stamp:
                pin.unlink(missing_ok=True)


def is_over(pin: AnyPath) -> bool:
    """Return whether a pin is of a process that has ended; False for one of a user."""
    try:
        text, _, rest = pin.read_bytes().partition(_TEXT)
        holder = parse_json(rest)
        written = holder["written"]
        if text or (isinstance(pin, Path) and pin.stat().st_mtime != written):
            return False
        alive = process_is_alive(holder)
        if alive is None:
            alive = time.time() - written < _LONGEST
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return False
    return not alive
