"""A `Checkpointer` that also saves to each node's own disk or memory."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.checkpoint.async_save import AsyncSave, Copy, async_save
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.loaded import LoadedState
from titanlite.checkpoint.manager import SAVE_TIMEOUT, Checkpointer
from titanlite.checkpoint.manifest import Manifest, digest_of, steps_in
from titanlite.checkpoint.schedule import SaveSchedule
from titanlite.checkpoint.state_dict import Save, describe, on_each_rank, on_rank_0
from titanlite.checkpoint.store_paths import AnyPath, to_path, write_new
from titanlite.checkpoint.trainer_save import train_state
from titanlite.contrib.resilience.copies import plan_copies
from titanlite.contrib.resilience.folder import LocalFolder, Past, read_past, write_past
from titanlite.contrib.resilience.load import TieredLoader
from titanlite.contrib.resilience.write import LocalWriter
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.launch_env import this_rank
from titanlite.utils import human_time, logger

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint
    from titanlite.trainer import Trainer

#: File beside the shared checkpoints: the name of the run's local folders.
RUN_ID = "local-saves.id"
#: Hexadecimal digits of a run in the name of its local folders.
_LETTERS = 16


class TieredCheckpointer(Checkpointer):
    """Saves and resumes one run, from its shared folder and from `config.local_folder`.

    All ranks make one and make the same calls. Raises CheckpointError, on all ranks, where one
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
        # The loop may wait too, as this group is its own. A broken connection does not end the run.
        self._local_async = async_save(self.config, self._world) or AsyncSave(
            self._world.device, timeout=SAVE_TIMEOUT
        )
        self._copies = plan_copies(self.config.local_copies, self.local, self._world, self._group)
        self._line = ""

    # Loading

    def load(self, *arguments: Any, **more: Any) -> LoadedState | None:
        loaded = super().load(*arguments, **more)
        self._settle(loaded)
        return loaded

    def load_newest(self, *arguments: Any, **more: Any) -> LoadedState:
        self.wait_for_local()
        loaded = super().load_newest(*arguments, **more)
        self._settle(loaded)
        return loaded

    def _settle(self, loaded: LoadedState | None) -> None:
        """Begin a new line of the run, from what was taken: saves of later steps must not come
        back.
        """
        step = -1
        if loaded is not None and loaded.origin == "resume":
            step = loaded.step
        offers = self._loader.chooser.offers
        kept = tuple(one.save for one in offers if one.manifest.step <= step)

        def begin() -> str:
            past = Past(uuid.uuid4().hex[:16], kept, max(steps_in(self.root), default=-1))
            write_past(self.root, past)
            return past.line

        self._line = self._on_rank_0(begin)
        group = self._loader.group
        on_each_rank(lambda: self.local.clear(kept), group)
        on_each_rank(lambda: self.local.prune(self.config.local_keep_latest_k), group)
        self._loader.chooser.rejected.clear()

    def _publish(self, save: Save, manifest: Manifest) -> None:
        super()._publish(save, manifest)
        try:
            write_past(self.root, read_past(self.root)._replace(newest=manifest.step))
        except OSError as error:
            # The checkpoint is there.
            logger.warning(f"{self.root} does not tell of step {manifest.step}: {error}")

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

        A failure is a warning, as a shared checkpoint follows. Raises WeightsError, on all ranks,
        as `save` does.
        """
        assert self._group is not None, "closed"
        self.wait_for_local()
        if not self._loader.layout:
            # No load came before.
            self._loader.look(model)
        tensors = self._tensors_to_save(model, optimizer, None)
        draft = self._draft(step, describe(tensors, model), train)
        save = Save(self.local.step(step), tensors, draft, proven)
        writer = LocalWriter(
            self._world, self.config, self._loader.layout, self._line, self._copies
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

    def await_copy(self) -> None:
        super().await_copy()
        self._local_async.await_copy()
        self._local_async.raise_bad()

    def wait_for_local(self) -> None:
        """All ranks wait for the local save in the background."""
        self._local_async.wait()
        self.poll_local()
        self._local_async.raise_bad()

    def wait(self) -> None:
        self.wait_for_local()
        super().wait()

    def close(self) -> None:
        self._local_async.close()
        super().close()


def local_root(config: Checkpoint, world: DistEnv, group: dist.ProcessGroup) -> Path:
    """Return the folder of this run's local saves on this node. All ranks call it together.

    It is named by an id beside the shared checkpoints and their place, so a run begun anew, or a
    copy, has another. Raises CheckpointError, on all ranks, where one cannot write there.
    """
    name = on_rank_0(world, lambda: _run_name(to_path(config.folder)), group)
    folder = Path((config.local_folder or "").replace("{local_rank}", str(this_rank().local_rank)))
    own = folder / name / f"rank-{world.rank}"

    def make() -> None:
        try:
            own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.local_folder: {own} cannot be made: {error.strerror}"
            ) from None

    on_each_rank(make, group)
    return own.parent


def _run_name(shared: AnyPath) -> str:
    """Call it on rank 0. The first start makes its id."""
    path = shared / RUN_ID
    place = str(shared)
    if isinstance(shared, Path):
        shared.mkdir(parents=True, exist_ok=True)
        place = os.path.realpath(shared)
    with contextlib.suppress(FileExistsError):
        write_new(path, uuid.uuid4().hex.encode())
    digest = digest_of(path.read_bytes() + f" {place}".encode())
    return "run-" + digest.partition(":")[2][:_LETTERS]


class LocalSchedule(SaveSchedule):
    """Writes a local save after every so many steps that have no shared one."""

    #: `Trainer.good_steps` after the latest save of both kinds.
    _good = 0

    def begin(self, step: int) -> None:
        super().begin(step)
        self._good = 0

    def between(self, trainer: Trainer) -> None:
        saver = trainer.parts.checkpointer
        assert isinstance(saver, TieredCheckpointer)
        saver.poll_local()
        if trainer.step % self.config.local_interval:
            return
        trainer.phase("save")
        trainer.sync_guard()
        good = trainer.good_steps
        # Only a good step since the latest save shows that one's weights to be good.
        proven = good != self._good
        self._good = good
        parts = trainer.parts
        saver.save_local(
            trainer.step, parts.model, parts.optimizer, train_state(trainer), proven=proven
        )
