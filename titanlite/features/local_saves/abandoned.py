"""The local saves that a run has abandoned: they must not come back, on whatever node they lie.

Each start, and each rollback, begins a new line of the run, from one save. What earlier lines saved
after that one is abandoned. A line has a random name: the shared folder may be brought back from a
backup, and then other lines begin there. A run that goes on without local saves forgets all lines
(`titanlite.checkpoint.manager`).

The newest shared checkpoint is noted too. Where it is gone, somebody went back by hand.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manager import LOCAL_PAST
from titanlite.checkpoint.manifest import Manifest, parse_manifest, step_folder
from titanlite.checkpoint.paths import AnyPath, entries, write_whole
from titanlite.features.local_saves.folder import ABOUT

#: Entries of a local save's `ABOUT`: the name of its line; the newest shared checkpoint then.
LINE = "line"
SHARED = "shared"


class Cut(NamedTuple):
    """A line began: from the save that was `created` then, of `step`."""

    line: str
    created: float
    step: int


class Shared(NamedTuple):
    """A shared checkpoint."""

    step: int
    created: float


class Past(NamedTuple):
    """Where lines began, the present one last, and the newest shared checkpoint."""

    cuts: tuple[Cut, ...] = ()
    newest: Shared | None = None

    @property
    def line(self) -> str:
        """The name of the present line; "" before the first."""
        return self.cuts[-1].line if self.cuts else ""

    def go_on(self, created: float, step: int, newest: Shared | None) -> Past:
        """Return the past of a new line. created: time of the save that it begins from."""
        # The new cut abandons all that a later one among the earlier cuts did.
        cuts = [cut for cut in self.cuts if cut.created < created]
        return Past((*cuts, Cut(uuid.uuid4().hex[:16], created, step)), newest)

    def abandoned(self, manifest: Manifest) -> str:
        """Return why a local save must not come back; "": it may."""
        lines = ["", *(cut.line for cut in self.cuts)]
        line = manifest.train[ABOUT].get(LINE)
        if line not in lines:
            return "the shared checkpoints tell nothing of the start that wrote it"
        for cut in self.cuts[lines.index(line) :]:
            if manifest.created > cut.created:
                return f"later the run went on from step {cut.step}, without it"
        return ""

    def gone(self, manifests: Iterable[Manifest], shared: AnyPath) -> str:
        """Return why no local save at all may be taken; "": they may.

        manifests: of local saves. Those of the present line know of shared checkpoints too: the
        shared folder may be an older state of itself.
        """
        known = [] if self.newest is None else [self.newest]
        begun = self.cuts[-1].created if self.cuts else -1.0
        for manifest in manifests:
            about = manifest.train[ABOUT]
            if about.get(LINE) == self.line and manifest.created > begun and about.get(SHARED):
                known.append(msgspec.convert(about[SHARED], Shared))
        if not known:
            return ""
        newest = max(known, key=lambda one: one.created)
        if _is_there(shared, newest):
            return ""
        return f"the shared checkpoint of step {newest.step}, which the run had then, is gone"


def _is_there(root: AnyPath, shared: Shared) -> bool:
    """Return whether a shared checkpoint is still there, perhaps damaged or set aside."""
    folder = step_folder(root, shared.step)
    aside = f"{folder.name}.invalid-"
    names = entries(root)
    if any(name.startswith(aside) for name in names):
        return True
    try:
        return folder.name in names and parse_manifest(folder).created == shared.created
    except CheckpointError:
        return True


def read_past(shared: AnyPath) -> Past:
    """Return the past of the run whose shared checkpoints are in a folder."""
    path = shared / LOCAL_PAST
    try:
        return msgspec.json.decode(path.read_bytes() or b"[]", type=Past)
    except FileNotFoundError:
        return Past()
    except msgspec.MsgspecError as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Delete it: the run then takes the newest shared "
            "checkpoint"
        ) from None


def write_past(shared: AnyPath, past: Past) -> None:
    """Write the past of a run, durably."""
    write_whole(shared / LOCAL_PAST, json.dumps(past).encode())
