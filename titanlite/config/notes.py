"""Notes on a config: facts that a user should know, and that do not stop a run."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple


class Weight(IntEnum):
    """Subjects of notes, the gravest first."""

    #: The loss, the data or the precision: the run may be another than the one that was meant.
    NUMBERS = 1
    #: Work that may be lost.
    WORK = 2
    #: Memory and speed.
    SPEED = 3
    #: How a number follows, and what has no effect on the run.
    REST = 4


class Note(NamedTuple):
    """One sentence for a user."""

    weight: Weight
    text: str
    #: Whether the log of a run has it as a warning.
    warns: bool = False


def by_weight(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Return each note once, the gravest first, and warnings before others of their weight."""
    return tuple(sorted(dict.fromkeys(notes), key=lambda note: (note.weight, not note.warns)))
