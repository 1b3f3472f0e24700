"""The start report: what will run, from where it goes on, and what changed since the attempt before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from titanlite.anomalies import steps_text
from titanlite.callbacks import Callback
from titanlite.checkpoint.load import GROUPS, LoadedState
from titanlite.config.sections import Checkpoint
from titanlite.data.loader import served_already
from titanlite.data.skip_ranges import Range
from titanlite.metrics.startup_report import WARNING
from titanlite.optim.learning_rate import LearningRate
from titanlite.runs.provenance import config_changes, config_text
from titanlite.utils import counted, logger

if TYPE_CHECKING:
    from titanlite.run_callbacks import AttemptRecord
    from titanlite.trainer import Trainer

_WORDS = {"optimizer": "optimizer", "lr_scheduler": "schedule", "dataloader": "text", "rng": "random generators"}


class StartReport(Callback):
    """Logs the report when a run starts.

    report: the lines about the run itself. toml: the resolved config. skip: ranges of sequences that are skipped.
    attempts: has lines of its own. in_epochs: the text decides how long the run is.
    """

    def __init__(
        self,
        report: Callable[[Trainer], Sequence[str]],
        checkpoint: Checkpoint,
        toml: str,
        skip: Sequence[Range],
        attempts: AttemptRecord,
        in_epochs: bool,
    ) -> None:
        self._report, self._checkpoint, self._toml, self._skip = report, checkpoint, toml, skip
        self._attempts, self._in_epochs = attempts, in_epochs

    def on_start(self, trainer: Trainer) -> None:
        loaded, rank = trainer.loaded, trainer.parts.world.rank
        notices = list(self._notices(trainer))
        changes = self._config_changes(loaded, notices)
        log_lines([*self._report(trainer), *notices, *changes, began(self._checkpoint, loaded)], rank)
        change = schedule_change(loaded, trainer.parts.learning_rate, trainer.steps) if loaded else None
        if change and not rank:
            logger.warning(change)
        if trainer.step >= trainer.steps:
            logger.info(self._nothing_to_do(trainer.steps))

    def _notices(self, trainer: Trainer) -> Iterator[str]:
        """Yield what the checkpoint, its saves and the attempt before have to tell."""
        loaded, section = trainer.loaded, self._checkpoint
        if loaded is not None:
            yield from loaded.notices
            if "dataloader" not in loaded.left_out and "data" in loaded.train:
                for first, end in served_already(self._skip, loaded.train["data"]):
                    steps = steps_text(first, end, trainer.parts.global_batch_size)
                    yield (
                        f"data.skip_steps: {steps} comes too late, it was trained on before this checkpoint; to leave "
                        "it out, start from an older one (checkpoint.load_step)"
                    )
        if section.enable_checkpoint and section.model_weights_only:
            yield (
                f"the last save, of step {trainer.steps}, will hold the weights only, as {section.export_dtype} "
                "(checkpoint.model_weights_only): to train on later means to go back to the full checkpoint before it"
            )
        yield from self._attempts.lines

    def _config_changes(self, loaded: LoadedState | None, told: Sequence[str]) -> list[str]:
        """How the config differs from that of the checkpoint to resume; changes that are `told` are left out."""
        if loaded is None or loaded.origin != "resume":
            return []
        changes = config_changes(loaded.config.get("toml"), config_text(self._toml))
        lines = [f"{key}: {change}" for key, change in changes.items()]
        new = [line for line in lines if not any(t.endswith(f" {line}") for t in told)]
        return [f"config is not that of the checkpoint: {line}" for line in new]

    def _nothing_to_do(self, steps: int) -> str:
        section, key = self._checkpoint, "training.epochs" if self._in_epochs else "training.steps (or training.tokens)"
        weights = ""
        if section.model_weights_only:
            weights = (
                ". If the weights alone were wanted of it (checkpoint.model_weights_only) and it holds more: "
                f"`titanlite checkpoint convert {section.folder}/step-{steps} TARGET --to hf --dtype "
                f"{section.export_dtype}`"
            )
        return (
            f"nothing to do: the checkpoint in {section.folder} is of step {steps} and the run has "
            f"{counted(steps, 'steps')}. To train on, raise {key}; to start anew, give another --job.dump_folder or "
            f"move the checkpoints away{weights}"
        )


def log_lines(lines: Sequence[str], rank: int) -> None:
    """Log a report. Every rank has it in its own log; the console shows a warning once."""
    for line in lines:
        warns = line.startswith(WARNING) and not rank
        level, text = (logging.WARNING, line.removeprefix(WARNING)) if warns else (logging.INFO, line)
        logger.log(level, text, extra={"wrap": True})


def began(section: Checkpoint, loaded: LoadedState | None) -> str:
    """Return from where a run starts, and why."""
    if not section.enable_checkpoint:
        return "a fresh run, checkpoints are off"
    asked = f"checkpoint.start = {section.start}"
    if loaded is None:
        return f"a fresh run ({asked}): no checkpoint to resume in {section.folder}"
    anew = [_WORDS[name] for name in GROUPS if name in loaded.left_out and name in _WORDS]
    but = f", but with new {', '.join(anew)}" if anew else ""
    if loaded.origin == "from":
        taken = "its weights" if not loaded.train else f"all it holds{but}, at step {loaded.step}"
        why = f"checkpoint.initial_load_path; {section.folder} has no checkpoint yet"
        return f"a run that starts from {loaded.folder} with {taken} ({why})"
    why = asked if section.load_step == -1 else f"checkpoint.load_step = {section.load_step}"
    if section.initial_load_path is not None:
        why += "; so checkpoint.initial_load_path is not used"
    return f"resumed from step {loaded.step} in {section.folder}{but} ({why})"


def schedule_change(loaded: LoadedState, rate: LearningRate, steps: int) -> str | None:
    """Return how learning rates differ from those of the run that wrote the checkpoint; None if they do not."""
    before, now = loaded.train.get("schedule"), rate.record()
    if loaded.origin != "resume" or "lr_scheduler" in loaded.left_out or not isinstance(before, dict):
        return None
    changed = {name: before[name] for name, value in now.items() if name in before and before[name] != value}
    first, coming = loaded.step + 1, range(loaded.step + 1, steps + 1)
    try:
        earlier = rate.with_record(changed)
        if all(earlier(step) == rate(step) for step in coming[:: max(len(coming) // 1000, 1)]):
            return None
        rates = f"{earlier(first):.3g} -> {rate(first):.3g}"
    except (TypeError, ValueError, KeyError):  # of a later version, or damaged: it only serves this comparison
        return f"the learning-rate schedule in {loaded.folder} cannot be compared with this run's: {changed!r:.200}"
    words = [f"{name.replace('_', ' ')} {_number(then)} -> {_number(now[name])}" for name, then in changed.items()]
    keep = ""
    if "total_steps" in changed:
        keep = f"; lr_scheduler.total_steps = {changed['total_steps']} keeps the old length"
    return (
        f"the learning-rate schedule changed since step {loaded.step}: {', '.join(words)}; "
        f"learning rate of step {first}: {rates}{keep}"
    )


def _number(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, int | float) else str(value).lower()
