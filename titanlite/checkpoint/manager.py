"""The checkpoints of one run, on all ranks together.

When: `Trainer.save` asks `SaveSchedule` after each step, and saves at the end and at a stop.

What is saved: this rank's shards of weights, optimizer state and averages, the random generators of
all ranks, and the train state (place in the data, tokens seen, what callbacks add).

How: a mark beside the folder `step-N` says that a save is under way. Each rank writes and hashes
its shards, then another rank reads them back. The manifest comes last, by an atomic rename. It
makes the folder a checkpoint, and only then older ones go. So a process killed at any moment leaves
a whole checkpoint, or a leftover that the next start deletes.

A resume: `Chooser` takes the newest checkpoint whose manifest and sizes are right, and refuses one
of another run. `Loader` compares its hashes, and passes over one that is damaged or not finite.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from titanlite.checkpoint.dcp_files import HashingWriter, read_back, with_files
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.load import Loader
from titanlite.checkpoint.loaded import LoadedState, weight_of
from titanlite.checkpoint.manifest import Manifest, hf_folder, step_folder
from titanlite.checkpoint.retention import (
    Deleter,
    begin,
    clear_leftovers,
    leftovers,
    marks_of,
    prune,
    publish,
)
from titanlite.checkpoint.state_dict import (
    PLACES,
    RNG,
    Save,
    Tensors,
    check_finite,
    converted,
    dcp_errors,
    describe,
    gather,
    new_group,
    on_each_rank,
    on_rank_0,
    rng_state,
)
from titanlite.checkpoint.store_paths import AnyPath, to_path, write_whole
from titanlite.dist.dist_env import DistEnv
from titanlite.runs import provenance
from titanlite.runs.lock import OwnershipCheck
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.checkpoint.async_save import AsyncSave, Copy, SaveOutcome
    from titanlite.config.sections import Checkpoint

#: Seconds that rank 0 waits for the deletion of old checkpoints, before the others go on and at the
#: end; the next start continues it.
_WAIT_SECONDS, _END_SECONDS = 60.0, 3.0
#: Ranks wait so long for each other in a save that blocks training.
SAVE_TIMEOUT = timedelta(minutes=30)
#: File with what local saves may come back.
LOCAL_PAST = "local-saves.past"
T = TypeVar("T")


class Checkpointer:
    """Saves and resumes one run in `config.folder`. All ranks make one and make the same calls.

    fingerprints: values that must be equal for a resume, such as {"model": …, "tokenizer": …,
    "data": …}; a checkpoint with others is refused. run_config: the resolved configuration, which
    the manifest keeps for people. tokenizer_files: gives name → content of the files that
    `checkpoint.last_save_in_hf` adds. averages: of the weights (`WeightAverage.tensors`), in all
    checkpoints but those of weights only. base: loads weights that no checkpoint of the run holds,
    before one is looked for. It may add to `fingerprints` and `run_config`.

    A run with a second tier of saves, such as the disks of its nodes, subclasses this class and
    `SaveSchedule`, with a `loader_class` of its own (`titanlite.contrib.resilience`).
    """

    loader_class = Loader

    def __init__(  # noqa: PLR0913
        self,
        config: Checkpoint,
        world: DistEnv,
        fingerprints: dict[str, str],
        run_config: dict[str, Any] | None = None,
        tokenizer_files: Callable[[], Mapping[str, bytes]] = dict,
        averages: Tensors | None = None,
        base: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.config = config
        self.root = to_path(config.folder)
        self._world = world
        self._fingerprints = fingerprints
        self._run_config = run_config or {}
        self._tokenizer_files = tokenizer_files
        self._averages = averages or {}
        self._base = base
        # Rank 0 writes the manifest.
        self._origin = provenance.origin() if world.rank == 0 else {"versions": {}}
        self._loader = self.loader_class(
            config, world, fingerprints, self._run_config, self._averages
        )
        #: Step → why; checkpoints that are not loaded though manifest and sizes are right.
        self._bad = self._loader.chooser.bad
        #: Step of the checkpoint that the run began with, which stays at any age.
        self._resumed: set[int] = set()
        self._owner = OwnershipCheck(self.root)
        self._deleter = Deleter()
        #: In which ranks wait for each other around a save: a slow disk is not a stuck rank. Made
        #: now, because a save must succeed also when torchrun has been killed, whose store a new
        #: group needs.
        self._group: dist.ProcessGroup | None = new_group(SAVE_TIMEOUT)
        self._async: AsyncSave | None = None
        if config.async_mode != "disabled":
            from titanlite.checkpoint.async_save import async_save

            self._async = async_save(config, world)

    # Loading

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        expected: Mapping[str, Any] | None = None,
    ) -> LoadedState | None:
        """Resume from `config.folder` or start from `config.initial_load_path`, as `config.start`
        says; else None.

        expected: entries of the train state that must be equal to the saved ones, where they were
        saved. A function gets the saved one, the checkpoint's step and its train state, and returns
        what differs in words, or "".

        Raises CheckpointError, on all ranks, before anything is changed. Reasons: the checkpoint is
        of another run or does not fit the model, or there are checkpoints and none is good.
        """
        self._on_rank_0(self._owner.look)
        if self._base is not None:
            self._base(model)
        loaded = self._loader.load(model, optimizer, expected)
        self._on_rank_0(self._clean_up)
        if loaded is not None and loaded.origin == "resume":
            self._resumed = {loaded.step}
        return loaded

    def load_newest(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        suspect: Callable[[int], str] = lambda step: "",
    ) -> LoadedState:
        """Go back to the newest good checkpoint of this run, whatever `config.start` says.

        suspect: called on rank 0 with the step of the newest one; returns why it must not be used
        ("": it may). Then the one before is loaded, if possible, and the newest is quarantined with
        the reason.

        Raises CheckpointError, on all ranks, when there is none.
        """
        loaded = self._loader.load_newest(model, optimizer, suspect, self._on_rank_0)
        self._resumed = {loaded.step}
        return loaded

    def _clean_up(self) -> None:
        """Let rank 0 mark all local saves from before this start as dead."""
        self._deleter.delete(leftovers(self.root))
        if self.config.local_folder is None and (self.root / LOCAL_PAST).is_file():
            write_whole(self.root / LOCAL_PAST, b"")

    # Saving

    def save(  # noqa: PLR0913
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: dict[str, Any],
        *,
        weights_only: str | None = None,
        validation_loss: float | None = None,
        trackers: Mapping[str, str] | None = None,
        proven: bool = True,
    ) -> AnyPath:
        """Write the checkpoint of `step`; return its folder, published and durable.

        train: JSON-able state of the loop. weights_only: leave out optimizer and generators, and
        save the weights as this type, such as "bfloat16". validation_loss: of these weights, where
        it was measured; trackers: service → id of the run there. Both are for the manifest. proven:
        steps since the save before have shown its weights to be good; otherwise no older checkpoint
        goes for this one.

        Raises CheckpointError, on all ranks, when any rank fails; nothing half-written is then
        published. Raises WeightsError, on all ranks and before a tensor is written, when a weight
        or a moment is not finite.

        With `config.last_save_in_hf` the weights go to a folder of Hugging Face's, `step-N-hf`, in
        the foreground. With `config.async_mode` it returns at once, after a save in flight has
        ended. The tensors are checked and copied beside the next forward and backward pass;
        `optimizer.step` waits for that. `await_copy`, `wait` or the next save raises the
        WeightsError. The checkpoint appears later, and `poll` or `wait` tells.
        """
        assert self._group is not None, "closed"
        if self._async:
            self._async.wait()
            self._async.raise_bad()
        began = time.perf_counter()
        tensors = self._tensors_to_save(model, optimizer, weights_only)
        if validation_loss is not None and not math.isfinite(validation_loss):
            validation_loss = None
        draft = replace(
            self._draft(step, describe(tensors, model), train),
            weights_only=weights_only is not None,
            dtype=weights_only or "",
            validation_loss=validation_loss,
            trackers=dict(trackers or {}),
        )
        in_hf = weights_only is not None and self.config.last_save_in_hf
        folder = hf_folder(self.root, step) if in_hf else step_folder(self.root, step)
        save = Save(folder, tensors, draft, proven, began)
        if in_hf:
            self._write_hf(save, self._group)
            if self._async:
                self._async.report(step, folder, time.perf_counter() - began)
        elif self._async:
            self._async.prepare(self._group)
            self._async.start(step, folder, partial(self._write, save), optimizer)
        else:
            self._write(save, lambda tensors: tensors, self._group)
        return folder

    def _tensors_to_save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, weights_only: str | None
    ) -> Tensors:
        if weights_only is None:
            tensors = gather(model, optimizer)
            generators = rng_state(self._world.device, self._world.size)
            return {**tensors, **self._averages, RNG: generators}
        tensors = gather(model)
        if self.config.export_ema:
            tensors |= {weight_of(name): average for name, average in self._averages.items()}
        return {name: converted(name, one, weights_only) for name, one in tensors.items()}

    def _draft(self, step: int, tensors: dict[str, list[Any]], train: dict[str, Any]) -> Manifest:
        return Manifest(
            step=step,
            fingerprints=self._fingerprints,
            tensors=tensors,
            files={},
            # A copy: the loop changes its state before an asynchronous save ends.
            train=copy.deepcopy(train),
            world_size=self._world.size,
            created=time.time(),
            config={**self._run_config, PLACES: dict(self._world.places)},
            **self._origin,
        )

    def _write(self, save: Save, copy: Copy, group: dist.ProcessGroup) -> None:
        """All ranks call it together, in a thread if asynchronous. Raises as `save`."""
        world, folder = self._world, save.folder
        # Tensors that are good, and that stay as they are.
        check_finite(save, group)
        state = on_each_rank(lambda: copy(save.tensors), group)
        # From here to the manifest the folder is a leftover, should a process end.
        on_rank_0(world, lambda: self._mark(save.draft.step), group)
        writer = HashingWriter(folder)
        try:
            # Shards and index, durable.
            with dcp_errors(f"saving {folder}"):
                dcp.save(state, storage_writer=writer, process_group=group)
            written = on_rank_0(world, writer.all_files, group)
            manifest = with_files(save.draft, written)
            if self.config.verify_saves:
                read_back(folder, manifest, written, world, group)
            # The manifest makes it a checkpoint. Only then older ones go.
            on_rank_0(world, lambda: self._publish(save, manifest), group)
        except BaseException:
            if world.rank == 0:
                # The run may need its space.
                with contextlib.suppress(OSError, RuntimeError):
                    # The folder may belong to another run by now.
                    self._owner.look()
                    self._deleter.delete(marks_of(folder))
            raise

    def _mark(self, step: int) -> None:
        """Check the lock on rank 0, and clear what an earlier save of the step has left."""
        self._owner.look()
        clear_leftovers(self.root, step, self._deleter)
        begin(self.root, step, self._bad)

    def _publish(self, save: Save, manifest: Manifest) -> None:
        """Write the manifest on rank 0, then prune. Raises CheckpointError."""
        self._owner.look()
        seconds = round(time.perf_counter() - save.began, 3)
        publish(save.folder, replace(manifest, seconds=seconds))
        self._bad.pop(manifest.step, None)
        if not save.proven:
            return
        try:
            known = tuple(self._bad)
            marks = prune(
                self.root, manifest.step, self.config, self._resumed, known, self._fingerprints
            )
            self._deleter.delete(marks)
        except (RuntimeError, OSError) as error:
            # Also where no thread can be started.
            logger.warning(f"older checkpoints were not deleted: {error}")

    def _write_hf(self, save: Save, group: dist.ProcessGroup) -> None:
        from titanlite.checkpoint.hf_save import save_hf

        check_finite(save, group)
        self._on_rank_0(self._owner.look)
        save_hf(save, self._loader.model(), self._tokenizer_files, group, self._on_rank_0)

    # Saves in the background

    @property
    def is_async(self) -> bool:
        """Whether saves are written during training."""
        return self._async is not None

    def await_copy(self) -> None:
        """Wait for the copy of an asynchronous save; return at once if none is being made.

        Call it before anything but the optimizer changes weights or moments. Raises WeightsError,
        on all ranks, when what was to be saved is not finite.
        """
        if self._async:
            self._async.await_copy()
            self._async.raise_bad()

    def poll(self) -> SaveOutcome | None:
        """Return the outcome of an ended asynchronous save, each once, on rank 0 (which publishes);
        None otherwise. It neither waits nor communicates, so a loop may call it in every step.
        """
        if self._async is None or self._world.rank != 0:
            return None
        return self._async.poll()

    def wait(self) -> None:
        """Wait until nothing is being saved or deleted, on all ranks.

        Raises CheckpointError, on all of them, when the latest save failed, and WeightsError as
        `await_copy` does.
        """
        outcome = self._async.wait() if self._async else None

        def ended() -> None:
            if outcome is not None and outcome.problem:
                raise CheckpointError(outcome.problem)
            self._deleter.wait(_WAIT_SECONDS)

        self._on_rank_0(ended)
        if self._async:
            self._async.raise_bad()

    def close(self) -> None:
        """End the threads, without waiting for a save in flight: call `wait` before, while all
        ranks are well.
        """
        if self._async:
            self._async.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        self._deleter.wait(_END_SECONDS)

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        return on_rank_0(self._world, action, self._group)
