"""The local saves of one run on one node, and which of them may come back."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from titanlite.checkpoint.errors import CheckpointError, NewerFormatError
from titanlite.checkpoint.manager import LOCAL_PAST
from titanlite.checkpoint.manifest import FILE, Manifest, parse_manifest
from titanlite.checkpoint.store_paths import AnyPath, sync_folder, write_new, write_whole

#: Random generators of all ranks, [ranks, bytes].
GENERATORS = "generators.bin"
#: Entry of a local manifest's train state: {"save": id of the save, "layout": of the tensors,
#: "line": as `Past.line`}.
ABOUT = "local_save"
_PART = re.compile(r"(?:rank|copy)-(\d+)/step-\d+")
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class LocalFolder:
    """Parts of a run that this node holds. root: `local_folder/RUN`."""

    root: Path
    rank: int

    def step(self, step: int) -> Path:
        return self.root / f"rank-{self.rank}" / f"step-{step}"

    def copy(self, owner: int, step: int) -> Path:
        return self.root / f"copy-{owner}" / f"step-{step}"

    def manifests(self) -> tuple[dict[str, Manifest], list[str]]:
        """Return the manifests on this node by the id of the save, and what is wrong with others.

        A part without one is of a save that never became whole. Raises NewerFormatError for one of
        a later titanlite.
        """
        found = {}
        problems = []
        for _, folder in self._steps():
            if not (folder / FILE).is_file():
                continue
            try:
                manifest = parse_manifest(folder)
                found[id_of(manifest)] = manifest
            except NewerFormatError:
                raise
            except CheckpointError as error:
                problems.append(str(error))
        return found, problems

    def parts_of(self, manifest: Manifest) -> list[int]:
        """Return the ranks whose parts of a save are here with the right length, even without
        manifests.
        """
        found = set()
        for owner, folder in self._steps():
            path = part_path(folder, id_of(manifest))
            with contextlib.suppress(OSError):
                if path.stat().st_size == manifest.files.get(part_name(owner)):
                    found.add(owner)
        return sorted(found)

    def path_of(self, owner: int, manifest: Manifest) -> Path:
        save = id_of(manifest)
        own = part_path(self.root / f"rank-{owner}" / f"step-{manifest.step}", save)
        copied = part_path(self.copy(owner, manifest.step), save)
        return copied if copied.is_file() and not own.is_file() else own

    def prune(self, keep: int) -> None:
        """Delete old saves; ranks of a node do it together, with one result."""
        manifests, _ = self.manifests()
        stay = sorted(manifests, key=lambda save: (manifests[save].step, save))[-keep:]
        for _, folder in self._steps():
            if (folder / FILE).is_file() and not _holds(folder, stay):
                remove(folder)

    def clear(self, stay: Collection[str]) -> None:
        """Delete all parts but those of some saves. No rank may be saving."""
        for _, folder in self._steps():
            if not _holds(folder, stay):
                remove(folder)

    def _steps(self) -> Iterator[tuple[int, Path]]:
        """Yield each folder of a part with its rank. An unreadable disk counts as lost: other nodes
        may have its parts.
        """
        folders = []
        with contextlib.suppress(OSError):
            folders = sorted(self.root.glob("*/step-*"))
        for folder in folders:
            # Other folders are no saves: they are neither read nor deleted.
            if part := _PART.fullmatch(f"{folder.parent.name}/{folder.name}"):
                yield int(part[1]), folder


def _holds(folder: Path, saves: Collection[str]) -> bool:
    return any(part_path(folder, save).is_file() for save in saves)


def part_name(rank: int) -> str:
    """Return the name of a rank's part in the manifest's lists of files and hashes."""
    return f"rank-{rank}"


def part_path(folder: Path, save: str) -> Path:
    """Return the file with a rank's tensors, named by the save so that no other's is taken
    for it.
    """
    return folder / f"{save}.safetensors"


def id_of(manifest: Manifest) -> str:
    """Return the id of a local save. Raises CheckpointError where there is none."""
    about = manifest.train.get(ABOUT)
    save = about.get("save") if isinstance(about, dict) else None
    if not isinstance(save, str) or not _ID.fullmatch(save):
        raise CheckpointError(f"the manifest of step {manifest.step} is not of a local save")
    return save


def publish(folders: Sequence[Path], content: bytes) -> None:
    """Write the manifest beside parts of a save, which makes them that."""
    for folder in folders:
        write_new(folder / FILE, content)
        sync_folder(folder.parent)


def remove(folder: Path) -> None:
    """Delete a part of a save, the manifest first, as far as possible; another rank may be
    faster.
    """
    with contextlib.suppress(OSError):
        os.remove(folder / FILE)
    shutil.rmtree(folder, ignore_errors=True)


class Past(NamedTuple):
    """The local saves that a restart may take, on any node.

    Each start, and each rollback, begins a new line of the run, from one save. What earlier lines
    saved after it is abandoned. A run without local saves abandons all
    (`titanlite.checkpoint.manager`).
    """

    #: Random name of the present line.
    line: str = ""
    #: Saves of earlier lines that may come back.
    kept: tuple[str, ...] = ()
    #: Step of the newest shared checkpoint; -1: there was none. Where it is gone, somebody went
    #: back by hand.
    newest: int = -1

    def abandoned(self, manifest: Manifest, newest: int) -> str:
        """Return why a local save must not come back; "": it may. newest: step of the newest shared
        checkpoint.
        """
        if manifest.train[ABOUT].get("line") != self.line and id_of(manifest) not in self.kept:
            return "later the run went on without it"
        if newest < self.newest:
            return f"the shared checkpoint of step {self.newest}, which the run had then, is gone"
        return ""


def read_past(shared: AnyPath) -> Past:
    """Return the past of the run whose shared checkpoints are in a folder."""
    try:
        return msgspec.json.decode((shared / LOCAL_PAST).read_bytes(), type=Past)
    except (FileNotFoundError, msgspec.MsgspecError):
        return Past()


def write_past(shared: AnyPath, past: Past) -> None:
    """Write the past of a run, durably."""
    write_whole(shared / LOCAL_PAST, msgspec.json.encode(past))
