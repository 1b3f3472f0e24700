"""The manifest: the one file that makes a folder a checkpoint. No torch here.

A folder `step-N` is a checkpoint only if its `manifest.json` can be read, is of a known format, and every file it
lists is there with its size. Anything else is named, with the reason, and never loaded.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
FILE = "manifest.json"
_STEP = re.compile(r"step-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved, loaded, or belongs to another run; the message says what to do."""


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
    #: titanlite, torch, python.
    versions: dict[str, str]
    #: Ranks that wrote it.
    world_size: int
    #: Seconds since the epoch.
    created: float
    #: The resolved configuration, for people and for `config diff`.
    config: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def steps_in(root: Path) -> list[int]:
    """Steps of all folders named like checkpoints in `root`, ascending; foreign names are left alone."""
    if not root.is_dir():
        return []
    matches = ((_STEP.fullmatch(entry.name), entry) for entry in root.iterdir())
    return sorted(int(m.group(1)) for m, entry in matches if m and entry.is_dir())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a valid checkpoint folder. Raises CheckpointError with the reason when it is not one."""
    path = folder / FILE
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {FILE}: it was never finished") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("format"), int):
        raise CheckpointError(f"{path} is not a titanlite manifest")
    if raw["format"] > FORMAT:
        raise CheckpointError(f"{path} has format {raw['format']}; this titanlite reads up to {FORMAT}: upgrade it")
    try:
        manifest = Manifest(**raw)
        named = step_folder(folder.parent, manifest.step).name
        files = {str(name): int(size) for name, size in manifest.files.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if folder.name != named:
        raise CheckpointError(f"{folder} was renamed: its manifest is of step {manifest.step}")
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise CheckpointError(f"{folder / name} is missing") from None
        if found != size:
            raise CheckpointError(f"{folder / name} has {found} bytes, the manifest says {size}")
    return manifest


def find(root: Path, step: int | None = None) -> tuple[Manifest | None, list[str]]:
    """The checkpoint to load from `root`: that of `step`, or the newest valid one.

    Returns it (None if there is none) and the reasons why newer ones were passed over. With `step` given, raises
    CheckpointError when that one is not valid.
    """
    steps = steps_in(root)
    if step is not None:
        if step not in steps:
            have = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"checkpoint.load_step = {step}: {root} has no step-{step} (steps there: {have})")
        return read_manifest(step_folder(root, step)), []
    passed: list[str] = []
    for candidate in reversed(steps):
        try:
            return read_manifest(step_folder(root, candidate)), passed
        except CheckpointError as error:
            passed.append(str(error))
    return None, passed


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable: without it a crash may lose the rename itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(written: Path, root: Path, manifest: Manifest) -> Path:
    """Write the manifest into the folder `written`, then give it its final name. One rank only.

    A folder of that name without a valid manifest is moved aside, never overwritten; a valid one is kept and
    raises CheckpointError.
    """
    final = step_folder(root, manifest.step)
    temporary = written / (FILE + ".part")
    with open(temporary, "w") as stream:
        stream.write(manifest.to_json())
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, written / FILE)
    sync_folder(written)
    if final.exists():
        try:
            read_manifest(final)
        except CheckpointError:
            aside = next(p for i in range(10**6) if not (p := root / f"{final.name}.invalid-{i}").exists())
            final.rename(aside)
        else:
            raise CheckpointError(f"{final} already holds a valid checkpoint; it is not overwritten")
    written.rename(final)
    sync_folder(root)
    return final
