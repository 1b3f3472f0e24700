"""Save and load on all ranks together."""

from __future__ import annotations

import contextlib
import copy
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint.background import BackgroundSave, Outcome, Tensors
from titanlite.checkpoint.integrity import check_files, share
from titanlite.checkpoint.manifest import CheckpointError, Manifest, find, is_valid, publish, step_folder, steps_in
from titanlite.checkpoint.retention import PARTIAL, Deleter, leftovers, retire
from titanlite.checkpoint.state import describe, describe_all, differences, gather, rng_state, scatter, set_rng_state
from titanlite.checkpoint.storage import INDEX, CheckedReader, HashingWriter
from titanlite.config.plans import CheckpointPlan
from titanlite.observe.console import logger
from titanlite.parallel.world import World
from titanlite.runs import provenance

_RNG = "rng.torch"
#: Seconds that a run which is ending waits for old checkpoints to be deleted; the next start goes on with it.
_DELETE_SECONDS = 3.0
T = TypeVar("T")


@dataclass(frozen=True)
class LoadedState:
    """What a load found out, besides filling model and optimizer."""

    step: int
    train: dict[str, Any]
    #: Newer folders that were passed over, and other things to tell, a line each.
    notices: list[str] = field(default_factory=list)


class Checkpointer:
    """Saves and resumes one run in `plan.folder`. All ranks make one and call it alike.

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
        #: Step → why; what a load has found to be damaged though its manifest and sizes are right.
        self._bad: dict[int, str] = {}
        self._resumed: int | None = None
        self._deleter = Deleter()
        self._origin: tuple[dict[str, str], dict[str, Any]] | None = None
        self._background: BackgroundSave | None = None
        if plan.async_mode != "disabled":
            pinned = plan.async_mode == "async_with_pinned_mem"
            if pinned and world.device.type != "cuda":
                logger.info(f'checkpoint.async_mode: a {world.device.type} needs no page-locked memory, as "async"')
            self._background = BackgroundSave(pinned and world.device.type == "cuda")

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, train: dict[str, Any]) -> Path:
        """Write the checkpoint of `step`; returns its folder, published and durable.

        train: JSON-able state of the loop. Raises CheckpointError, on all ranks, when any rank fails; nothing
        half-written is then published.

        With `plan.async_mode` on it returns as soon as everything is copied; the folder comes into being later, and
        `poll` or `wait` tells. A save still under way is waited for first.
        """
        if self._background:
            self._background.prepare()
        partial = self._on_rank_0(lambda: self._make_partial(step))
        tensors: Tensors = gather(model, optimizer)
        tensors[_RNG] = rng_state(self._world.device, self._world.size)
        draft = self._draft(step, describe_all(tensors, model), train)
        final = step_folder(self.root, step)
        writer = HashingWriter(partial)
        if self._background:

            def write(copies: Tensors, group: dist.ProcessGroup) -> None:
                with _named(f"saving {final}"):
                    dcp.save(copies, storage_writer=writer, process_group=group)
                if self._world.rank == 0:
                    self._publish(partial, draft, writer)

            self._background.start(step, final, tensors, write)
            return final
        with _quiet(), _named(f"saving {final}"):
            dcp.save(tensors, storage_writer=writer)
        return self._on_rank_0(lambda: self._publish(partial, draft, writer))

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
        self._deleter.wait(_DELETE_SECONDS)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> LoadedState | None:
        """Resume from `plan.folder` as `plan.start` says; None when there is nothing to resume and that is allowed.

        Raises CheckpointError, on all ranks, before anything is changed, when the checkpoint is of another run, or
        when there are checkpoints and none is good.
        """
        tensors: Tensors | None = None
        while True:
            manifest, notices = self._on_rank_0(self._choose)
            if manifest is None:
                return None
            folder = step_folder(self.root, manifest.step)
            if tensors is None:
                tensors = gather(model, optimizer)
                wanted = describe_all(tensors, model)
            saved = {name: entry for name, entry in manifest.tensors.items() if name != _RNG}
            if lines := differences(saved, wanted):
                raise CheckpointError(f"{folder} does not fit this model:\n  " + "\n  ".join(lines))
            if (problem := self._verify(folder, manifest)) is None:
                break
            self._bad[manifest.step] = problem
        rng = rng_state(self._world.device, self._world.size)
        same_generators = manifest.tensors.get(_RNG) == describe({_RNG: rng})[_RNG]
        if same_generators:
            tensors[_RNG] = rng
        else:
            notices.append(
                f"written on {manifest.world_size} ranks, loaded on {self._world.size} with {self._world.device.type} "
                "devices: the data order goes on exactly, the random generators start anew"
            )
        with _quiet(), _named(f"loading {folder}"):
            dcp.load(tensors, storage_reader=CheckedReader(folder, manifest))
        tensors.pop(_RNG, None)
        scatter(tensors, model, optimizer)
        if same_generators:
            set_rng_state(rng, self._world.device)
        self._resumed = manifest.step
        return LoadedState(manifest.step, manifest.train, notices)

    def _verify(self, folder: Path, manifest: Manifest) -> str | None:
        """What is wrong with a checkpoint's contents, the same answer on all ranks; each reads a part of the files."""
        names = share(manifest.files, self._world.rank, self._world.size) if self.plan.verify == "hash" else []
        if INDEX in manifest.files and INDEX not in names:
            names.append(INDEX)  # every rank unpickles it
        found: list[list[str]] = [[] for _ in range(self._world.size)]
        dist.all_gather_object(found, check_files(folder, manifest, names))
        problems = sorted({problem for part in found for problem in part})
        if not problems:
            return None
        more = f" (and {len(problems) - 1} more of its files)" if len(problems) > 1 else ""
        return problems[0] + more

    def _make_partial(self, step: int) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        for stale in self.root.glob(f"{PARTIAL}*"):
            shutil.rmtree(stale, ignore_errors=True)  # left by a save that failed or was killed; its space is needed
        # Another name each time: what is left of an earlier one may still be being deleted.
        partial = self.root / f"{PARTIAL}step-{step}-{uuid.uuid4().hex[:8]}"
        partial.mkdir()
        return partial

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
        )

    def _publish(self, partial: Path, draft: Manifest, writer: HashingWriter) -> Path:
        """On rank 0, when all ranks have written: the folder gets its name, older ones go. Raises CheckpointError."""
        there = {path.name: path.stat().st_size for path in partial.iterdir()}
        files = {name: written.size for name, written in writer.written.items()}
        if there != files:
            wrong = sorted(name for name in {*there, *files} if there.get(name) != files.get(name))
            raise CheckpointError(
                f"{partial} does not hold what was written to it ({', '.join(wrong[:3])}): do all nodes see the same "
                f"{self.root}?"
            )
        hashes = {name: written.digest for name, written in writer.written.items()}
        folder = publish(partial, self.root, replace(draft, files=files, hashes=hashes), self._bad)
        self._bad.pop(draft.step, None)
        try:
            self._deleter.delete(self._retire(draft.step))
        except (CheckpointError, OSError) as error:
            logger.warning(f"older checkpoints were not deleted: {error}")
        return folder

    def _retire(self, newest: int) -> list[Path]:
        keep = () if self._resumed is None else (self._resumed,)
        plan = self.plan
        return retire(
            self.root, newest, plan.keep_latest_k, plan.keep_every, keep, tuple(self._bad), self._fingerprints
        )

    def _choose(self) -> tuple[Manifest | None, list[str]]:
        """On rank 0: which checkpoint to load, by `plan.start` and `plan.load_step`."""
        manifest, passed = find(self.root, self.plan.load_step, self._bad)
        if self.plan.load_step is not None:
            steps = [step for step in steps_in(self.root) if step > self.plan.load_step]
            newer = [step for step in steps if is_valid(step_folder(self.root, step))]
            if newer:
                raise CheckpointError(
                    f"checkpoint.load_step = {self.plan.load_step}, but {self.root} holds newer checkpoints, which are "
                    f"never overwritten: move step-{', step-'.join(map(str, newer))} to another folder first"
                )
        if self.plan.start == "fresh" and (manifest is not None or passed):
            raise CheckpointError(
                f'checkpoint.start = "fresh", but {self.root} holds checkpoints already: choose another '
                "checkpoint.folder or job.dump_folder, or move them away"
            )
        if manifest is None:
            self._no_checkpoint(passed)
        else:
            self._check_run(manifest)
        self._deleter.delete(leftovers(self.root))
        notices = [f"passed over: {reason}" for reason in passed]
        if passed:
            notices.append(f"`titanlite checkpoint verify {self.root}` tells all that is wrong there")
        if manifest is not None and not manifest.hashes:
            folder = step_folder(self.root, manifest.step)
            notices.append(f"{folder} is of a time without hashes: only the sizes of its files were checked")
        return manifest, notices

    def _no_checkpoint(self, passed: list[str]) -> None:
        """Raises CheckpointError unless a run may begin anew."""
        if not passed and self.plan.start != "resume":
            return
        reasons = "".join(f"\n  {line}" for line in passed)
        start = 'checkpoint.start = "resume", but ' if self.plan.start == "resume" else ""
        way_out = (
            "\nBring one back from a copy, or begin anew with another --checkpoint.folder or --job.dump_folder"
            if passed
            else ""
        )
        raise CheckpointError(f"{start}{self.root} has no valid checkpoint{reasons}{way_out}")

    def _check_run(self, manifest: Manifest) -> None:
        """Raises CheckpointError when a checkpoint is of another run."""
        lines = "".join(
            f"\n  {name}: {manifest.fingerprints.get(name)} there, {value} here"
            for name, value in self._fingerprints.items()
            if manifest.fingerprints.get(name) != value
        )
        if lines:
            raise CheckpointError(
                f"{step_folder(self.root, manifest.step)} is of another run:{lines}\n"
                "Start this one elsewhere with another --checkpoint.folder or --job.dump_folder, or configure it as "
                "that run was"
            )

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


@contextlib.contextmanager
def _named(doing: str) -> Iterator[None]:
    """DCP's failures as CheckpointError. They are a BaseException, which `except Exception` would miss."""
    try:
        yield
    except CheckpointException as error:
        causes = {f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items()}
        raise CheckpointError(f"{doing} failed: {'; '.join(sorted(causes))}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's warning about a single process. Not for threads: filters are the whole process's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        yield
