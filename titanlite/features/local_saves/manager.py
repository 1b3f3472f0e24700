"""A `Checkpointer` that also saves to each node's own disk or memory."""

from __future__ import annotations

import contextlib
import math
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.checkpoint.async_save import AsyncSave, Copy
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.loaded import LoadedState
from titanlite.checkpoint.manager import SAVE_TIMEOUT, Checkpointer, Save, async_save
from titanlite.checkpoint.manifest import FILE, Manifest, find
from titanlite.checkpoint.paths import AnyPath, to_path, write_new
from titanlite.checkpoint.retention import leftovers
from titanlite.checkpoint.schedule import SaveSchedule
from titanlite.checkpoint.storage import describe, on_each_rank, on_rank_0
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.launch_env import this_rank
from titanlite.features.local_saves.abandoned import Past, Shared, read_past, write_past
from titanlite.features.local_saves.copies import plan_copies
from titanlite.features.local_saves.folder import (
    GENERATORS,
    RUN_ID,
    LocalFolder,
    name_of,
    part_path,
)
from titanlite.features.local_saves.load import LocalReader, TieredLoader
from titanlite.features.local_saves.write import LocalWriter
from titanlite.utils import atomic_write, human_time, logger

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint
    from titanlite.trainer import Trainer

#: The least difference in time between two saves, where a clock went back.
_TICK = 1e-3


class TieredCheckpointer(Checkpointer):
    """Saves and resumes one run, from its shared folder and from `config.local_folder`.

    All ranks make one and make the same calls. Raises CheckpointError, on all ranks, where a rank
    cannot write to the local folder.
    """

    _loader: TieredLoader
    loader_class = TieredLoader

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        assert self._group is not None
        root = local_root(self.config, self._world, self._group)
        self.local = LocalFolder(root, self._world.rank)
        self._loader.folder = self.local
        self._loader.group = self._group
        # Where the loop waits too: its group is its own. A broken connection is no end of the run.
        self._local_async = async_save(self.config, self._world) or AsyncSave(
            self._world.device, timeout=SAVE_TIMEOUT
        )
        self._copies = plan_copies(self.config.local_copies, self.local, self._world, self._group)
        #: No save gets an earlier time than this.
        self._clock = 0.0

    # Loading

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        expected: Mapping[str, Any] | None = None,
    ) -> LoadedState | None:
        loaded = super().load(model, optimizer, expected)
        self._settle(loaded)
        return loaded

    def load_newest(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        suspect: Callable[[int], str] = lambda step: "",
    ) -> LoadedState:
        self.wait_for_local()
        loaded = super().load_newest(model, optimizer, suspect)
        self._settle(loaded)
        return loaded

    def _settle(self, loaded: LoadedState | None) -> None:
        """Let nothing newer than what was taken come back later, and complete what was taken.

        Steps after that save are trained again: their old saves are of a past that this run no
        longer has.
        """
        manifest = None
        created = -math.inf
        reason = "the run began anew"
        if loaded is not None and loaded.origin == "resume":
            manifest = self._loader.taken.manifest
            created = manifest.created
            reason = f"the run went on from step {manifest.step}"
        seen = [offer.manifest.created for offer in self._loader.chooser.offers]
        self._clock = max([created, *seen, self._clock]) + _TICK
        group = self._loader.group
        step = 0 if manifest is None else manifest.step
        self._loader.past = self._on_rank_0(lambda: self._begin_line(max(created, -1.0), step))
        if manifest is not None:
            on_each_rank(lambda: self._complete(manifest), group)
        on_each_rank(lambda: self.local.set_own_aside(created, reason), group)
        on_each_rank(lambda: self.local.clear(created), group)
        # They are set aside.
        self._loader.chooser.rejected.clear()
        if manifest is not None:
            on_each_rank(lambda: self.local.prune(self.config.local_keep_latest_k), group)

    def _begin_line(self, created: float, step: int) -> Past:
        """On rank 0: begin a new line of the run, from one save."""
        shared = find(self.root, known_bad=self._bad).manifest
        newest = None if shared is None else Shared(shared.step, shared.created)
        past = self._loader.past.go_on(created, step, newest)
        write_past(self.root, past)
        return past

    def _clean_up(self) -> None:
        self._deleter.delete(leftovers(self.root))

    def _publish(self, save: Save, manifest: Manifest) -> None:
        super()._publish(replace(save, proven=False), manifest)
        self._note(manifest)
        # Not before: where the newest one that is noted is gone, no local save may come back.
        if save.proven:
            self._prune(manifest.step)

    def _note(self, manifest: Manifest) -> None:
        past = self._loader.past._replace(newest=Shared(manifest.step, manifest.created))
        try:
            if read_past(self.root).line == past.line:
                write_past(self.root, past)
                self._loader.past = past
        except (OSError, CheckpointError) as error:
            # The checkpoint is there, and the one that is noted stays.
            logger.warning(f"{self.root} does not tell of step {manifest.step}: {error}")
        noted = self._loader.past.newest
        if noted is not None:
            self._stay["noted"] = noted.step

    def _complete(self, manifest: Manifest) -> None:
        """Give this rank's part of the save that was taken what it lacks, such as the manifest."""
        reader = self._loader.reader
        if not isinstance(reader, LocalReader):
            return
        folder = self.local.step(manifest.step)
        if not part_path(folder, reader.offer.save).is_file():
            return
        try:
            _ensure(folder / GENERATORS, reader.generators)
            _ensure(folder / FILE, manifest.to_json().encode())
        except OSError as error:
            # It is loaded, and the run can go on.
            logger.warning(f"the local save of step {manifest.step} stays incomplete: {error}")

    # Saving

    def save_local(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: dict[str, Any],
        *,
        proven: bool = True,
    ) -> None:
        """Write the local save of `step`; with `config.async_mode`, beside the next steps.

        A failure, also of the network, is a warning, since a shared checkpoint follows. Raises
        WeightsError, on all ranks, as `save` does.
        """
        assert self._group is not None, "closed"
        self.wait_for_local()
        if not self._loader.layout:
            # No load came before.
            self._loader.look(model)
        tensors = self._tensors_to_save(model, optimizer, None)
        draft = self._draft(step, describe(tensors, model), train)
        save = Save(self.local.step(step), tensors, {}, draft, proven)
        config = self.config
        writer = LocalWriter(
            self._world,
            self.local,
            config.local_keep_latest_k,
            config.verify_saves,
            self._loader.layout,
            self._loader.past,
            self._copies,
        )
        saving = self._local_async
        saving.prepare(self._group)

        def work(copy: Copy, group: dist.ProcessGroup) -> None:
            # No copy where the loop waits.
            writer.write(save, copy if self._async else lambda tensors: tensors, group)

        saving.start(step, save.folder, work, optimizer)
        if self._async is None:
            self.wait_for_local()

    def poll_local(self) -> None:
        """Log how local saves in the background ended. It neither waits nor communicates."""
        while outcome := self._local_async.poll():
            step, problem = outcome.step, outcome.problem
            if self._world.rank == 0 and problem:
                logger.warning(f"step {step}: no local save was written: {problem}")
            elif self._world.rank == 0:
                logger.info(f"local save of step {step} written in {human_time(outcome.seconds)}")

    def _draft(self, step: int, tensors: dict[str, list[Any]], train: dict[str, Any]) -> Manifest:
        draft = super()._draft(step, tensors, train)
        # Both tiers are compared by time, which a clock may set back.
        self._clock = max(draft.created, self._clock + _TICK)
        return replace(draft, created=self._clock)

    def await_copy(self) -> None:
        super().await_copy()
        self._local_async.await_copy()
        self._local_async.raise_bad()

    def wait_for_local(self) -> None:
        """Wait for the local save in the background, on all ranks."""
        self._local_async.wait()
        self.poll_local()
        self._local_async.raise_bad()

    def wait(self) -> None:
        self.wait_for_local()
        super().wait()

    def close(self) -> None:
        self._local_async.close()
        super().close()


def local_root(config: Checkpoint, world: DistEnv, group: dist.ProcessGroup | None) -> Path:
    """Return the folder of this run's local saves on this node. All ranks call it together.

    The name depends on an id beside the shared checkpoints, and on their place. So runs never mix:
    a run begun anew, or a copy of one, has another name.

    Raises CheckpointError, on all ranks, where one of them cannot write there.
    """
    name = on_rank_0(world, lambda: _run_name(to_path(config.folder)), group)
    folder = Path((config.local_folder or "").replace("{local_rank}", str(this_rank().local_rank)))
    root = folder / name

    def make() -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.local_folder: {root} cannot be made: {error.strerror}"
            ) from None
        if not os.access(root, os.W_OK):
            raise CheckpointError(f"checkpoint.local_folder: {root} cannot be written to")

    assert group is not None
    on_each_rank(make, group)
    return root


def _run_name(shared: AnyPath) -> str:
    """On rank 0: return the name of a run's local folders. The first start makes its id."""
    path = shared / RUN_ID
    if isinstance(shared, Path):
        shared.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        write_new(path, uuid.uuid4().hex.encode())
    return name_of(shared, path.read_bytes().decode(errors="replace"))


def _ensure(path: Path, content: bytes) -> None:
    """Write a small file, unless it is there: the disk may be full."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return
    atomic_write(path, content)


class LocalSchedule(SaveSchedule):
    """Writes a local save after every so many steps that have no shared one."""

    #: Of the latest save of both kinds: its step, and `Trainer.good_steps` after it.
    _latest = (0, 0)

    def begin(self, step: int) -> None:
        super().begin(step)
        self._latest = (step, 0)

    def is_proven(self, step: int, good_steps: int) -> bool:
        """Return whether a step since the latest save was good.

        good_steps: since the latest shared save, or since a rollback.
        """
        last, before = self._latest
        if step <= last:
            before = 0
        self._latest = (step, good_steps)
        return good_steps > before

    def between(self, trainer: Trainer) -> None:
        saver = trainer.parts.checkpointer
        assert isinstance(saver, TieredCheckpointer)
        saver.poll_local()
        if trainer.step % self.config.local_interval:
            return
        trainer.phase("save")
        trainer.sync_guard()
        saver.save_local(
            trainer.step,
            trainer.parts.model,
            trainer.parts.optimizer,
            trainer.train_state(),
            proven=self.is_proven(trainer.step, trainer.good_steps),
        )
