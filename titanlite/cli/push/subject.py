"""What is pushed: a checkpoint of a run, or weights that are exported already. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.checkpoint.errors import CheckpointError, NewerFormatError
from titanlite.checkpoint.hf_files import HF_CONFIG, holds_adapters, holds_weights
from titanlite.checkpoint.manifest import (
    FILE,
    PIN,
    Manifest,
    hf_folder,
    last_hf_step,
    read_manifest,
    step_folder,
    step_of,
    steps_in,
)
from titanlite.checkpoint.paths import AnyPath, StorePath, to_path
from titanlite.cli.checkpoint_folders import roots_of
from titanlite.config.urls import is_url
from titanlite.features.hub.branches import own_id
from titanlite.features.hub.record import waiting
from titanlite.runs.links import read_own, refuse_links
from titanlite.runs.provenance import config_values
from titanlite.runs.read import Run, RunError, read_run
from titanlite.runs.record import CONFIG
from titanlite.utils import LinkError

LATEST = "latest"
BEST = "best"
_EXPORT = re.compile(r"step-(\d+)-hf")


@dataclass(frozen=True)
class Subject:
    """Weights to push, and the run that they are of."""

    #: A checkpoint, or a folder of Hugging Face's or of PEFT's.
    path: AnyPath
    #: Steps that it was trained for; None: unknown.
    step: int | None
    #: Of a checkpoint; None for exported weights.
    manifest: Manifest | None
    #: None where no run is recorded beside the weights.
    run: Run | None

    @property
    def run_id(self) -> str:
        """The name of the run on the hub."""
        return own_id(self.run.folder if self.run is not None else None, self.manifest, self.run)

    @property
    def config_toml(self) -> str:
        """The resolved config without secrets; "" where it is not known."""
        if self.manifest is not None:
            return str(self.manifest.config.get("toml", ""))
        if self.run is None:
            return ""
        file = self.run.folder / CONFIG
        return read_own(file).decode() if file.exists() else ""

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config by `section.key`; empty where it is not known."""
        try:
            return config_values(self.config_toml)
        except ValueError:
            return {}


def find_subject(path: AnyPath, step: str | None, work: Path) -> Subject:
    """Return the weights that a path and `--step` mean.

    path: a run, its folder of checkpoints, one `step-N`, or exported weights. step: a number,
    "latest" or "best"; None: the latest. work: exports wait there, perhaps of a checkpoint that the
    run has deleted since. Raises CheckpointError.
    """
    exported = isinstance(path, Path) and path.is_dir() and _is_export(path)
    if exported or step_of(path) is not None or (path / FILE).is_file():
        if step is not None:
            raise CheckpointError(f"{path} is one set of weights: --step says nothing here")
        return _one(path)
    root, folder = _root_of(path)
    exported_before = None
    if step not in (None, LATEST, BEST) and int(step) not in steps_in(root):
        exported_before = waiting(work).get(int(step))
    if exported_before is not None:
        place = step_folder(root, exported_before.step)
        return Subject(place, exported_before.step, exported_before, _run_at(place, folder))
    return _one(_chosen(root, step or LATEST), folder)


def _is_export(path: Path) -> bool:
    return holds_adapters(path) or (holds_weights(path) and (path / HF_CONFIG).is_file())


def _one(path: AnyPath, run: Path | None = None) -> Subject:
    """Return one set of weights. run: the folder of their run; None: perhaps two levels above.

    Raises LinkError: a link could lead to a file that nobody meant to upload.
    """
    if isinstance(path, Path) and path.is_dir():
        refuse_links(run or path, path)
        for file in path.iterdir():
            if file.is_symlink() and file.exists() and file.name != PIN:
                raise LinkError(file)
    name = path.resolve().name if isinstance(path, Path) else path.name
    named = _EXPORT.fullmatch(name)
    if named or (isinstance(path, Path) and _is_export(path)):
        return Subject(path, int(named[1]) if named else None, None, _run_at(path, run))
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint")
    manifest = read_manifest(path)
    return Subject(path, manifest.step, manifest, _run_at(path, run))


def _run_at(path: AnyPath, run: Path | None) -> Run | None:
    if run is None:
        if isinstance(path, StorePath):
            return None
        run = path.resolve().parent.parent
    try:
        return read_run(run, partial=True)
    except RunError:
        return None


def _root_of(path: AnyPath) -> tuple[AnyPath, Path | None]:
    """Return the folder of checkpoints that a path means, and the run's folder if it is that.

    The config of a run says where its checkpoints are, perhaps in a store.
    """
    if isinstance(path, Path) and (path / CONFIG).is_file():
        try:
            values = config_values(read_own(path / CONFIG).decode())
        except ValueError as error:
            raise CheckpointError(f"{path / CONFIG} is no TOML: {error}") from None
        folder = str(values.get("checkpoint.folder", "checkpoint"))
        # A relative one is below the run, which may have been moved.
        return (to_path(folder) if is_url(folder) else path / folder), path
    roots = roots_of(path)
    if len(roots) > 1:
        names = ", ".join(str(root) for root in roots)
        raise CheckpointError(f"{path} holds the checkpoints of several runs: name one of {names}")
    is_run = isinstance(path, Path) and roots[0] != path
    return roots[0], path if is_run and isinstance(path, Path) else None


def _chosen(root: AnyPath, step: str) -> AnyPath:
    """Return the folder that `--step` means. Raises CheckpointError."""
    if step == BEST:
        return step_folder(root, _best(root))
    if step == LATEST:
        return _latest(root)
    folder = step_folder(root, int(step))
    exported = hf_folder(root, int(step))
    if not (folder / FILE).is_file() and (exported / HF_CONFIG).is_file():
        return exported
    if int(step) not in steps_in(root):
        there = ", ".join(str(known) for known in steps_in(root)) or "none"
        raise CheckpointError(f"{root} has no step-{step} (steps there: {there})")
    return folder


def _latest(root: AnyPath) -> AnyPath:
    exported = last_hf_step(root)
    for step in reversed(steps_in(root)):
        if step < exported:
            break
        if _manifest(step_folder(root, step)) is not None:
            return step_folder(root, step)
    if exported >= 0:
        return hf_folder(root, exported)
    raise CheckpointError(f"{root} has no valid checkpoint")


def _best(root: AnyPath) -> int:
    """Return the step of the lowest validation loss."""
    losses = {}
    for step in steps_in(root):
        manifest = _manifest(step_folder(root, step))
        if manifest is not None and manifest.validation_loss is not None:
            losses[step] = manifest.validation_loss
    if not losses:
        raise CheckpointError(
            f"no checkpoint in {root} has a validation loss: --step takes a number or latest"
        )
    return min(losses, key=lambda step: (losses[step], step))


def _manifest(folder: AnyPath) -> Manifest | None:
    try:
        return read_manifest(folder)
    except NewerFormatError:
        raise
    except CheckpointError:
        return None
