"""How a run resumes from a checkpoint: at its start, and when the guard takes it back.

A run without checkpoints does not import this.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.loaded import RESUME, LoadedState
from titanlite.checkpoint.manifest import steps_in
from titanlite.data import file_stamps
from titanlite.data.loader import gather_state
from titanlite.data.skip_ranges import skip_to
from titanlite.data.state_checks import StateError, check_loader
from titanlite.data.step_sizes import Progress
from titanlite.optim.bad_step_errors import BadStepError
from titanlite.runs.metrics_jsonl import FILE
from titanlite.runs.read_jsonl import read_metrics
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents
    from titanlite.trainer import Trainer

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Guard(msgspec.Struct):
    """Result of `FiniteGuard.state_dict`."""

    bad_steps: list[Annotated[int, msgspec.Meta(ge=1)]] = []
    losses: list[float] = []


#: Entries of a checkpoint's train state that the loop reads, and their types.
_STATE = {
    "tokens_seen": _Count,
    "data": dict[str, Any],
    "schedule_began": _Count,
    "schedule_began_tokens": _Count,
    "guard": _Guard,
    RESUME: dict[str, Any],
}
#: Name of what a run may owe → a figure that metrics.jsonl has once it is done.
_FIGURES = {"validation": "validation_loss", "tasks": "eval_seconds"}
_ONLY_WEIGHTS = (
    "Only its weights can be used: name it as checkpoint.initial_load_path of another run"
)


def load(parts: TrainingComponents) -> LoadedState | None:
    """Load the checkpoint that a run begins with; None: it begins anew.

    Raises CheckpointError where it is of another run.
    """
    assert parts.checkpointer is not None
    text = parts.datasets.train
    batch: Any = parts.run.batch.global_batch_size
    if parts.phases is not None:
        batch = parts.phases.batch_difference
    expected = {
        "global_batch": batch,
        file_stamps.TEXT_FILES: lambda saved, *_: file_stamps.difference(saved, text),
    }
    return parts.checkpointer.load(parts.model, parts.optimizer, expected)


def begin_from(trainer: Trainer, loaded: LoadedState) -> None:
    """Begin a run at a checkpoint whose tensors are loaded."""
    _check_state(loaded)
    restore(trainer, loaded)
    if loaded.origin == "resume":
        # Work that was due at this checkpoint, was not done, and can be done here.
        able = {callback.owes for callback in trainer.parts.callbacks}
        if trainer.parts.validation is not None:
            able.add("validation")
        owed = {name for name in able if loaded.train.get(f"{name}_owed")}
        if owed:
            # An earlier start from this checkpoint may have done it. Rank 0's file tells.
            world = trainer.parts.world
            owed -= world.broadcast(set() if world.rank else _measured(trainer))
        trainer.owed |= owed


def _measured(trainer: Trainer) -> set[str]:
    """Return what metrics.jsonl has of the step, by the names of what a run may owe."""
    found = set()
    with contextlib.suppress(OSError):
        for row in read_metrics(Path(trainer.parts.run.job.dump_folder) / FILE):
            if row.get("step") == trainer.step:
                found |= {name for name, figure in _FIGURES.items() if figure in row}
    return found


def settle(trainer: Trainer) -> None:
    """Do what remains when a start has done what its checkpoint owed. All ranks call it together.

    Behind the last step this saves weights for `transformers`, where a stop has left a full
    checkpoint.
    """
    saver = trainer.parts.checkpointer
    in_hf = saver is not None and saver.config.last_save_in_hf
    if in_hf and trainer.step == trainer.steps and not trainer.owed:
        trainer.save()


def restore(trainer: Trainer, loaded: LoadedState) -> None:
    """Take the loop's state from a checkpoint whose tensors are loaded.

    Raises CheckpointError for an impossible place in the text.
    """
    parts = trainer.parts
    trainer.step = trainer.done = loaded.step
    trainer.good_steps = 0
    trainer.validated = None
    if loaded.origin == "resume":
        trainer.saved_step = loaded.step
    trainer.tokens_seen = int(loaded.train["tokens_seen"])
    _restore_schedule(trainer, loaded)
    parts.train_step.guard.load_state_dict(loaded.train.get("guard", {}))
    if "dataloader" in loaded.left_out:
        load_text(trainer, {"next_sequence": 0})
    else:
        try:
            load_text(trainer, loaded.train["data"])
        except StateError as error:
            raise CheckpointError(f"{loaded.folder}: {error}. {_ONLY_WEIGHTS}") from None
    # Earlier steps may have been of another size.
    trainer.end_with_text(later=parts.datasets.train.sets_length)


def roll_back(trainer: Trainer, bad: BadStepError) -> None:
    """Go back to the newest checkpoint that is not suspect, and skip the text of a bad loss.

    All ranks call it together. Raises `bad` where its budget is used up, or there is no checkpoint.
    """
    parts = trainer.parts
    assert parts.checkpointer is not None
    parts.train_step.guard.consume_budget(bad)
    trainer.phase("rollback")
    trainer.poll_saves(wait=True)
    fetched = trainer.recent[bad.step]
    parts.anomalies.measure(bad, fetched)
    try:
        loaded = parts.checkpointer.load_newest(
            parts.model, parts.optimizer, lambda newest: parts.anomalies.mark_suspect(bad, newest)
        )
    except CheckpointError as error:
        bad.explain(f'guard.policy = "rollback", but there is nothing to go back to: {error}')
        raise bad from error
    data = {"next_sequence": 0} if "dataloader" in loaded.left_out else loaded.train["data"]
    # The text of a step that was computed wrong is not to blame.
    next_data = data if bad.kind == "corruption" else skip_to(data, fetched.after)
    train = {**loaded.train, "data": next_data}
    trainer.loaded = replace(loaded, train=train, left_out=loaded.left_out - {"dataloader"})
    restore(trainer, trainer.loaded)
    trainer.recent.clear()
    # A request to stop is repeated with every step.
    trainer.stopping = False
    trainer.owed.clear()
    trainer.callbacks("on_rollback", trainer)
    parts.anomalies.rolled_back(bad, fetched, trainer.step, data)
    for notice in loaded.notices:
        logger.info(notice)
    if trainer.step >= trainer.steps:
        # No text is left for another step.
        texts = parts.validation
        # Else it was done before this checkpoint was written.
        if texts is not None and trainer.step % texts.freq:
            trainer.validate()
        settle(trainer)


def _restore_schedule(trainer: Trainer, loaded: LoadedState) -> None:
    """Raises CheckpointError where it began at a step whose tokens are not known."""
    rate = trainer.parts.learning_rate
    by_tokens = rate.schedule.in_tokens
    rate.began = int(loaded.train.get("schedule_began", 0))
    rate.began_tokens = int(loaded.train.get("schedule_began_tokens", 0))
    if "lr_scheduler" in loaded.left_out:
        rate.began = loaded.step
        rate.began_tokens = trainer.tokens_seen if by_tokens else 0
    elif by_tokens and rate.began and not rate.began_tokens:
        raise CheckpointError(
            f"{loaded.folder}: its schedule began with step {rate.began + 1}, and it does not tell "
            'the tokens before. Keep lr_scheduler.unit = "steps"'
        )


def load_text(trainer: Trainer, data: dict[str, Any]) -> None:
    """Restore the loader, and find where phases begin from there. Raises StateError for a wrong
    state.
    """
    check_loader(data)
    parts = trainer.parts
    data = {name: value for name, value in data.items() if name not in ("phases", "course")}
    if parts.phases is not None:
        done = Progress(trainer.step, trainer.tokens_seen, data["next_sequence"])
        data["course"] = parts.course = parts.learning_rate.follow(parts.phases, done)
        data["phases"] = parts.phases.shares(done)
    parts.loader.load_state_dict(data)


def _check_state(loaded: LoadedState) -> None:
    """Raises CheckpointError."""
    needed = {"tokens_seen", "data"}
    if "dataloader" in loaded.left_out:
        needed.remove("data")
    for name, kind in _STATE.items():
        value = loaded.train.get(name)
        try:
            if name in needed or name in loaded.train:
                msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                f"{loaded.folder} does not say where its run continues: {name} in its train state "
                f"is {value!r:.60} ({error}). {_ONLY_WEIGHTS}"
            ) from None


def save_seed(parts: TrainingComponents) -> None:
    """Write a run that has not begun as step 0. Raises CheckpointError if there are others."""
    saver = parts.checkpointer
    assert saver is not None, "a seed checkpoint needs checkpoint.enable_checkpoint"
    with contextlib.closing(parts):
        if there := steps_in(saver.root):
            raise CheckpointError(
                f"checkpoint.create_seed_checkpoint = true, but {saver.root} holds "
                f"step-{there[-1]} already: give another checkpoint.folder or job.dump_folder"
            )
        data = gather_state(parts.loader.state_dict(), parts.datasets.train)
        folder = saver.save(0, parts.model, parts.optimizer, {"data": data, "tokens_seen": 0})
        saver.wait()
    logger.info(
        f"seed checkpoint written to {folder}: the same config without "
        "create_seed_checkpoint starts from it, on any number of ranks"
    )
