"""Find the weights that a path means: a checkpoint of a run, or exported ones. No torch."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titanlite.checkpoint.hf_files import holds_adapters, holds_weights
from titanlite.checkpoint.manifest import PIN, Manifest, read_manifest
from titanlite.checkpoint.store_paths import AnyPath
from titanlite.cli.checkpoint_folders import checkpoint_of
from titanlite.runs.read import Run, RunError, read_run
from titanlite.runs.record import CONFIG
from titanlite.runs.symlink_checks import read_own, refuse_links
from titanlite.utils import LinkError


@dataclass(frozen=True)
class Weights:
    """Weights to upload, and the run that they are of."""

    #: A checkpoint, or a folder of Hugging Face's or of PEFT's.
    path: AnyPath
    #: Manifest of the checkpoint; None for exported weights.
    manifest: Manifest | None
    #: Without attempts where no run is recorded beside the weights.
    run: Run

    @property
    def step(self) -> int | None:
        """Steps that it was trained for; None: unknown."""
        if self.manifest is not None:
            return self.manifest.step
        named = re.fullmatch(r"step-(\d+)-hf", self.path.name)
        return int(named[1]) if named else None

    @property
    def config_toml(self) -> str:
        """The resolved config of the run; "" where it is not known."""
        if self.manifest is not None:
            return str(self.manifest.config.get("toml", ""))
        file = self.run.folder / CONFIG
        return read_own(file).decode() if file.exists() else ""

    @property
    def figures(self) -> dict[str, float]:
        """Return the figures of metrics.jsonl for this step."""
        found: dict[str, float] = {}
        for row in self.run.rows:
            if row["step"] == self.step:
                found.update(row)
        return found


def find_weights(source: AnyPath) -> Weights:
    """Return the weights of a run or its checkpoints (the newest valid one), of one `step-N`, or
    exported ones.

    Raises CheckpointError; LinkError for a link, which could lead to a file that nobody meant to
    upload.
    """
    is_export = source.is_dir() and (holds_adapters(source) or holds_weights(source))
    path = source if is_export else checkpoint_of(source)
    run = Run(Path())
    if isinstance(source, Path) and isinstance(path, Path):
        refuse_links(source, path)
        for file in path.iterdir():
            if file.is_symlink() and file.name != PIN:
                raise LinkError(file)
        run = Run(path.resolve().parent.parent)
        with suppress(RunError):
            run = read_run(run.folder)
    return Weights(path, None if is_export else read_manifest(path), run)
