"""What a run has left behind: saves that must not come back from a node that was away.

Each start, and each rollback, begins a new line of the run, from one save. What earlier lines saved
after that one is abandoned, on whatever node it lies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.paths import AnyPath
from titanlite.features.local_saves.folder import ABOUT
from titanlite.utils import atomic_write

#: File beside the shared checkpoints.
FILE = "local-saves.past"
#: Entry of a local save's `ABOUT`: the number of its line.
LINE = "line"


class Cut(NamedTuple):
    """A line began: from the save that was `created` then, of `step`."""

    line: int
    created: float
    step: int


class Past(NamedTuple):
    """The present line, and where lines began."""

    line: int = 0
    cuts: tuple[Cut, ...] = ()

    def go_on(self, created: float, step: int) -> Past:
        """Return the past of a new line. created: time of the save that it begins from."""
        line = self.line + 1
        # The new cut abandons all that a later one among the earlier cuts did.
        cuts = [cut for cut in self.cuts if cut.created < created]
        return Past(line, (*cuts, Cut(line, created, step)))

    def abandoned(self, manifest: Manifest) -> str:
        """Return why a local save must not come back; "": it may."""
        line = manifest.train[ABOUT].get(LINE, 0)
        for cut in self.cuts:
            if cut.line > line and manifest.created > cut.created:
                return f"later the run went on from step {cut.step}, without it"
        return ""


def read_past(shared: AnyPath) -> Past:
    """Return the past of the run whose shared checkpoints are in a folder."""
    path = shared / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Past)
    except FileNotFoundError:
        return Past()
    except msgspec.MsgspecError as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Move it and the local saves away, or turn off "
            "checkpoint.local_folder"
        ) from None


def write_past(shared: AnyPath, past: Past) -> None:
    """Write the past of a run, durably."""
    path = shared / FILE
    content = json.dumps(past).encode()
    if isinstance(path, Path):
        atomic_write(path, content)
    else:
        path.write_bytes(content)
