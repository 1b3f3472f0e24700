"""Find the weights that a path means: a checkpoint of a run, or exported ones. No torch."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf_files import HF_CONFIG, holds_adapters, holds_weights
from titanlite.checkpoint.manifest import (
    FILE,
    PIN,
    Manifest,
    find,
    hf_folder,
    last_hf_step,
    parse_manifest,
    read_manifest,
    root_of,
    step_folder,
    step_of,
    steps_in,
)
from titanlite.checkpoint.paths import AnyPath, StorePath, to_path
from titanlite.config.urls import is_url
from titanlite.runs.links import read_own, refuse_links
from titanlite.runs.provenance import config_values
from titanlite.runs.read import Run, RunError, read_run
from titanlite.runs.record import CONFIG
from titanlite.utils import LinkError

LATEST = "latest"
BEST = "best"


@dataclass(frozen=True)
class Weights:
    """Weights to upload, and the run that they are of."""

    #: A checkpoint, or a folder of Hugging Face's or of PEFT's.
    path: AnyPath
    #: Steps that it was trained for; None: unknown.
    step: int | None
    #: Manifest of the checkpoint; None for exported weights.
    manifest: Manifest | None
    #: None where no run is recorded beside the weights.
    run: Run | None

    @property
    def config_toml(self) -> str:
        """The resolved config of the run; "" where it is not known."""
        if self.manifest is not None:
            return str(self.manifest.config.get("toml", ""))
        file = self.run.folder / CONFIG if self.run is not None else None
        return read_own(file).decode() if file is not None and file.exists() else ""

    @property
    def figures(self) -> dict[str, float]:
        """Return the figures of the step of these weights, as metrics.jsonl has them."""
        found: dict[str, float] = {}
        for row in self.run.rows if self.run is not None else ():
            if row["step"] == self.step:
                found.update(row)
        return found


def commit_title(path: AnyPath) -> str:
    """Return the title of the commit with a checkpoint, by which it is found on the hub.

    A later save of the same step has another one. Raises CheckpointError.
    """
    exported = re.fullmatch(r"step-(\d+)-hf", path.name)
    if exported:
        return f"Step {exported[1]}, exported by the run"
    if step_of(path) is None:
        return f"Weights of {path.name}"
    manifest = parse_manifest(path)
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(manifest.created))
    return f"Step {manifest.step}, saved {saved} UTC"


def weights_at(root: AnyPath, step: int) -> AnyPath:
    """Return the folder with the weights of a step: its checkpoint, or the export at a run's end.

    Raises CheckpointError.
    """
    folder = step_folder(root, step)
    if not (folder / FILE).is_file() and (hf_folder(root, step) / HF_CONFIG).is_file():
        return hf_folder(root, step)
    if step not in steps_in(root):
        there = ", ".join(map(str, steps_in(root))) or "none"
        raise CheckpointError(f"{root} has no step-{step} (steps there: {there})")
    return folder


def find_weights(path: AnyPath, step: str | None) -> Weights:
    """Return the weights that a path and `--step` mean.

    path: a run, its folder of checkpoints, one `step-N`, or exported weights. step: a number,
    "latest" or "best"; None: the latest. Raises CheckpointError; LinkError for a link, which could
    lead to a file that nobody meant to upload.
    """
    run_folder: Path | None = None
    if not (_is_export(path) or step_of(path) is not None or (path / FILE).is_file()):
        root, run_folder = _root_of(path)
        path = _chosen(root, step or LATEST)
    elif step is not None:
        raise CheckpointError(f"{path} is one set of weights: --step says nothing here")
    _refuse_links(run_folder, path)
    run = None
    if run_folder is None and not isinstance(path, StorePath):
        run_folder = path.resolve().parent.parent
    if run_folder is not None:
        with suppress(RunError):
            run = read_run(run_folder, partial=True)
    if _is_export(path):
        named = re.fullmatch(r"step-(\d+)-hf", path.name)
        return Weights(path, int(named[1]) if named else None, None, run)
    manifest = read_manifest(path)
    return Weights(path, manifest.step, manifest, run)


def _refuse_links(run_folder: Path | None, path: AnyPath) -> None:
    if not isinstance(path, Path) or not path.is_dir():
        return
    refuse_links(run_folder or path, path)
    for file in path.iterdir():
        if file.is_symlink() and file.name != PIN:
            raise LinkError(file)


def _is_export(path: Any) -> bool:
    if not isinstance(path, Path) or not path.is_dir():
        return False
    return holds_adapters(path) or (holds_weights(path) and (path / HF_CONFIG).is_file())


def _root_of(path: AnyPath) -> tuple[AnyPath, Path | None]:
    """Return the folder of checkpoints that a path means, and the run's folder if it is that.

    The config of a run says where its checkpoints are, perhaps in a store.
    """
    if isinstance(path, Path) and (path / CONFIG).is_file():
        values = config_values(read_own(path / CONFIG).decode())
        folder = str(values.get("checkpoint.folder", "checkpoint"))
        # A relative one is below the run, which may have been moved.
        return (to_path(folder) if is_url(folder) else path / folder), path
    root = root_of(path)
    return root, path if isinstance(path, Path) and root != path else None


def _chosen(root: AnyPath, step: str) -> AnyPath:
    """Return the folder that `--step` means. Raises CheckpointError."""
    if step == BEST:
        losses = {}
        for number in steps_in(root):
            with suppress(CheckpointError):
                loss = read_manifest(step_folder(root, number)).validation_loss
                if loss is not None:
                    losses[number] = loss
        if not losses:
            raise CheckpointError(
                f"no checkpoint in {root} has a validation loss: --step takes a number or latest"
            )
        return step_folder(root, min(losses, key=lambda number: losses[number]))
    if step != LATEST:
        return weights_at(root, int(step))
    newest = find(root)[0]
    exported = last_hf_step(root)
    if newest is None and exported < 0:
        raise CheckpointError(f"{root} has no valid checkpoint")
    if newest is None or newest.step < exported:
        return hf_folder(root, exported)
    return step_folder(root, newest.step)
