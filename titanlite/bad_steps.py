"""What is known of bad steps besides their numbers: the text they were trained on, and how to leave it out.

guard.jsonl in the run's folder has a line for each bad step, and is only ever appended to:

    {"step": 7, "time": 1764682391.2, "kind": "not finite", "action": "skip", "loss": "nan", "grad_norm": "nan",
     "message": "step 7: …", "ranks": [1], "data_steps": "7", "documents": {"48": [3, 17], "49": [5], …}}

`documents` has the numbers of the documents of each sequence of the global batch, counted from 0 in the order of the
files and of the records in them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from titanlite.build import Parts
from titanlite.config.plans import DataPlan, ShardPlan
from titanlite.data.left_out import merged, of_steps, take
from titanlite.data.loader import late
from titanlite.data.packing import PackedDataset
from titanlite.feed import Fetched
from titanlite.guard import BadStepError, NonFiniteError
from titanlite.metrics.jsonl import MetricsLog
from titanlite.metrics.nan_finder import diagnose_nonfinite
from titanlite.utils import counted, logger

#: Name of the file below `job.dump_folder`.
FILE = "guard.jsonl"


#: A bad step so soon after a checkpoint that the run went back to, so often, on other text each time, is no fault of
#: the text's.
_SOON, _RETURNS = 10, 2


class BadSteps:
    """Reports bad steps, in words and in guard.jsonl; all ranks call it, rank 0 does it.

    folder: the run's; None on other ranks. global_batch: sequences per step over all ranks.
    """

    def __init__(self, folder: Path | None, dataset: PackedDataset, global_batch: int) -> None:
        self._log = None if folder is None else MetricsLog(folder / FILE)
        self._dataset, self._global_batch = dataset, global_batch
        #: The checkpoint that the run went back to, and how often in a row it was soon after it that a step was bad.
        self._back_to = (-1, 0)

    def skipped(self, bad: BadStepError, fetched: Fetched) -> None:
        """The update of this step was left out."""
        self._note(bad, "skip", fetched, ". Skipped")

    def stopped(self, bad: BadStepError, fetched: Fetched) -> None:
        """The run ends for this step; the caller says so."""
        self._note(bad, "stop", fetched)

    def rolled_back(self, bad: BadStepError, fetched: Fetched, step: int, data: dict[str, Any]) -> None:
        """The run went back to the checkpoint of `step`, where the loader's state was `data`."""
        left_out = steps_text(data["next_sequence"], fetched.after["next_sequence"], self._global_batch)
        words = f". Rolled back to the checkpoint of step {step}, without the data of steps {left_out} from now on"
        self._note(bad, "rollback", fetched, words, back_to_step=step, left_out=left_out)
        before, times = self._back_to
        soon = bad.step - step <= _SOON
        self._back_to = (step, (times if step == before else 0) + 1) if soon else (step, 0)

    def distrust(self, bad: BadStepError, newest: int) -> str:
        """Why the checkpoint of step `newest` is not to be gone back to for `bad`; "" if it is."""
        step, times = self._back_to
        if step != newest or times < _RETURNS or bad.step - newest > _SOON:
            return ""
        return (
            f"its weights are not trusted: gone back to it {counted(times, 'times')}, and each time a bad step "
            f"came within {counted(_SOON, 'steps')}, the last time step {bad.step}"
        )

    def _note(self, bad: BadStepError, action: str, fetched: Fetched, words: str = "", **more: Any) -> None:
        if self._log is None:
            return
        if words:
            logger.warning(f"{bad}{words}. The documents of step {bad.step} are in {self._log.path}")
        left_out = merged(fetched.after.get("left_out", ()))
        sequences = take(fetched.before["next_sequence"], self._global_batch, left_out)
        self._log.write(
            {
                "step": bad.step,
                "time": time.time(),
                "kind": bad.kind,
                "action": action,
                "loss": bad.loss,
                "grad_norm": bad.norm,
                "message": str(bad),
                "ranks": bad.ranks,
                "data_steps": steps_text(sequences[0], sequences[-1] + 1, self._global_batch),
                **more,
                "documents": {str(n): self._dataset.documents_in(n) for n in sequences},
            }
        )

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def explain(bad: BadStepError, parts: Parts, fetched: Fetched, plan: ShardPlan) -> None:
    """Add to the error which module was to blame. All ranks are stopped by it, and call this together."""
    if not isinstance(bad, NonFiniteError):
        return
    if parts.pipeline is not None:
        bad.explain(
            "Its origin is not searched for in a pipeline: to find it, resume with "
            "experimental.pipeline_parallel_degree = 1"
        )
        return
    try:
        finding: object = diagnose_nonfinite(
            parts.model,
            fetched.batches,
            sync_every=plan.gradient_sync == "every",
            loss_function=parts.loss,
        )
    except Exception as failure:
        finding = f"The search for its origin failed: {type(failure).__name__}: {failure}"
    bad.explain(finding)


def steps_text(first: int, end: int, global_batch: int) -> str:
    """Sequences [first, end) as steps of the data order, as `data.skip_steps` takes them: "7" or "6-8"."""
    begin, last = first // global_batch + 1, (end - 1) // global_batch + 1
    return str(begin) if begin == last else f"{begin}-{last}"


def behind(data: dict[str, Any], bad: Fetched) -> dict[str, Any]:
    """The state `data` of a loader, moved behind the step `bad`: what lies between the two is left out."""
    between = data["next_sequence"], bad.after["next_sequence"]
    left_out = merged([*data.get("left_out", ()), between])
    return {"next_sequence": bad.after["next_sequence"], "left_out": [list(stretch) for stretch in left_out]}


def late_notices(plan: DataPlan, global_batch: int, state: dict[str, Any]) -> list[str]:
    """What to tell of `data.skip_steps` to a run that resumes at `state` of its loader, a line each."""
    stretches = late(of_steps(plan.skip_steps, global_batch), state)
    return [
        f"data.skip_steps: {steps_text(first, end, global_batch)} comes too late, it was trained on before this "
        "checkpoint; to leave it out, start from an older one (checkpoint.load_step)"
        for first, end in stretches
    ]
