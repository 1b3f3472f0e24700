"""The local saves of one run on one node. No torch here."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.manifest import (
    FILE,
    Manifest,
    NewerFormatError,
    digest_of,
    parse_manifest,
    step_of,
)
from titanlite.checkpoint.paths import AnyPath, sync_folder, write_new
from titanlite.checkpoint.retention import quarantine

#: File beside the shared checkpoints: the name of the run's local folders.
RUN_ID = "local-saves.id"
#: Random generators of all ranks, [ranks, bytes].
GENERATORS = "generators.bin"
#: Entry of a local manifest's train state: {"save": id of the save, "layout": of the tensors,
#: "line" and "shared": see `abandoned.py`}.
ABOUT = "local_save"
#: Hexadecimal digits of a run in the name of its local folders.
_LETTERS = 16
_RANK = re.compile(r"(?:rank|copy)-(\d+)")
_ID = re.compile(r"[0-9a-f]{16}")
_ASIDE = re.compile(r"step-\d+\.invalid-\d+")
#: Damaged saves of a rank that stay for people; a folder in memory has room for few.
_ASIDES = 1


class Seen(NamedTuple):
    """One rank's part of a local save, as it lies on this node."""

    owner: int
    #: Of the save, the same on all ranks.
    save: str
    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class LocalFolder:
    """What this node holds of a run. root: `local_folder/RUN`."""

    root: Path
    rank: int

    @property
    def mine(self) -> Path:
        """The folder of this rank."""
        return self.root / f"rank-{self.rank}"

    def step(self, step: int) -> Path:
        """Return the folder of this rank's part of the save of `step`."""
        return self.mine / f"step-{step}"

    def copy(self, owner: int, step: int) -> Path:
        """Return the folder of a copy of another node's part."""
        return self.root / f"copy-{owner}" / f"step-{step}"

    def seen(self) -> tuple[list[Seen], list[str]]:
        """Return all parts with a good manifest on this node, and what is wrong with others.

        A part without a manifest is of a save that was cut short, or was never told to be whole.
        Raises NewerFormatError for a save of a later titanlite.
        """
        found = []
        problems: list[str] = []
        for folder, owner in self._steps(problems):
            if not (folder / FILE).is_file():
                continue
            try:
                manifest = parse_manifest(folder)
                found.append(Seen(owner, id_of(manifest, folder), folder, manifest))
            except NewerFormatError:
                raise
            except CheckpointError as error:
                problems.append(str(error))
        return found, problems

    def parts_of(self, manifest: Manifest) -> list[int]:
        """Return the ranks whose parts of a save are on this node with the right length, with or
        without manifests.
        """
        found = []
        for folder, owner in self._steps():
            name = part_name(owner)
            if step_of(folder) != manifest.step or name not in manifest.files:
                continue
            with contextlib.suppress(OSError):
                size = part_path(folder, id_of(manifest, folder)).stat().st_size
                if size == manifest.files[name]:
                    found.append(owner)
        return sorted(set(found))

    def path_of(self, owner: int, manifest: Manifest) -> Path:
        """Return the part of a rank, as it lies on this node: its own, or a copy."""
        save = id_of(manifest, self.root)
        own = part_path(self.root / f"rank-{owner}" / f"step-{manifest.step}", save)
        copied = part_path(self.copy(owner, manifest.step), save)
        return copied if copied.is_file() and not own.is_file() else own

    def prune(self, keep: int) -> None:
        """Delete all but the newest saves on this node, by the time of the save.

        Ranks of a node do it together: all come to the same answer.
        """
        seen, _ = self.seen()
        ages = sorted({(one.manifest.created, one.save) for one in seen}, reverse=True)
        stay = {save for _, save in ages[:keep]}
        for one in seen:
            if one.save not in stay:
                remove(one.folder)
        asides = [path for path in _folders(self.mine) if _ASIDE.fullmatch(path.name)]
        asides.sort(key=lambda path: path.stat().st_mtime)
        for path in asides[:-_ASIDES]:
            shutil.rmtree(path, ignore_errors=True)

    def published(self) -> set[int | None]:
        """Return the steps with a manifest on this node."""
        return {step_of(folder) for folder, _ in self._steps() if (folder / FILE).is_file()}

    def drop_failed(self, published: Container[int | None]) -> None:
        """Delete parts of saves that failed before they were whole. No rank may be saving.

        published: steps with a manifest on any node.
        """
        for folder, _ in self._steps():
            if step_of(folder) not in published:
                remove(folder)

    def set_own_aside(self, created: float, reason: str) -> None:
        """Set this rank's parts aside that were saved after a time, or have a bad manifest."""
        for folder, owner in self._steps():
            if owner != self.rank or folder.parent != self.mine:
                continue
            try:
                if parse_manifest(folder).created > created:
                    quarantine(folder, reason)
            except CheckpointError as error:
                if (folder / FILE).is_file():
                    quarantine(folder, str(error))

    def clear(self, created: float) -> None:
        """Delete what `set_own_aside` of all ranks has left, and what killed saves have.

        That is of ranks that this node had, or copies. No rank may be saving. Raises
        CheckpointError where a save stays that must not come back.
        """
        stay = {one.folder for one in self.seen()[0] if one.manifest.created <= created}
        for folder, _ in self._steps():
            if folder in stay:
                continue
            remove(folder)
            if (folder / FILE).is_file():
                raise CheckpointError(f"{folder} cannot be deleted, and a later start would use it")

    def set_aside(self, step: int, reason: str) -> None:
        """Keep this rank's damaged part of a save for people."""
        with contextlib.suppress(OSError):
            quarantine(self.step(step), reason)

    def _steps(self, problems: list[str] | None = None) -> Iterator[tuple[Path, int]]:
        """Yield each folder `rank-R/step-N` with R. problems: takes what cannot be read."""
        for rank in _folders(self.root, problems):
            owner = _RANK.fullmatch(rank.name)
            if owner is None:
                continue
            for folder in _folders(rank, problems):
                if step_of(folder) is not None:
                    yield folder, int(owner[1])


def part_name(rank: int) -> str:
    """Return the name of a rank's part in the manifest's lists of files and hashes."""
    return f"rank-{rank}"


def part_path(folder: Path, save: str) -> Path:
    """Return the file with a rank's tensors. Its name tells the save. So what another save of the
    step has left is never taken for a part of this one.
    """
    return folder / f"{save}.safetensors"


def id_of(manifest: Manifest, folder: Path) -> str:
    """Return the id of a local save. Raises CheckpointError where there is none."""
    about = manifest.train.get(ABOUT)
    save = about.get("save") if isinstance(about, dict) else None
    if not isinstance(save, str) or not _ID.fullmatch(save):
        raise CheckpointError(f"{folder / FILE} is not of a local save")
    return save


def publish(folders: Sequence[Path], content: bytes) -> None:
    """Write the manifest beside parts of a save, which makes them that."""
    for folder in folders:
        write_new(folder / FILE, content)
        sync_folder(folder.parent)


def remove(folder: Path) -> None:
    """Delete a part of a save, the manifest first; another rank of the node may be faster.

    What cannot be deleted stays.
    """
    with contextlib.suppress(OSError):
        os.remove(folder / FILE)
    shutil.rmtree(folder, ignore_errors=True)


def name_of(shared: AnyPath, identity: str) -> str:
    """Return the name of the local folders of the run whose shared checkpoints lie in a folder."""
    place = str(shared)
    if isinstance(shared, Path):
        place = os.path.realpath(shared)
    return "run-" + digest_of(f"{identity} {place}".encode()).partition(":")[2][:_LETTERS]


def _folders(folder: Path, problems: list[str] | None = None) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        # A bad disk is a lost one: other nodes may have its parts.
        if problems is not None:
            problems.append(f"{folder} cannot be read: {error.strerror}")
        return []
