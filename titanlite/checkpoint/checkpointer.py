"""Save and load on all ranks together."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from titanlite.checkpoint.background import BackgroundSave, Outcome, Tensors, new_group
from titanlite.checkpoint.comparing import compare_what_was_saved
from titanlite.checkpoint.loading import RNG as _RNG
from titanlite.checkpoint.loading import LoadedState, Loading
from titanlite.checkpoint.manifest import CheckpointError, Manifest, find, move_aside, publish, step_folder
from titanlite.checkpoint.place import Place, place, sizes
from titanlite.checkpoint.retention import Deleter, begin, retire, set_aside
from titanlite.checkpoint.state import describe_all, gather, rng_state, weights
from titanlite.checkpoint.storage import HashingWriter
from titanlite.checkpoint.together import named as _named
from titanlite.checkpoint.together import on_rank_0
from titanlite.checkpoint.together import quiet as _quiet
from titanlite.guard import WeightsError, find_nonfinite
from titanlite.parallel.dist_env import DistEnv
from titanlite.runs import provenance
from titanlite.runs.lock import OwnershipCheck
from titanlite.utils import logger

#: Seconds that a run which is ending waits for old checkpoints to be deleted; the next start goes on with it.
_DELETE_SECONDS = 3.0
#: How much longer than another a rank may write in the foreground: the run stands, so this is not for ever.
_SAVE_TIMEOUT = timedelta(minutes=30)
T = TypeVar("T")


class Checkpointer:
    """Saves and resumes one run in `plan.folder`. All ranks make one and call it alike.

    fingerprints: what must be equal for a resume, such as {"model": …, "tokenizer": …, "data": …}; a checkpoint with
    others is refused. config: the resolved configuration, kept in the manifest for people.
    """

    def __init__(
        self, plan: CheckpointPlan, world: DistEnv, fingerprints: dict[str, str], config: dict[str, Any] | None = None
    ) -> None:
        self.plan = plan
        self.root = place(plan.folder)
        self._world = world
        self._fingerprints = fingerprints
        self._config = config or {}
        #: Step → why; what a load has found to be damaged though its manifest and sizes are right.
        self._bad: dict[int, str] = {}
        self._resumed: int | None = None
        self._deleter = Deleter()
        self._owner = OwnershipCheck(self.root)
        self._loading = Loading(plan, world, fingerprints, self._bad, self._deleter, self._config)
        #: When the latest save began, by `time.perf_counter`.
        self._began = 0.0
        self._origin: tuple[dict[str, str], dict[str, Any]] | None = None
        self._background: BackgroundSave | None = None
        #: In which ranks wait for each other around a save: a slow disk is not a stuck rank. Made now, because a save
        #: must succeed also when torchrun, whose store a new group needs, has been killed.
        self._group: dist.ProcessGroup | None = new_group(_SAVE_TIMEOUT)
        if plan.async_mode != "disabled":
            self._background = BackgroundSave(world.device, overlap=plan.async_mode == "async_with_pinned_mem")

    def save(
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
    ) -> Place:
        """Write the checkpoint of `step`; returns its folder, published and durable.

        train: JSON-able state of the loop. weights_only: leave out optimizer and generators, and save the weights as
        this type, such as "bfloat16". validation_loss: of these weights, where it was measured; trackers: service →
        id of the run there. Both are for the manifest. proven: the weights of the save before have been used since, and
        found good; otherwise no checkpoint goes for this one.

        Raises CheckpointError, on all ranks, when any rank fails; nothing half-written is then published. Raises
        WeightsError, on all ranks and before anything is written, when a weight or a moment is not finite.

        With `plan.async_mode` on it returns as soon as everything is copied ("async_with_pinned_mem": before that, see
        `await_copy`); the folder comes into being later, and `poll` or `wait` tells. A save still under way is waited
        for first.
        """
        assert self._group is not None, "closed"
        if self._background:
            self._background.prepare(self._group)
        self._began = time.perf_counter()
        tensors: Tensors = gather(model, optimizer) if weights_only is None else weights(model, weights_only)
        if where := find_nonfinite(tensors, self._group):
            if weights_only and not find_nonfinite(gather(model), self._group):
                raise CheckpointError(f"{where} does not fit {weights_only}: choose another checkpoint.export_dtype")
            raise WeightsError(step, step, where, "No checkpoint is written")
        partial = self._on_rank_0(lambda: self._make_partial(step))
        if weights_only is None:
            tensors[_RNG] = rng_state(self._world.device, self._world.size)
        draft = replace(
            self._draft(step, describe_all(tensors, model), train),
            weights_only=weights_only is not None,
            dtype=weights_only or "",
            validation_loss=validation_loss if validation_loss is not None and math.isfinite(validation_loss) else None,
            trackers=dict(trackers or {}),
        )
        final = step_folder(self.root, step)
        writer = HashingWriter(partial)
        if self._background:

            def write(copies: Tensors, group: dist.ProcessGroup) -> None:
                with self._cleared(partial):
                    with _named(f"saving {final}"):
                        dcp.save(copies, storage_writer=writer, process_group=group)
                    self._finish(partial, draft, writer, proven, group)

            self._background.start(step, final, tensors, write)
            return final
        with self._cleared(partial):
            with _quiet(), _named(f"saving {final}"):
                dcp.save(tensors, storage_writer=writer, process_group=self._group)
            return self._finish(partial, draft, writer, proven, self._group)

    @contextlib.contextmanager
    def _cleared(self, partial: Place) -> Iterator[None]:
        """What a save that fails has written goes at once: its space may be what the run needs to go on."""
        try:
            yield
        except BaseException:
            # In a store what is to come may have the same names: the next save or start tidies there.
            if self._world.rank == 0 and isinstance(partial, Path) and partial.exists():
                with contextlib.suppress(OSError):
                    self._deleter.delete([set_aside(partial)])
            raise

    def await_copy(self) -> None:
        """Call it before weights or moments change, in every step, where `plan.async_mode` is "async_with_pinned_mem":
        the copy for a save is made beside the forward and backward pass that follow it. Returns at once if there is
        none under way.
        """
        if self._background:
            self._background.await_copy()

    @property
    def in_background(self) -> bool:
        """Whether saves are written in the background."""
        return self._background is not None

    @property
    def in_flight(self) -> bool:
        """Whether a save is being written in the background, on this rank."""
        return self._background is not None and self._background.in_flight

    def poll(self) -> Outcome | None:
        """How a save in the background ended, each told once, on rank 0 (which publishes it); None otherwise.

        It waits for nothing and communicates nothing, so a loop may ask in every step.
        """
        return self._background.poll() if self._background and self._world.rank == 0 else None

    def wait(self) -> None:
        """Until nothing is being saved or deleted; on all ranks.

        Raises CheckpointError, on all of them, when the latest save failed.
        """
        outcome = self._background.wait() if self._background else None
        timeout = self._world.timeout

        def ended() -> None:
            if outcome is not None and outcome.problem:
                raise CheckpointError(outcome.problem)
            # The other ranks wait in a collective: what takes longer is left to the next start.
            self._deleter.wait(60.0 if timeout is None else timeout.total_seconds() / 2)

        self._on_rank_0(ended)

    def close(self) -> None:
        """End the threads. A save under way is not waited for: call `wait` before, while all ranks are well."""
        if self._background:
            self._background.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        self._deleter.wait(_DELETE_SECONDS)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, expected: Mapping[str, Any] | None = None
    ) -> LoadedState | None:
        """Start as `plan.start` says: resume from `plan.folder`, or begin with `plan.initial_load_path`; else None.

        expected: entries of the train state that must be equal to what was saved, where it was.

        Raises CheckpointError, on all ranks, before anything is changed, when the checkpoint is of another run or does
        not fit the model, or when there are checkpoints and none is good.
        """
        self._on_rank_0(self._owner.look)
        loaded = self._loading.load(model, optimizer, expected)
        if loaded is not None and loaded.origin == "resume":
            self._resumed = loaded.step
        return loaded

    def load_newest(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        distrust: Callable[[int], str] | None = None,
    ) -> LoadedState:
        """Go back to the newest good checkpoint of this run, whatever `plan` says of the start.

        distrust: asked on rank 0, with the step of the newest one, why it is not to be used ("": it is); then the one
        before is loaded, if there is one that can be, and the newest is moved aside with the reason.

        Raises CheckpointError, on all ranks, when there is none.
        """
        plan = replace(self.plan, start="resume", load_step=None)
        loading = Loading(plan, self._world, self._fingerprints, self._bad, self._deleter)
        left = self._on_rank_0(lambda: self._distrusted(distrust)) if distrust else None
        loaded = None
        if left is not None:
            with contextlib.suppress(CheckpointError):
                loaded = loading.load(model, optimizer)
            step, moved = left, loaded is not None
            self._on_rank_0(lambda: self._leave(step, moved))
        loaded = loaded or loading.load(model, optimizer)
        assert loaded is not None, "a start from nothing was not allowed"
        self._resumed = loaded.step
        return loaded

    def _distrusted(self, distrust: Callable[[int], str]) -> int | None:
        """On rank 0: the newest checkpoint's step, from now on one that is passed over; None where it is trusted."""
        newest, _ = find(self.root, known_bad=self._bad)
        reason = distrust(newest.step) if newest is not None else ""
        if newest is None or not reason:
            return None
        self._bad[newest.step] = reason
        return newest.step

    def _leave(self, step: int, moved: bool) -> None:
        """On rank 0: done with the distrusted one; without another it is as good as before."""
        reason = self._bad.pop(step)
        if moved:
            move_aside(step_folder(self.root, step), reason)

    def _make_partial(self, step: int) -> Place:
        self._owner.look()
        return begin(self.root, step, self._bad, self._deleter)

    def _draft(self, step: int, tensors: dict[str, list[Any]], train: dict[str, Any]) -> Manifest:
        """The manifest as far as it is known before anything is written."""
        if self._origin is None:
            git = provenance.git_state().record if self._world.rank == 0 else {}
            kept = {name: value for name, value in git.items() if name in ("commit", "dirty", "unknown")}
            self._origin = provenance.versions(), kept
        versions, git = self._origin
        return Manifest(
            step=step,
            fingerprints=self._fingerprints,
            tensors=tensors,
            files={},
            train=copy.deepcopy(train),  # the loop goes on before a save in the background ends
            versions=versions,
            world_size=self._world.size,
            created=time.time(),
            config=self._config,
            git=git,
            environment=provenance.environment(os.environ),
        )

    def _finish(
        self, partial: Place, draft: Manifest, writer: HashingWriter, proven: bool, group: dist.ProcessGroup
    ) -> Place:
        """When all ranks have written: what was written is read back, the folder gets its name, older ones go.

        Raises CheckpointError, on all ranks; then there is no new checkpoint, and none has gone.
        """
        files, hashes, writers = on_rank_0(self._world, lambda: self._sizes_and_hashes(partial, writer), group)
        manifest = replace(draft, files=files, hashes=hashes)
        if self.plan.verify_saves:
            problem = compare_what_was_saved(partial, manifest, writers, self._world, group)
            if problem is not None:
                raise CheckpointError(f"what was written could not be read back: {problem}")
        return on_rank_0(self._world, lambda: self._publish(partial, manifest, proven), group)

    def _sizes_and_hashes(
        self, partial: Place, writer: HashingWriter
    ) -> tuple[dict[str, int], dict[str, str], dict[str, int]]:
        """On rank 0, of all files of a save: name → bytes, name → hash, name → rank that wrote it.

        Raises CheckpointError when the folder holds others.
        """
        there = sizes(partial)
        files = {name: written.size for name, written in writer.written.items()}
        if there != files:
            wrong = sorted(name for name in {*there, *files} if there.get(name) != files.get(name))
            raise CheckpointError(
                f"{partial} does not hold what was written to it ({', '.join(wrong[:3])}): do all nodes see the same "
                f"{self.root}?"
            )
        return files, {name: written.digest for name, written in writer.written.items()}, writer.writers

    def _publish(self, partial: Place, manifest: Manifest, proven: bool) -> Place:
        """On rank 0: the folder gets its name, older ones go. Raises CheckpointError."""
        self._owner.look()
        manifest = replace(manifest, seconds=round(time.perf_counter() - self._began, 3))
        folder = publish(partial, self.root, manifest, self._bad)
        self._bad.pop(manifest.step, None)
        if not proven:
            return folder
        try:
            self._deleter.delete(self._retire(manifest.step))
        except (CheckpointError, OSError) as error:
            logger.warning(f"older checkpoints were not deleted: {error}")
        return folder

    def _retire(self, newest: int) -> list[Place]:
        keep = () if self._resumed is None else (self._resumed,)
        plan = self.plan
        return retire(
            self.root,
            newest,
            plan.keep_latest_k,
            plan.keep_every,
            keep,
            tuple(self._bad),
            self._fingerprints,
            plan.milestones,
            plan.keep_best,
        )

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        """Run on rank 0 only; every rank gets its result, or its error."""
        return on_rank_0(self._world, action, self._group)
