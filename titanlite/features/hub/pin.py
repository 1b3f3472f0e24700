"""A pin that keeps a run from deleting a checkpoint while it is read for an upload. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from titanlite.checkpoint.manifest import PIN
from titanlite.checkpoint.paths import AnyPath, write_new

#: Content of a pin that an upload made. One that was killed leaves it, and the next one takes it.
_CONTENT = b"titanlite push reads this checkpoint, and removes this file afterwards\n"


@contextlib.contextmanager
def pinned(folder: AnyPath) -> Iterator[None]:
    """Pin a checkpoint inside of the block, unless a user has.

    A pin that a user makes or touches meanwhile stays. A folder that cannot be written to is read
    without a pin.
    """
    pin = folder / PIN
    with contextlib.suppress(OSError):
        write_new(pin, _CONTENT)
    ours = _stamp(pin)
    try:
        yield
    finally:
        if ours is not None and _stamp(pin) == ours:
            with contextlib.suppress(OSError):
                pin.unlink(missing_ok=True)


def _stamp(pin: AnyPath) -> float | None:
    """Return when a pin of an upload was written; None for one of a user, or without one."""
    try:
        return pin.stat().st_mtime if pin.read_bytes() == _CONTENT else None
    except OSError:
        return None
