"""The local saves of a run that lie on this machine, for people."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.paths import AnyPath
from titanlite.features.local_saves.abandoned import read_past
from titanlite.features.local_saves.checks import PLACE
from titanlite.features.local_saves.folder import RUN_ID, LocalFolder, id_of, name_of


class LocalSave(NamedTuple):
    """One local save, as this machine has it."""

    manifest: Manifest
    #: "complete": the parts of all ranks are here, by their lengths. "incomplete": other nodes may
    #: have the others. "abandoned": no restart takes it.
    state: str
    reason: str
    #: The folders of the run that hold parts of it.
    roots: list[Path]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for JSON."""
        manifest = self.manifest
        return {
            "folder": str(self.roots[0]),
            "step": manifest.step,
            "state": f"local, {self.state}",
            "reason": self.reason or None,
            "bytes": manifest.size,
            "written": manifest.created,
            "ranks": manifest.world_size,
        }


def list_local_saves(shared: AnyPath, local_folder: str) -> list[LocalSave]:
    """Return the local saves of a run on this machine, oldest first.

    shared: folder of its shared checkpoints. local_folder: as the key.
    """
    try:
        identity = (shared / RUN_ID).read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return []
    pattern = local_folder.replace(PLACE, "*").lstrip("/")
    roots = sorted(Path("/").glob(f"{pattern}/{name_of(shared, identity)}"))
    found: dict[str, tuple[Manifest, list[Path]]] = {}
    for root in roots:
        for one in LocalFolder(root, 0).seen()[0]:
            entry = found.setdefault(one.save, (one.manifest, []))
            if root not in entry[1]:
                entry[1].append(root)
    past = read_past(shared)
    gone = past.gone([manifest for manifest, _ in found.values()], shared)
    saves = []
    for manifest, places in found.values():
        reason = past.abandoned(manifest) or gone
        state = "abandoned"
        if not reason:
            reason = _missing(manifest, roots)
            state = "incomplete" if reason else "complete"
        saves.append(LocalSave(manifest, state, reason, places))
    return sorted(saves, key=lambda one: (one.manifest.created, id_of(one.manifest, roots[0])))


def _missing(manifest: Manifest, roots: Iterable[Path]) -> str:
    """Return which parts of a save are not on this machine; "": all are."""
    ranks = set(range(manifest.world_size))
    for root in roots:
        ranks -= set(LocalFolder(root, 0).parts_of(manifest))
    if not ranks:
        return ""
    return f"{len(ranks)} of {manifest.world_size} parts are on other nodes, if anywhere"


def taken(saves: Iterable[LocalSave], shared: Manifest | None) -> str:
    """Return what a restart takes, as this machine sees it. shared: the newest valid checkpoint."""
    usable = [one for one in saves if one.state != "abandoned"]
    for one in reversed(usable):
        manifest = one.manifest
        if shared is not None and manifest.created <= shared.created:
            break
        if shared is not None and manifest.step <= shared.step:
            break
        condition = "its hashes are right"
        if one.state == "incomplete":
            condition = "other nodes have the rest"
        return f"a restart takes the local save of step {manifest.step}, if {condition}"
    if shared is None:
        return "a restart finds no checkpoint"
    return f"a restart takes the shared checkpoint of step {shared.step}"
