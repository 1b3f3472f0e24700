"""The manifest: the one file that makes a folder a checkpoint. No torch here.

A folder `step-N` is a checkpoint only if its `manifest.json` can be read, is of a known format, carries the hash of its
own contents, and every file it lists is there with its size. Anything else is named, with the reason, and never loaded.

Format 4 may hash files with XXH3; format 3 may hold weights only, and says where a run is recorded; format 2 has a hash
of every file and of the manifest itself; format 1 had neither. All are read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints, overload

from titanlite import exit_codes
from titanlite.checkpoint import store
from titanlite.checkpoint.integrity import algorithm_of, digest_of
from titanlite.checkpoint.place import Place, StoreError, StorePath, sizes
from titanlite.utils import logger

FORMAT = 4
FILE = "manifest.json"
#: A file of this name in a checkpoint's folder: whatever else is deleted, this checkpoint is not.
PIN = "KEEP"
#: In a folder that was moved aside: why.
REASON = "invalid.txt"
_STEP = re.compile(r"step-(\d+)")
#: The manifest's entry with the hash of all the others.
_DIGEST = "digest"
#: All that a manifest of format 1 had.
_FORMAT_1 = {
    "format",
    "step",
    "world_size",
    "created",
    "files",
    "tensors",
    "train",
    "fingerprints",
    "versions",
    "config",
}
#: Levels of lists and dictionaries in a manifest: none that was ever written comes near.
_DEEPEST = 50


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved, loaded, or belongs to another run; the message says what to do."""

    exit_code = exit_codes.CHECKPOINT


class NewerFormatError(CheckpointError):
    """A later titanlite wrote the checkpoint: nobody here may pass over it, or put another in its place."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds and which run it belongs to."""

    step: int
    #: "model", "tokenizer", "data": hex digests or readable descriptions that must match on resume.
    fingerprints: dict[str, str]
    #: Tensor name -> [dtype, shape].
    tensors: dict[str, list[Any]]
    #: File name in the folder -> bytes.
    files: dict[str, int]
    #: State of the loop: data position, tokens seen.
    train: dict[str, Any]
    #: titanlite, Python and the libraries that numbers may depend on.
    versions: dict[str, str]
    #: Ranks that wrote it.
    world_size: int
    #: Seconds since the epoch.
    created: float
    #: The resolved configuration, for people and for `config diff`.
    config: dict[str, Any] = field(default_factory=dict)
    #: File name -> hash of what was written, `xxh3:…`; empty in format 1.
    hashes: dict[str, str] = field(default_factory=dict)
    #: Commit of the checkout that wrote it, and whether that had changes.
    git: dict[str, Any] = field(default_factory=dict)
    #: Variables of the environment that change what a run does (see `titanlite.runs.provenance`).
    environment: dict[str, str] = field(default_factory=dict)
    #: Where the run is recorded: service → id of the run there.
    trackers: dict[str, str] = field(default_factory=dict)
    #: Mean loss on the held-out text with these weights, where that was measured; finite.
    validation_loss: float | None = None
    #: No optimizer, no generators: a run cannot go on from it, but another one can start from it.
    weights_only: bool = False
    #: Type that the weights were converted to for it; "" where they are as they were trained.
    dtype: str = ""
    #: From the beginning of the save to this manifest; None: not measured.
    seconds: float | None = None
    format: int = FORMAT

    def to_json(self) -> str:
        content = asdict(self)
        return json.dumps({**content, _DIGEST: _digest(content)}, indent=1, sort_keys=True)

    @property
    def size(self) -> int:
        """Bytes of all its files, without the manifest."""
        return sum(self.files.values())


_TYPES = get_type_hints(Manifest)


def _digest(content: dict[str, Any]) -> str:
    """The hash of a manifest's contents, however they are laid out in the file."""
    return digest_of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


@overload
def step_folder(root: Path, step: int) -> Path: ...
@overload
def step_folder(root: Place, step: int) -> Place: ...
def step_folder(root: Place, step: int) -> Place:
    return root / f"step-{step}"


def step_of(folder: Place) -> int | None:
    """The step that a folder's name says; None for a name that no checkpoint has."""
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def steps_in(root: Place) -> list[int]:
    """Steps of all folders named like checkpoints in `root`, ascending; foreign names are left alone."""
    return sorted(step for entry in folders_in(root) if (step := step_of(entry)) is not None)


def folders_in(root: Place) -> Sequence[Place]:
    """The folders in `root`; none where it is not there. In a store without what saves and deletions have left."""
    if isinstance(root, StorePath):
        return store.folders(root)
    return [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []


def is_pinned(folder: Place) -> bool:
    return (folder / PIN).exists()


def read_manifest(folder: Place) -> Manifest:
    """The manifest of a valid checkpoint folder. Raises CheckpointError with the reason when it is not one."""
    manifest = parse_manifest(folder)
    there = sizes(folder)
    for name, size in manifest.files.items():
        if name not in there:
            raise CheckpointError(f"{folder / name} is missing")
        if there[name] != size:
            raise CheckpointError(f"{folder / name} has {there[name]} bytes, the manifest says {size}")
    return manifest


def parse_manifest(folder: Place) -> Manifest:
    """The manifest alone: what it lists is not looked at. Raises CheckpointError when it cannot be believed.

    Raises NewerFormatError for one of a later titanlite.
    Raises StoreError when a store cannot be asked: nothing is known of the checkpoint then, not that it is bad either.
    """
    path = folder / FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {FILE}: it was never finished") from None
    except StoreError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict) or type(raw.get("format")) is not int or _is_deep(raw):
        raise CheckpointError(f"{path} is not a titanlite manifest")
    if raw["format"] > FORMAT:
        raise NewerFormatError(
            f"{path} has format {raw['format']}; this titanlite reads up to {FORMAT}: upgrade titanlite, or move "
            f"{folder.name} to another folder"
        )
    digest = raw.pop(_DIGEST, None)
    if raw["format"] > 1 and digest != (now := _digest(raw)):
        raise CheckpointError(f"{path} is damaged: its contents have the hash {now}, and it says {digest}")
    try:
        if raw["format"] < 1 or (raw["format"] == 1 and (digest or not raw.keys() <= _FORMAT_1)):
            raise ValueError(f"it cannot be of format {raw['format']}")
        manifest = Manifest(**raw)
        _check_types(manifest)
        named = step_folder(folder.parent, manifest.step).name
        for name in manifest.files:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no file of it")
        if manifest.format > 1:
            if manifest.hashes.keys() != manifest.files.keys():
                raise ValueError("not every file has a hash")
            for digest in manifest.hashes.values():
                algorithm_of(digest)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if folder.name != named:
        raise CheckpointError(f"{folder} was renamed: its manifest is of step {manifest.step}")
    return manifest


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            v for one in level for v in (one.values() if isinstance(one, dict) else one) if type(v) in (dict, list)
        ]
    return bool(level)


def _check_types(manifest: Manifest) -> None:
    """Raises ValueError for what has another type than its field, or cannot be."""
    for name, kind in _TYPES.items():
        if not _is(getattr(manifest, name), kind):
            raise ValueError(f"{name} is not {Manifest.__annotations__[name]}")
    for name, entry in manifest.tensors.items():
        if len(entry) != 2 or not isinstance(entry[0], str) or not _is(entry[1], list[int]):
            raise ValueError(f"the tensor {name} has no type and shape: {entry!r:.80}")
    if not 0 <= manifest.created < 1e11:
        raise ValueError(f"created = {manifest.created} is no time")


def _is(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON is of a type, to its depth; a number in floating point must be finite."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return any(_is(value, one) for one in inner)
    if origin is not None:  # dict[str, …] or list[…]
        items = value.values() if isinstance(value, dict) else value
        return type(value) is origin and all(_is(item, inner[-1]) for item in items)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return kind is Any or type(value) is kind


def find(
    root: Place, step: int | None = None, known_bad: Mapping[int, str] | None = None
) -> tuple[Manifest | None, list[str]]:
    """The checkpoint to load from `root`: that of `step`, or the newest valid one.

    known_bad: steps whose contents were found to be wrong, with the reason.
    Returns it (None if there is none) and the reasons why newer ones were passed over. With `step` given, raises
    CheckpointError when that one is not valid. Raises NewerFormatError rather than pass over such a one.
    """
    known_bad = known_bad or {}
    steps = steps_in(root)
    if step is not None:
        if step not in steps:
            have = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"checkpoint.load_step = {step}: {root} has no step-{step} (steps there: {have})")
        if step in known_bad:
            raise CheckpointError(f"checkpoint.load_step = {step}: {known_bad[step]}")
        return read_manifest(step_folder(root, step)), []
    passed: list[str] = []
    for candidate in reversed(steps):
        if candidate in known_bad:
            passed.append(known_bad[candidate])
            continue
        try:
            return read_manifest(step_folder(root, candidate)), passed
        except NewerFormatError:
            raise
        except CheckpointError as error:
            passed.append(str(error))
    return None, passed


def check_resumable(manifest: Manifest, folder: Place) -> None:
    """Raises CheckpointError for a checkpoint of weights only: no run can go on from it."""
    if manifest.weights_only:
        raise CheckpointError(
            f"{folder} holds weights only (checkpoint.model_weights_only was true): a run cannot go on from it, for "
            "there is no optimizer in it. If that run was to end there, it is done. To start another run from its "
            "weights, give it another folder and name this one as checkpoint.initial_load_path; to train on in this "
            "folder, move it away, and the newest full checkpoint is resumed"
        )


def sync_folder(folder: Place) -> None:
    """Make a folder's entries durable: without it a crash may lose the rename itself. In a store they are at once."""
    if isinstance(folder, StorePath):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(written: Place, root: Place, manifest: Manifest, known_bad: Mapping[int, str] | None = None) -> Place:
    """Write the manifest into the folder `written`, then give it its final name. One rank only.

    A folder of that name that is not valid, or whose step is in `known_bad`, is moved aside with the reason, never
    overwritten; a valid one is kept and raises CheckpointError. In a store the folder has its name already (`begin`).
    """
    final = step_folder(root, manifest.step)
    if isinstance(written, StorePath):
        try:
            store.publish(written, manifest.to_json())
        except FileExistsError:
            raise CheckpointError(f"{written} holds a checkpoint meanwhile; it is not overwritten") from None
        return final
    assert isinstance(root, Path) and isinstance(final, Path)
    temporary = written / (FILE + ".part")
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(manifest.to_json())
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:  # of a full disk, without a name
        raise CheckpointError(f"{temporary} cannot be written: {error.strerror or error}") from error
    os.replace(temporary, written / FILE)
    sync_folder(written)
    make_way(final, (known_bad or {}).get(manifest.step))
    written.rename(final)
    sync_folder(root)
    return final


def make_way(final: Place, reason: str | None) -> None:
    """Move aside what has a checkpoint's name. Raises CheckpointError where it is valid and there is no `reason`.

    Raises NewerFormatError too.
    """
    if not final.exists():
        return
    if reason is None:
        try:
            read_manifest(final)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            reason = str(error)
        else:
            raise CheckpointError(f"{final} already holds a valid checkpoint; it is not overwritten")
    move_aside(final, reason)


def move_aside(folder: Place, reason: str) -> Place:
    """Give a checkpoint that is not to be loaded the name `step-N.invalid-K`, and say there why. The new path."""
    aside: Place
    if isinstance(folder, StorePath):
        aside = store.move_aside(folder, REASON, reason)
    else:
        with contextlib.suppress(OSError):
            (folder / REASON).write_text(f"{reason}\n", encoding="utf-8")
        aside = next(p for i in range(10**6) if not (p := folder.with_name(f"{folder.name}.invalid-{i}")).exists())
        folder.rename(aside)
    logger.warning(f"{folder} is now {aside.name}: {reason}")
    return aside


def is_valid(folder: Place) -> bool:
    """Whether a folder is a checkpoint, by its manifest and the sizes of its files. Raises NewerFormatError."""
    try:
        read_manifest(folder)
    except NewerFormatError:
        raise
    except CheckpointError:
        return False
    return True
