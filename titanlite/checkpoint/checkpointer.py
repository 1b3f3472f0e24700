"""Save and load on all ranks together."""

from __future__ import annotations

import os
import platform
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from titanlite._version import __version__
from titanlite.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    find,
    publish,
    read_manifest,
    step_folder,
    steps_in,
)
from titanlite.checkpoint.state import describe, describe_all, differences, gather, rng_state, scatter, set_rng_state
from titanlite.config.plans import CheckpointPlan
from titanlite.parallel.world import World

_RNG = "rng.torch"
#: A folder with this prefix is a save that was not finished. Its name can never be taken for a checkpoint's.
_PARTIAL = ".partial-"
T = TypeVar("T")


@dataclass(frozen=True)
class LoadedState:
    """What a load found out, besides filling model and optimizer."""

    step: int
    train: dict[str, Any]
    #: Newer folders that were passed over, and other things to tell, a line each.
    notices: list[str] = field(default_factory=list)


class Checkpointer:
    """Saves and resumes one run in `plan.folder`.

    fingerprints: what must be equal for a resume, such as {"model": …, "tokenizer": …, "data": …}; a checkpoint with
    others is refused. config: the resolved configuration, kept in the manifest for people.
    """

    def __init__(
        self, plan: CheckpointPlan, world: World, fingerprints: dict[str, str], config: dict[str, Any] | None = None
    ) -> None:
        self.plan = plan
        self.root = Path(plan.folder)
        self._world = world
        self._fingerprints = fingerprints
        self._config = config or {}

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, train: dict[str, Any]) -> Path:
        """Write the checkpoint of `step`; returns its folder, published and durable.

        train: JSON-able state of the loop. Raises CheckpointError, on all ranks, when any rank fails; nothing
        half-written is then published.
        """
        partial = self._on_rank_0(lambda: self._make_partial(step))
        tensors: dict[str, torch.Tensor] = gather(model, optimizer)
        tensors[_RNG] = rng_state(self._world.device, self._world.size)
        description = describe_all(tensors, model)
        _dcp(
            f"saving {step_folder(self.root, step)}",
            lambda: dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial, sync_files=True)),
        )
        return self._on_rank_0(lambda: self._publish(partial, step, description, train))

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> LoadedState | None:
        """Resume from `plan.folder` as `plan.start` says; None when there is nothing to resume and that is allowed.

        Raises CheckpointError, on all ranks, before anything is changed, when the checkpoint is of another run.
        """
        manifest, notices = self._on_rank_0(self._choose)
        if manifest is None:
            return None
        tensors: dict[str, torch.Tensor] = gather(model, optimizer)
        rng = rng_state(self._world.device, self._world.size)
        wanted = describe_all(tensors, model)
        saved = {name: entry for name, entry in manifest.tensors.items() if name != _RNG}
        folder = step_folder(self.root, manifest.step)
        if lines := differences(saved, wanted):
            raise CheckpointError(f"{folder} does not fit this model:\n  " + "\n  ".join(lines))
        same_generators = manifest.tensors.get(_RNG) == describe({_RNG: rng})[_RNG]
        if same_generators:
            tensors[_RNG] = rng
        else:
            notices.append(
                f"written on {manifest.world_size} ranks, loaded on {self._world.size} with {self._world.device.type} "
                "devices: the data order goes on exactly, the random generators start anew"
            )
        _dcp(f"loading {folder}", lambda: dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder)))
        tensors.pop(_RNG, None)
        scatter(tensors, model, optimizer)
        if same_generators:
            set_rng_state(rng, self._world.device)
        return LoadedState(manifest.step, manifest.train, notices)

    def _make_partial(self, step: int) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        for stale in self.root.glob(f"{_PARTIAL}*"):
            shutil.rmtree(stale, ignore_errors=True)  # left by a run that was killed while saving
        partial = self.root / f"{_PARTIAL}step-{step}-{os.getpid()}"
        partial.mkdir()
        return partial

    def _publish(self, partial: Path, step: int, tensors: dict[str, list[Any]], train: dict[str, Any]) -> Path:
        files = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
        manifest = Manifest(
            step=step,
            fingerprints=self._fingerprints,
            tensors=tensors,
            files=files,
            train=train,
            versions={
                "titanlite": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            world_size=self._world.size,
            created=time.time(),
            config=self._config,
        )
        return publish(partial, self.root, manifest)

    def _choose(self) -> tuple[Manifest | None, list[str]]:
        """On rank 0: which checkpoint to load, by `plan.start` and `plan.load_step`."""
        manifest, passed = find(self.root, self.plan.load_step)
        if self.plan.load_step is not None:
            newer = [step for step in steps_in(self.root) if step > self.plan.load_step and self._is_valid(step)]
            if newer:
                raise CheckpointError(
                    f"checkpoint.load_step = {self.plan.load_step}, but {self.root} holds newer checkpoints, which are "
                    f"never overwritten: move step-{', step-'.join(map(str, newer))} to another folder first"
                )
        if self.plan.start == "fresh":
            if manifest is not None or passed:
                raise CheckpointError(
                    f'checkpoint.start = "fresh", but {self.root} holds checkpoints already: choose another '
                    "checkpoint.folder or job.dump_folder, or move them away"
                )
            return None, []
        if manifest is None:
            if self.plan.start == "resume":
                reasons = "".join(f"\n  {line}" for line in passed)
                raise CheckpointError(f'checkpoint.start = "resume", but {self.root} has no valid checkpoint{reasons}')
            return None, passed
        differing = {
            name: (manifest.fingerprints.get(name), value)
            for name, value in self._fingerprints.items()
            if manifest.fingerprints.get(name) != value
        }
        if differing:
            lines = "".join(f"\n  {name}: {old} there, {new} here" for name, (old, new) in differing.items())
            raise CheckpointError(
                f"{step_folder(self.root, manifest.step)} is of another run:{lines}\n"
                "Start this one elsewhere with another --checkpoint.folder or --job.dump_folder, or configure it as "
                "that run was"
            )
        return manifest, [f"passed over: {reason}" for reason in passed]

    def _is_valid(self, step: int) -> bool:
        try:
            read_manifest(step_folder(self.root, step))
        except CheckpointError:
            return False
        return True

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        """Run on rank 0 only; every rank gets its result, or its error."""
        result: T | None = None
        problem: str | None = None
        if self._world.rank == 0:
            try:
                result = action()
            except (CheckpointError, OSError) as error:
                problem = str(error)
            except Exception as error:  # the other ranks are waiting for an answer, whatever happened here
                problem = repr(error)
        result, problem = cast("tuple[T, str | None]", self._world.agree((result, problem)))
        if problem is not None:
            raise CheckpointError(problem)
        return result


def _dcp(doing: str, action: Callable[[], object]) -> None:
    """Run a DCP call. Its CheckpointException is a BaseException, which `except Exception` would miss."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            action()
    except CheckpointException as error:
        causes = {f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items()}
        raise CheckpointError(f"{doing} failed: {'; '.join(sorted(causes))}") from error
