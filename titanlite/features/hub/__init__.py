"""Checkpoints of a run on the hub of Hugging Face: what titanlite knows of it, moment by moment.

    contact.py    who asks, and whether they may write     branches.py   whose weights are there
    uploads.py    what a run uploads, a callback           record.py     what is uploaded already
    progress.py   whether an upload goes on        company.py    the other machines wait, too

The key is `checkpoint.hub`. Each upload is a `titanlite push` in its own process, so a run
imports nothing of the export. That command uses contact, branches and record too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf_files import hf_form
from titanlite.config.errors import Problem
from titanlite.features.feature import Feature

if TYPE_CHECKING:
    from torch import nn

    from titanlite.assembly.build import Built
    from titanlite.assembly.report_rows import Row, Setup
    from titanlite.callbacks import Callback
    from titanlite.checkpoint.paths import AnyPath
    from titanlite.config.errors import Problem
    from titanlite.config.loaded import LoadedConfig
    from titanlite.config.sections import Checkpoint
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.run.config import RunConfig


class HubFeature(Feature):
    """Uploads of a run that names a repository."""

    key = "checkpoint.hub"

    def __init__(self, section: Checkpoint) -> None:
        self.section = section

    # Before the ranks start

    def contradictions(self, config: LoadedConfig) -> Iterator[Problem]:
        """Find weights that no checkpoint, or not the last one, will hold."""
        section = self.section
        if not section.hub_ema:
            return
        key = "checkpoint.hub_ema"
        if not config.sections.optimizer.ema_decay:
            message = "needs an average of the weights, and optimizer.ema_decay is 0"
            yield Problem("conflict", key, message, "set optimizer.ema_decay")
        elif section.model_weights_only and not section.export_ema:
            message = "finds no average in the last save, of checkpoint.model_weights_only"
            yield Problem("conflict", key, message, "set checkpoint.export_ema")

    # On the machine of a rank

    def machine_problems(self, run: RunConfig, args: Any | None) -> Iterator[Problem]:
        """Ask the hub before any work, on rank 0; then see that the model has an export."""
        problem = _contact_problem(self.section.hub, run.job.dump_folder, run.checkpoint.folder)
        if problem:
            yield Problem("does-not-fit", self.key, problem)
        try:
            if args is not None:
                hf_form(run.spec, args)
        except ValueError as error:
            yield Problem("does-not-fit", self.key, str(error), "train without it")

    # The run: `titanlite.assembly.callbacks` calls this

    def callback(self, built: Built) -> Callback | None:
        """Return what uploads checkpoints from rank 0, and what waits for it on other machines."""
        world = built.world
        if built.saves is None or world.local_rank != 0:
            return None
        from torch.distributed.distributed_c10d import _get_default_store

        from titanlite.features.hub.company import Company
        from titanlite.features.hub.uploads import HubUploads

        store: Any = None
        if world.size > 1:
            # Its own connection outlives the process group.
            store = _get_default_store().clone()  # type: ignore[attr-defined]
        if world.rank != 0:
            return Company(store)
        run = built.run
        root = built.saves.checkpointer.root
        return HubUploads(self.section, Path(run.job.dump_folder), root, run.model.name, store)

    # The start report

    def report_rows(self, setup: Setup, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        every = self.section.hub_every
        which = "each checkpoint"
        if every:
            which = f"checkpoints of every {every:,} steps, milestones and the last one"
        yield "hub", f"{which} to {self.section.hub}, branch step-N; at the end also to main"


@functools.cache
def _contact_problem(repository: str, folder: str, root: str) -> str:
    """Return why rank 0 cannot upload to a repository; "" where it can, and on other ranks.

    folder: of the run. root: of its checkpoints. Asked once in a process.
    """
    from titanlite.checkpoint.paths import StoreError, to_path
    from titanlite.dist.launch_env import this_rank
    from titanlite.features.hub.branches import refuse_used
    from titanlite.features.hub.contact import HubError, check_access

    if this_rank().rank != 0:
        return ""
    try:
        if check_access(repository).exists:
            refuse_used(repository, _own_id(Path(folder), to_path(root)))
    except (HubError, StoreError) as error:
        return str(error)
    return ""


def _own_id(folder: Path, root: AnyPath) -> str:
    """Return the name of a run before its start; "none" for a new one."""
    from titanlite.checkpoint.manifest import parse_manifest, step_folder, steps_in
    from titanlite.features.hub.branches import own_id
    from titanlite.runs.read import RunError, read_run

    newest = None
    for step in reversed(steps_in(root)):
        with suppress(CheckpointError):
            newest = parse_manifest(step_folder(root, step))
            break
    run = None
    with suppress(RunError):
        run = read_run(folder, partial=True)
    return own_id(folder, newest, run)
