"""The record of bad steps: the text they were trained on, and how to skip it.

guard.jsonl in the run's folder has a line for each bad step, and is only ever appended to:

    {"step": 7, "time": 1764682391.2, "kind": "not finite", "action": "skip", "loss": "nan",
     "grad_norm": "nan",
     "message": "step 7: …", "ranks": [1], "hosts": [], "data_steps": "7", "documents": {"48":
     [3, 17], "49": [5], …}}

`documents` has the numbers of the documents of each sequence of the global batch, from 0 in the
order of files and records. For a stream it has files and records of rank 0 alone. `hosts` may have
a broken device. `losses` is written by `titanlite.metrics.document_losses`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from titanlite.data.loader import Fetched
from titanlite.data.step_sizes import Course
from titanlite.optim.bad_step_errors import BadStepError, WeightsError
from titanlite.runs.metrics_jsonl import MetricsLog, json_value
from titanlite.step import PlainRunner
from titanlite.utils import counted, logger

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents
    from titanlite.trainer import Trainer

#: Name of the file below `job.dump_folder`.
FILE = "guard.jsonl"
#: A checkpoint is suspect when a bad step followed this many returns to it, within this many steps.
#: The text differs each time, so the weights are to blame.
_SOON, _RETURNS = 10, 2


class AnomalyLog:
    """Reports bad steps on the console and in guard.jsonl; all ranks call it, rank 0 writes."""

    def __init__(self, parts: TrainingComponents) -> None:
        self._parts = parts
        self._log = None
        if parts.world.rank == 0:
            self._log = MetricsLog(Path(parts.run.job.dump_folder) / FILE)
        self._dataset = parts.datasets.train
        self._course = parts.run.course
        self._share = parts.loaders.share
        #: Step of the checkpoint that the run returned to. How often in a row a bad step came soon
        #: after it.
        self._returned = (-1, 0)

    def measure(self, bad: BadStepError, fetched: Fetched) -> None:
        """By the weights at hand."""
        if bad.losses or bad.applied or bad.kind not in ("spike", "not finite"):
            return
        from titanlite.metrics.document_losses import document_losses

        bad.losses = document_losses(self._parts, fetched)
        if not bad.losses or not math.isfinite(bad.losses[0]["others"]):
            # None is to blame alone.
            return
        worst = bad.losses[0]
        name = f"{worst['source']}: {worst['name']}".removeprefix(": ")
        bad.explain(
            f"Document {name} has loss {worst['loss']:.4g}, the others {worst['others']:.4g}"
        )

    def skipped(self, bad: BadStepError, fetched: Fetched) -> None:
        self.measure(bad, fetched)
        self._write(bad, "skip", fetched, ". Skipped")

    def stopped(self, bad: BadStepError, fetched: Fetched) -> None:
        """The caller logs it."""
        self.measure(bad, fetched)
        self._write(bad, "stop", fetched)

    def rolled_back(
        self, bad: BadStepError, fetched: Fetched, step: int, data: dict[str, Any]
    ) -> None:
        """data: the loader's state in the checkpoint of `step`."""
        skipped = ""
        words = f". Rolled back to the checkpoint of step {step}"
        if bad.kind != "corruption":
            skipped = steps_text(
                data["next_sequence"], fetched.after["next_sequence"], self._course
            )
            words += f", without the data of steps {skipped} from now on"
        self._write(bad, "rollback", fetched, words, back_to_step=step, left_out=skipped)
        before, times = self._returned
        if bad.step - step > _SOON:
            times = 0
        elif step == before:
            times += 1
        else:
            times = 1
        self._returned = step, times

    def mark_suspect(self, bad: BadStepError, newest: int) -> str:
        """Return why a rollback for `bad` must not use the checkpoint of step `newest`; "": it
        may.
        """
        step, times = self._returned
        if step != newest or times < _RETURNS or bad.step - newest > _SOON:
            return ""
        return (
            f"its weights are suspect: the run went back to it {counted(times, 'times')}, and "
            f"each time a bad step came within {counted(_SOON, 'steps')}, the last time step "
            f"{bad.step}"
        )

    def _write(
        self, bad: BadStepError, action: str, fetched: Fetched, words: str = "", **more: Any
    ) -> None:
        if self._log is None:
            return
        if words:
            logger.warning(
                f"{bad}{words}. The documents of step {bad.step} are in {self._log.path}"
            )
        sequences = fetched.sequences
        rank, degree = self._share
        known = sequences
        if self._dataset.lanes is not None:
            # This rank has not read the other ranks' part of a stream.
            known = sequences[(rank - sequences[0]) % degree :: degree]
        row = {
            "step": bad.step,
            "time": time.time(),
            "kind": bad.kind,
            "action": action,
            "loss": bad.loss,
            "grad_norm": bad.norm,
            "message": str(bad),
            "ranks": bad.ranks,
            "hosts": bad.hosts,
            "data_steps": steps_text(sequences[0], sequences[-1] + 1, self._course),
            **more,
            "losses": [
                {name: json_value(value) for name, value in one.items()} for one in bad.losses
            ],
            "documents": self._documents(known),
        }
        self._log.write(row)

    def _documents(self, sequences: Sequence[int]) -> dict[str, list[Any]]:
        total = self._dataset.total_sequences
        found = {}
        for number in sequences:
            if total is None or number < total:
                found[str(number)] = [name for name, _ in self._dataset.documents_in(number)]
        return found


def check_weights(bad: BadStepError, model: nn.Module) -> None:
    """Raise WeightsError for weights that are not finite: every later step would be skipped too.

    All ranks call it together.
    """
    from titanlite.checkpoint.state_dict import find_nonfinite, gather

    where = find_nonfinite(gather(model))
    if where:
        raise WeightsError(bad.step, bad.done, where, "Skipping steps cannot mend that")


def explain(trainer: Trainer, bad: BadStepError) -> None:
    """Add which module is to blame, and report the end. All ranks call it together."""
    parts, fetched = trainer.parts, trainer.recent[bad.step]
    runner = parts.train_step.runner
    # After an update the step cannot be computed again.
    searched = bad.kind == "not finite" and not bad.applied
    if searched and isinstance(runner, PlainRunner):
        try:
            from titanlite.metrics.nan_finder import diagnose_nonfinite

            finding: object = diagnose_nonfinite(
                parts.model,
                fetched.batches,
                sync_every=runner.sync_every,
                loss_function=runner.loss_function,
            )
        except Exception as failure:
            finding = f"The search for its origin failed: {type(failure).__name__}: {failure}"
        bad.explain(finding)
    elif searched:
        bad.explain(
            "Its origin is not searched for in a pipeline: to find it, resume with "
            "experimental.pipeline_parallel_degree = 1"
        )
    parts.anomalies.stopped(bad, fetched)


def steps_text(first: int, end: int, course: Course) -> str:
    """Return sequences [first, end) as `data.skip_steps` takes steps: "7" or "6-8"."""
    begin = course.steps_with_rows(first + 1)
    last = course.steps_with_rows(end)
    return str(begin) if begin == last else f"{begin}-{last}"
