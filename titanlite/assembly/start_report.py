"""The callback that logs the start report: what runs, from where it continues, what has changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.assembly.report_rows import WARNING, report_lines
from titanlite.callbacks import Callback
from titanlite.config.sections import Checkpoint
from titanlite.utils import counted, logger

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents
    from titanlite.checkpoint.loaded import LoadedState
    from titanlite.metrics.housekeeping import AttemptRecord
    from titanlite.trainer import Trainer

#: The key of what a new run starts from.
SOURCE = "checkpoint.initial_load_path"
_WORDS = {
    "optimizer": "optimizer",
    "lr_scheduler": "schedule",
    "dataloader": "text",
    "rng": "random generators",
    "ema": "averages",
}


class StartReport(Callback):
    """Logs the report when a run starts; `peak` is the FLOPS of one device, if known."""

    def __init__(
        self, parts: TrainingComponents, peak: float | None, attempts: AttemptRecord
    ) -> None:
        self._parts = parts
        self._peak = peak
        self._attempts = attempts
        self._checkpoint = parts.run.checkpoint
        self._source_key = SOURCE
        lora = parts.run.features.lora
        if lora is not None:
            self._checkpoint = lora.checkpoint(parts.run.checkpoint)
            self._source_key = lora.source_key

    def on_start(self, trainer: Trainer) -> None:
        loaded, rank = trainer.loaded, trainer.parts.world.rank
        for line in [
            *report_lines(self._parts, trainer.steps, self._peak),
            *self._notices(trainer),
            began(self._checkpoint, loaded, self._source_key),
        ]:
            # Every rank has it in its own log; the console shows a warning once.
            warns = line.startswith(WARNING) and not rank
            logger.log(
                logging.WARNING if warns else logging.INFO,
                line.removeprefix(WARNING) if warns else line,
            )

    def _notices(self, trainer: Trainer) -> Iterator[str]:
        loaded = trainer.loaded
        section = self._checkpoint
        if loaded is not None:
            yield from loaded.notices
            if "dataloader" not in loaded.left_out and "data" in loaded.train:
                from titanlite.data.skip_ranges import served_already
                from titanlite.metrics.bad_step_log import steps_text

                for first, end in served_already(self._parts.loaders.skip, loaded.train["data"]):
                    steps = steps_text(first, end, self._parts.run.course)
                    yield (
                        f"data.skip_steps: {steps} comes too late, it was trained on before this "
                        "checkpoint; to leave it out, start from an older one "
                        "(checkpoint.load_step)"
                    )
        if section.enable_checkpoint and section.model_weights_only:
            form = " in Hugging Face's format" if section.last_save_in_hf else ""
            yield (
                f"the last save, of step {trainer.steps}, will hold the weights only, as "
                f"{section.export_dtype}{form} (checkpoint.model_weights_only): to train on later "
                "means to go back to the full checkpoint before it"
            )
        yield from self._attempts.lines
        if loaded is not None:
            from titanlite.assembly.schedule_change import schedule_change

            change = schedule_change(loaded, trainer.parts.learning_rate, trainer.steps)
            if change:
                yield f"{WARNING}{change}"
        if trainer.step >= trainer.steps and not trainer.owed:
            key = (
                "training.epochs"
                if self._parts.run.training.epochs
                else "training.steps (or .tokens)"
            )
            yield (
                f"nothing to do: the checkpoint in {section.folder} is of step {trainer.step} and "
                f"the run has {counted(trainer.steps, 'steps')}. To train on, raise {key}; to "
                "start again, give another --job.dump_folder or move the checkpoints away"
            )


def began(section: Checkpoint, loaded: LoadedState | None, source_key: str = SOURCE) -> str:
    """Return from where a run starts, and why."""
    if not section.enable_checkpoint:
        return "a fresh run, checkpoints are off"
    asked = f"checkpoint.start = {section.start}"
    if loaded is None:
        return f"a fresh run ({asked}): no checkpoint to resume in {section.folder}"
    from titanlite.checkpoint.loaded import GROUPS

    anew = [_WORDS[name] for name in GROUPS if name in loaded.left_out and name in _WORDS]
    but = f", but with new {', '.join(anew)}" if anew else ""
    if loaded.origin == "from":
        taken = "its weights" if not loaded.train else f"all it holds{but}, at step {loaded.step}"
        why = f"{source_key}; {section.folder} has no checkpoint yet"
        return f"a run that starts from {loaded.folder} with {taken} ({why})"
    why = asked if section.load_step == -1 else f"checkpoint.load_step = {section.load_step}"
    if section.initial_load_path is not None:
        why += f"; so {source_key} is not used"
    return f"resumed from step {loaded.step} in {section.folder}{but} ({why})"
