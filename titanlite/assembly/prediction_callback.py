"""The callback that records a run's prediction, and warns when the run leaves it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.callbacks import Callback
from titanlite.dist.launch_env import read_launch_env
from titanlite.metrics.bad_step_log import FILE as GUARD
from titanlite.metrics.throughput import device_name, total_memory_bytes
from titanlite.plan.hardware import local_cluster
from titanlite.plan.memory import with_vocabulary
from titanlite.plan.parts import GIB
from titanlite.plan.plan import make_plan
from titanlite.runs import PREDICTION
from titanlite.runs.metrics_jsonl import MetricsLog
from titanlite.runs.prediction import Compared, compare, keep, read
from titanlite.utils import logger, timestamp

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents
    from titanlite.metrics.housekeeping import AttemptRecord
    from titanlite.metrics.metrics_logger import MetricsLogger
    from titanlite.run.config import RunConfig
    from titanlite.trainer import Trainer

#: So many steps in a row outside of an interval are told.
PATIENCE = 50


class KeptPrediction(Callback):
    """On rank 0. On a GPU it makes a plan where none of this run is kept, and tells its memory."""

    def __init__(
        self, parts: TrainingComponents, attempts: AttemptRecord, metrics: MetricsLogger
    ) -> None:
        self._parts = parts
        self._attempts = attempts
        self._metrics = metrics
        self._folder = Path(parts.run.job.dump_folder)
        self._found: Any = {}
        #: By figure: how many steps in a row were outside.
        self._outside: Counter[str] = Counter()
        self._step = 0

    def on_start(self, trainer: Trainer) -> None:
        record = self._attempts.record
        if record is None:
            return
        run = self._parts.run
        self._step = trainer.step
        known = {
            "model": run.model.title,
            "tokens_per_step": run.batch.tokens_per_step,
            "steps": trainer.steps,
            "world_size": run.mesh.world_size,
        }
        kept: Any = read(self._folder)
        for name, part in kept.items():
            if all(part.get(key) in (None, value) for key, value in known.items()):
                self._found[name] = part
            else:
                text = f"the {name} in {PREDICTION} is of another run, by one of {[*known]}"
                logger.warning(f"{text}: it is passed over")
        device = self._parts.world.device
        if device.type == "cuda" and "plan" not in self._found:
            self._plan(run)
        if plan := self._found.get("plan"):
            self._metrics.planned_tps = plan["tokens_per_second"]
            if device.type == "cuda":
                _tell_memory(plan["peak_gib"], plan["needed_gib"], total_memory_bytes(device))
        if self._found:
            head = {"event": "predicted", "attempt": record.number, "time": timestamp()}
            record.write({**head, "predicted": self._found})

    def _plan(self, run: RunConfig) -> None:
        try:
            sized = with_vocabulary(run, self._parts.datasets.tokenizer.vocab_size)
            device = device_name(self._parts.world.device)
            cluster = local_cluster(sized, device, read_launch_env().local_world_size)
            self._found["plan"] = make_plan(sized, cluster).as_json()
            keep(self._folder, plan=self._found["plan"])
        except Exception as error:
            logger.info(f"no plan is kept: {error}")

    def on_rollback(self, trainer: Trainer) -> None:
        self._step = trainer.step
        self._outside.clear()

    def on_log(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        steps = trainer.step - self._step
        self._step = trainer.step
        at = 0
        if trainer.validated is not None:
            at, result = trainer.validated
            figures = {**figures, "validation_loss": result.all.loss}
        for name, one in compare(self._found, figures, at).items():
            before = self._outside[name]
            # To be faster than planned is no fault.
            if one.measured < one.low or (one.measured > one.high and name != "tps"):
                self._outside[name] += steps
            else:
                self._outside[name] = 0
            if before < PATIENCE <= self._outside[name]:
                self._tell(trainer.step, name, one)

    def _tell(self, step: int, name: str, one: Compared) -> None:
        text = f"step {step}: outside of the prediction for {PATIENCE} steps: {one.text(name)}"
        logger.warning(text)
        row = {"step": step, "time": time.time(), "kind": "prediction", "figure": name}
        MetricsLog(self._folder / GUARD).write({**row, **one._asdict(), "message": text})


def _tell_memory(peak: float, needed: float, total: int) -> None:
    text = f"memory planned: {peak:,.1f} GiB of tensors, {needed:,.1f} with overhead"
    text += f", of {total / GIB:,.1f} per GPU"
    if needed * GIB > total:
        logger.warning(f"{text}: the run may end with code 8")
    else:
        logger.info(text)
