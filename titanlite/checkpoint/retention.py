"""When checkpoints come and go: when a run saves, how one is published and deleted, and which ones stay. No torch here.

A save marks the folder `step-N`, writes all files into it, and the manifest last (`begin`, `publish`). A deletion marks
the folder and removes the manifest first (`unpublish`, `delete`). So a process that is killed at any moment leaves
either a whole checkpoint, or a marked folder without a manifest, which is a leftover for the next start or save. All
this is done by one rank; `SaveSchedule` is asked by all.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Literal, cast

from titanlite.checkpoint.manifest import (
    DELETED,
    FILE,
    PARTIAL,
    PIN,
    REASON,
    CheckpointError,
    Manifest,
    NewerFormatError,
    is_valid,
    marked_folder,
    parse_manifest,
    read_manifest,
    step_folder,
    steps_in,
)
from titanlite.checkpoint.paths import (
    AnyPath,
    StorePath,
    copy_folder,
    entries,
    remove_folder,
    sync_folder,
    to_path,
    write_new,
)
from titanlite.utils import human_time, logger

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint
    from titanlite.parallel.dist_env import DistEnv

#: Seconds that a save waits for the deletion of leftovers.
_SETTLE_SECONDS = 300.0
#: Steps whose checkpoints stay for good: those of a list, or 1, 2, 4, 8, …
Milestones = Literal["powers_of_two"] | Sequence[int]
#: How often in an interval rank 0 tells the others the time.
_SYNCS = 16
#: Environment variable with the seconds that torchrun waits for its workers after SIGTERM, and torchrun's default.
GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_TORCHRUN_SECONDS = "30"
#: A stop needs more than the save: the step under way, and a disk that others use at that moment.
_MARGIN = 1.5

# When a run saves


def is_milestone(step: int, milestones: Milestones) -> bool:
    if milestones == "powers_of_two":
        return step > 0 and step & (step - 1) == 0
    return step in milestones


class SaveSchedule:
    """Says after which steps to save: the same answer on all ranks, which make one together and ask alike.

    Call `due` after each step, and `begin` before a save. An interval in steps needs no communication. For one in
    seconds the clock of rank 0 decides. The ranks synchronize at a step that they agreed on the last time: a sixteenth
    of the interval ahead by the pace so far, or the rest of it if that is less. That is a small broadcast on the hosts
    now and then, and waits for no device. If steps become slower meanwhile, a save is late by a sixteenth of the
    interval's steps at most. The first interval begins with the first question.

    fingerprints: of the run; the validation losses of its checkpoints in `config.folder` are those to beat.
    clock: seconds, for tests.
    """

    def __init__(
        self,
        config: Checkpoint,
        world: DistEnv,
        fingerprints: dict[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._world, self._fingerprints, self._clock = world, fingerprints, clock
        #: Start of the interval; None before the first question.
        self._begun: float | None = None
        #: The latest step in question; step and time of the latest synchronization; step of the next one.
        self._asked = 0
        self._synced = (0, 0.0)
        self._next_sync = 0

    def due(self, step: int, validation_loss: float | None = None) -> bool:
        """Return whether to save after `step`. validation_loss: of these weights, where it was just measured."""
        config = self.config
        if self._begun is None:
            self.begin(step)
        elif step <= self._asked:  # the run was rolled back to an earlier step
            self._synced, self._next_sync = (step, self._clock()), step + 1
        self._asked = step
        if is_milestone(step, config.milestones) or (config.enable_first_step_checkpoint and step == 1):
            return True
        if config.interval_type == "steps" and step % config.interval == 0:
            return True
        judged = config.keep_best > 0 and validation_loss is not None
        syncs = config.interval_type == "seconds" and step >= self._next_sync
        if not (judged or syncs):
            return False
        answer = False, step + 1
        if self._world.rank == 0:
            answer = self._decide(step, validation_loss if judged else None)
        due, next_sync = cast("tuple[bool, int]", self._world.broadcast(answer))
        if syncs:
            self._next_sync = next_sync
        return due

    def begin(self, step: int) -> None:
        """Start the next interval: a save of `step` begins now, whether it succeeds or not."""
        self._begun = self._clock()
        self._synced = (step, self._begun)
        self._next_sync = step + 1

    def _decide(self, step: int, validation_loss: float | None) -> tuple[bool, int]:
        """On rank 0: return whether to save, and the step of the next synchronization."""
        better = validation_loss is not None and math.isfinite(validation_loss) and self._is_among_best(validation_loss)
        if self.config.interval_type == "steps" or self._begun is None:
            return better, step
        now, (before, then) = self._clock(), self._synced
        self._synced = (step, now)
        left = self.config.interval - (now - self._begun)
        pace = (now - then) / max(step - before, 1)
        ahead = int(min(left, self.config.interval / _SYNCS) / pace) if pace > 0 else 1
        return better or left <= 0, step + max(ahead, 1)

    def _is_among_best(self, loss: float) -> bool:
        """Return whether fewer than `config.keep_best` checkpoints of this run have a loss that is as low."""
        root, lower = to_path(self.config.folder), 0
        try:
            for step in steps_in(root):
                with suppress(CheckpointError):
                    manifest = parse_manifest(step_folder(root, step))
                    other = manifest.validation_loss if _counts(manifest, self._fingerprints) else None
                    lower += other is not None and other <= loss
        except OSError:
            return True  # the folder cannot be read: the save will say why
        return lower < self.config.keep_best


def grace_warning(seconds: float, name: str, environment: Mapping[str, str]) -> str:
    """Return a warning when a save of `seconds` is likely to outlast torchrun's grace period after SIGTERM, else "".

    name: of the save, in words. A process does not see the grace periods of schedulers (Slurm, Kubernetes).
    """
    default = _TORCHRUN_SECONDS if "TORCHELASTIC_RUN_ID" in environment else "inf"
    try:
        grace = float(environment.get(GRACE_VARIABLE, default))
    except ValueError:
        return ""
    if seconds * _MARGIN <= grace:
        return ""
    return (
        f"{name} took {human_time(seconds)}, and torchrun kills its workers {human_time(grace)} after a SIGTERM: a run "
        f"that is stopped so is likely to lose its last save. Start it with {GRACE_VARIABLE}={int(seconds * 3) + 30}, "
        "and ask the scheduler for as much"
    )


# How a checkpoint is published and deleted


def clear_leftovers(root: AnyPath, step: int, deleter: Deleter) -> None:
    """Delete leftovers of other saves, whose space is needed, and all that has the place of `step`.

    The caller knows that no other process is saving there. Raises CheckpointError when the deletion takes too long.
    """
    final = step_folder(root, step)
    left = [path for path in leftovers(root) if path.name.startswith(PARTIAL) or marked_folder(path) == final]
    if left and not deleter.wait(_SETTLE_SECONDS):
        raise CheckpointError(f"{root}: old checkpoints are still being deleted; nothing is written meanwhile")
    _delete(left)  # a store that forbids deletions is no reason not to save


def begin(root: AnyPath, step: int, known_bad: Mapping[int, str] | None = None) -> AnyPath:
    """Return the empty folder `step-N` to write the checkpoint of `step` into, which is none before `publish`.

    An invalid checkpoint of that step, or one in `known_bad`, is quarantined. Raises CheckpointError for a valid one.
    """
    final, reason = step_folder(root, step), (known_bad or {}).get(step)
    if final.exists():
        try:
            read_manifest(final)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            reason = reason or str(error)
        if reason is None:
            raise CheckpointError(f"{final} already holds a valid checkpoint; it is not overwritten")
        quarantine(final, reason)
    if isinstance(root, Path):
        root.mkdir(parents=True, exist_ok=True)
    _mark(PARTIAL, final)
    if isinstance(final, Path):
        final.mkdir()
    return final


def _mark(kind: str, folder: AnyPath) -> AnyPath:
    """Write the mark of a save or a deletion beside the folder.

    It is not made durable, which could take long beside a save: after a crash of the machine a folder without a mark is
    reported, and not deleted.
    """
    mark = folder.parent / f"{kind}{folder.name}-{uuid.uuid4().hex[:8]}"
    action = "a save" if kind == PARTIAL else "the deletion"
    mark.write_bytes(f"{action} of {folder.name}, under way or cut short\n".encode())
    return mark


def publish(folder: AnyPath, manifest: Manifest) -> None:
    """Write the manifest, which makes the folder a checkpoint, then remove the mark. Raises CheckpointError."""
    try:
        write_new(folder / FILE, manifest.to_json().encode())
    except FileExistsError:
        raise CheckpointError(f"{folder} already holds a checkpoint; it is not overwritten") from None
    with suppress(OSError):  # the mark of a published folder means nothing, and goes with the next save
        for mark in marks_of(folder):
            mark.unlink(missing_ok=True)
    sync_folder(folder.parent)


def unpublish(folder: AnyPath) -> AnyPath:
    """Make a folder no checkpoint any more; return the mark, for `delete`."""
    mark = _mark(DELETED, folder)
    if isinstance(folder, Path) and folder.is_symlink():
        folder.unlink()  # its target belongs to someone else
    else:
        (folder / FILE).unlink(missing_ok=True)
        sync_folder(folder)
    return mark


def leftovers(root: AnyPath) -> list[AnyPath]:
    """Return the marks of saves and deletions that are under way or were cut short.

    titanlite 0.1.0 made folders of such names instead, which hold the files themselves.
    """
    return [root / name for name in sorted(entries(root)) if name.startswith((PARTIAL, DELETED))]


def marks_of(folder: AnyPath) -> list[AnyPath]:
    return [mark for mark in leftovers(folder.parent) if marked_folder(mark) == folder]


def leftover_folder(leftover: AnyPath) -> AnyPath | None:
    """Return the folder that holds the files of a leftover; None where its folder is a checkpoint."""
    folder = None if leftover.is_dir() else marked_folder(leftover)
    if folder is None:
        return leftover
    return None if (folder / FILE).is_file() else folder


def delete(leftover: AnyPath) -> None:
    """Delete the folder of a mark, unless it is a checkpoint, and then the mark. Raises OSError."""
    folder = leftover_folder(leftover)
    if folder is not None and folder.is_dir():
        remove_folder(folder)
    leftover.unlink(missing_ok=True)


def quarantine(folder: AnyPath, reason: str) -> AnyPath:
    """Rename a checkpoint that must not be loaded to `step-N.invalid-K`, with the reason in a file; the new path.

    In a store it is copied and then deleted: a crash leaves the whole of one of them.
    """
    names = entries(folder.parent)
    name = next(name for i in range(10**6) if (name := f"{folder.name}.invalid-{i}") not in names)
    aside, content = folder.parent / name, f"{reason}\n".encode()
    if isinstance(folder, StorePath):
        begun = _mark(PARTIAL, aside)
        copy_folder(folder, folder.parent / name, last=FILE)
        (aside / REASON).write_bytes(content)
        begun.unlink(missing_ok=True)
        delete(unpublish(folder))
    else:
        with suppress(OSError):
            (folder / REASON).write_bytes(content)
        folder.rename(folder.with_name(name))
        sync_folder(folder.parent)
    logger.warning(f"{folder} is now {aside.name}: {reason}")
    return aside


class Deleter:
    """Deletes leftovers in a thread of its own: a large one may take longer than the other ranks would wait."""

    def __init__(self) -> None:
        self._threads: list[Thread] = []
        #: Marks have names of their own: no deletion begins twice.
        self._begun: set[AnyPath] = set()

    def delete(self, marks: Collection[AnyPath]) -> None:
        """Start the deletion. Leftovers that cannot be deleted stay for the next start."""
        new = [mark for mark in marks if mark not in self._begun]
        self._begun.update(new)
        if new:
            thread = Thread(target=_delete, args=(new,), name="titanlite-delete", daemon=True)
            thread.start()
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def wait(self, seconds: float) -> bool:
        """Wait until all is deleted, at most so long; return whether it is."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _delete(marks: list[AnyPath]) -> None:
    for mark in marks:
        with suppress(OSError):
            delete(mark)


# Which ones stay


def prune(
    root: AnyPath,
    newest: int,
    config: Checkpoint,
    keep: Collection[int] = (),
    known_bad: Collection[int] = (),
    fingerprints: dict[str, str] | None = None,
) -> list[AnyPath]:
    """Unpublish old checkpoints now that the one of step `newest` exists; return marks for `delete`.

    Only checkpoints of this run (by `fingerprints`, None: any) up to that step are counted, and only such go. One whose
    files are not whole takes no place among the latest. These stay: the latest `keep_latest_k` (0: all), multiples of
    `keep_every`, milestones, the `keep_best` of lowest validation loss, `keep`, pinned ones, folders without a good
    manifest, and checkpoints of weights only, from which no run could resume.

    The last one whose weights are known to give a finite loss stays. That is the newest if its loss was measured
    (`Manifest.validation_loss`), else the one before it: the steps since then have shown it.

    Raises CheckpointError, and removes nothing, when the newest is not valid.
    """
    if not config.keep_latest_k:
        return []
    head = read_manifest(step_folder(root, newest))
    if head.weights_only:
        return []
    valid = {newest: head}
    latest = max(config.keep_latest_k, 1 if head.validation_loss is not None else 2)
    for step in reversed([step for step in steps_in(root) if step < newest and step not in known_bad]):
        # Those that stay count only when they are whole; of those that go, the manifest alone is read.
        read = read_manifest if len(valid) < latest else parse_manifest
        with suppress(CheckpointError):
            manifest = read(step_folder(root, step))
            if _counts(manifest, fingerprints):
                valid[step] = manifest
    losses = sorted((m.validation_loss, step) for step, m in valid.items() if m.validation_loss is not None)
    best: list[int] = []  # of equal losses the earlier
    for _, step in losses:
        if len(best) < config.keep_best and is_valid(step_folder(root, step)):
            best.append(step)
    stay, every = {*keep, *sorted(valid)[-latest:], *best}, config.keep_every
    stay |= {step for step in valid if (every and step % every == 0) or is_milestone(step, config.milestones)}
    going = (step_folder(root, step) for step in sorted(valid.keys() - stay))
    return [unpublish(folder) for folder in going if not (folder / PIN).exists()]


def _counts(manifest: Manifest, fingerprints: dict[str, str] | None) -> bool:
    """Return whether a run with these fingerprints (None: any) could resume from it."""
    return not manifest.weights_only and (fingerprints is None or manifest.fingerprints == fingerprints)
