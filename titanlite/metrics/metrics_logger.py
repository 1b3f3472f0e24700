"""The figures of a run: step lines, metrics.jsonl, TensorBoard and trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from titanlite.callbacks import SLOW_PHASES, Callback, Figures, RunEnd
from titanlite.config.run_sections import Job, Metrics
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics.step_line import SLOW_DATA, titan_line
from titanlite.metrics.throughput import Reading, Throughput, read_memory, reset_peak
from titanlite.runs.metrics_jsonl import FILE, MetricsLog
from titanlite.runs.record import free_name
from titanlite.step import StepResult
from titanlite.utils import human_time, logger

if TYPE_CHECKING:
    from titanlite.checkpoint.store_paths import AnyPath
    from titanlite.metrics.run_boards import Boards
    from titanlite.metrics.stragglers import StragglerDetector
    from titanlite.trainer import Trainer


class MetricsLogger(Callback):
    """Turns steps into figures. Between two logs it reads no device and does not communicate.

    toml: the resolved config, without secrets. meter: of this rank. gc_seconds: seconds of garbage
    collection since its last call.
    """

    def __init__(
        self,
        metrics: Metrics,
        job: Job,
        world: DistEnv,
        toml: str,
        meter: Throughput,
        gc_seconds: Callable[[], float] = float,
    ) -> None:
        self._metrics = metrics
        self._job = job
        self._world = world
        self._toml = toml
        self._meter = meter
        self._gc_seconds = gc_seconds
        #: None: a rank alone.
        self._ranks: StragglerDetector | None = None
        self._jsonl: MetricsLog | None = None
        #: None: this rank has none.
        self._boards: Boards | None = None
        self._logs = 0
        #: It was warned of data that takes long.
        self._slow_data = False
        self._first_step = 1
        #: 0: none is kept.
        self.planned_tps = 0.0

    def on_start(self, trainer: Trainer) -> None:
        step, loaded = trainer.step, trainer.loaded
        folder = Path(self._job.dump_folder)
        # A run that begins at a step of another folder's run is not that of the records here
        # either.
        is_new = step == 0 or (loaded is not None and loaded.origin == "from")
        self._first_step = step + 1
        if self._world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            if is_new:
                earlier = folder / FILE
                if earlier.exists() and earlier.stat().st_size:
                    kept = earlier.rename(free_name(earlier))
                    logger.info(f"the metrics of an earlier run are kept as {kept}")
            self._jsonl = MetricsLog(folder / FILE)
            figures = {"validation": "validation_loss", "tasks": "eval_seconds"}
            again = [figures[name] for name in trainer.owed & figures.keys()]
            self._jsonl.truncate_after(step, again)
        metrics = self._metrics
        if metrics.enable_tensorboard or metrics.tracker_names:
            from titanlite.metrics.run_boards import Boards

            self._boards = Boards(
                metrics, self._job, self._toml, self._world.rank, step, resumed=not is_new
            )
        if self._world.size > 1:
            from titanlite.metrics.stragglers import StragglerDetector

            head = dict(trainer.parts.model.named_modules()).get(trainer.parts.run.spec.head)
            self._ranks = StragglerDetector(self._world.device, head)
        parts = trainer.parts
        count = parts.run.spec.count_parameters(parts.args)
        self._print_aws_fsdp(156, "Creating Model")
        created = f"Created model with total parameters: {count} ({count * 1e-9:.2f} B)"
        self._print_aws_fsdp(172, created)
        self._begin(trainer)

    def on_rollback(self, trainer: Trainer) -> None:
        """Drop later records. Trackers keep what they have."""
        self._first_step = trainer.step + 1
        if self._jsonl:
            self._jsonl.truncate_after(trainer.step)
        if self._boards:
            self._boards.open_tensorboard(trainer.step)
        self._begin(trainer)

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        """Count waiting for data as such, and slow phases (validation, saving) not as training."""
        if phase == "data":
            self._meter.enter("data")
        elif phase in SLOW_PHASES:
            self._meter.enter(phase)
        else:
            self._meter.enter("work")

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self._meter.step_done(trainer.parts.course.size(trainer.step))
        if self._is_logged(trainer.step, trainer.steps):
            self._logs += 1
            self._log(trainer, result)
        self._request_layer_norms(trainer)

    def on_validation_end(self, trainer: Trainer, loss: float, tokens: int, seconds: float) -> None:
        step = trainer.step
        assert trainer.validated is not None
        _, result = trainer.validated
        logger.info(f"validation at {step}: {result.all} in {human_time(seconds)}")
        self._print_aws_fsdp(116, f"Batch {step} Validation loss: {loss}")
        row = {
            "validation_loss": loss,
            "validation_perplexity": result.all.perplexity,
            "validation_tokens": tokens,
        }
        row["validation_seconds"] = seconds
        for name, one in result.sources.items():
            if name:
                logger.info(f"validation at {step}, {name}: {one}")
                row |= {
                    f"validation/{name}/loss": one.loss,
                    f"validation/{name}/perplexity": one.perplexity,
                }
        self.write(step, row)

    def on_save(self, trainer: Trainer, step: int, folder: AnyPath, seconds: float) -> None:
        logger.info(f"checkpoint of step {step} written to {folder} in {human_time(seconds)}")

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        """Close all records; of a failed run within two seconds, as other ranks leave after
        three.
        """
        if self._boards:
            self._boards.close(failed=end.state not in ("done", "preempted"))

    def run_ids(self) -> dict[str, str]:
        """Return on rank 0 service → id of the run there."""
        return self._boards.run_ids() if self._boards else {}

    def write(self, step: int, row: Mapping[str, float]) -> None:
        if self._jsonl:
            self._jsonl.write({"step": step, "time": time.time(), **row})
        if self._boards:
            self._boards.write(step, row)

    def _begin(self, trainer: Trainer) -> None:
        reset_peak(self._world.device)
        self._meter.start()
        self._request_layer_norms(trainer)

    def _is_logged(self, step: int, steps: int) -> bool:
        return step % self._metrics.log_freq == 0 or step in (self._first_step, steps)

    def _request_layer_norms(self, trainer: Trainer) -> None:
        every = self._metrics.layer_norms
        step = trainer.step + 1
        wanted = every > 0 and self._logs % every == 0 and self._is_logged(step, trainer.steps)
        trainer.parts.train_step.layer_norms = wanted

    def _log(self, trainer: Trainer, result: StepResult) -> None:
        step = trainer.step
        callbacks = trainer.callbacks
        added = [one for one in callbacks.all if isinstance(one, Figures)]
        parts = [callbacks.call(one, "sums", trainer).detach().reshape(-1) for one in added]
        found = self._reduce(result, parts)
        tokens_after = trainer.parts.course.tokens_after
        reading = self._meter.read(tokens_after(trainer.steps) - tokens_after(step))
        per_step = reading.figures["seconds_per_step"]
        ranks: dict[str, float] = {}
        warning = ""
        if self._ranks is not None:
            ranks, warning = self._ranks.compare(found.work, found.waits, per_step)
        row = {
            "loss": found.loss,
            "max_loss": found.max_loss,
            "grad_norm": found.norm,
            "lr": trainer.parts.learning_rate(step),
            "tokens_seen": trainer.tokens_seen,
            **reading.figures,
            "gc_seconds": self._gc_seconds() / reading.steps,
            **ranks,
            **read_memory(self._world.device),
        }
        waits = 100 * max(found.waits) / per_step
        self._show(step, row, reading, waits)
        if self._world.rank == 0:
            self._warn(step, waits, warning)
        for layer, norm in zip(result.layer_norms, found.layer_norms, strict=True):
            row[f"grad_norm/{layer}"] = norm
        sums = found.sums
        for one, part in zip(added, parts, strict=True):
            own = callbacks.call(one, "figures", trainer, sums[: len(part)])
            callbacks.refuse_taken(one, own, ("step", "time", *row), "the log")
            row |= own
            sums = sums[len(part) :]
        self.write(step, row)
        callbacks("on_log", trainer, row)
        reset_peak(self._world.device)

    def _show(self, step: int, row: Mapping[str, float], reading: Reading, waits: float) -> None:
        """waits: for data, in percent of the time."""
        samples = reading.samples_per_second
        shown = {"step": step, "samples_per_second": samples, "waits_percent": waits, **row}
        if self.planned_tps:
            shown["plan_percent"] = 100 * row["tps"] / self.planned_tps
        if reading.seconds_left is not None:
            shown["seconds_left"] = reading.seconds_left
        if self._metrics.log_style == "titan":
            logger.info(titan_line(shown), extra={"figures": shown})
        else:
            from titanlite.metrics.aws_fsdp_lines import aws_fsdp_step

            self._print_aws_fsdp(103, aws_fsdp_step(shown))

    def _print_aws_fsdp(self, place: int, text: str) -> None:
        if self._metrics.log_style == "aws_fsdp" and self._world.rank == 0:
            from titanlite.metrics.aws_fsdp_lines import print_line

            print_line(place, text)

    def _warn(self, step: int, waits: float, warning: str) -> None:
        # The first window has the start of the loader.
        if waits > SLOW_DATA and step != self._first_step and not self._slow_data:
            self._slow_data = True
            logger.warning(
                f"step {step}: {waits:.0f} % of the time is spent waiting for data. Raise "
                "data.num_workers or data.prefetch, or tokenize the text first (titanlite data "
                "prepare)"
            )
        if warning:
            logger.warning(f"step {step}: {warning}")

    def _reduce(self, result: StepResult, parts: Sequence[torch.Tensor]) -> _Reduced:
        """Use one all-reduce and one reading of the device.

        Every rank has its own place, where the others have zero.
        """
        size, rank = self._world.size, self._world.rank
        times = torch.zeros(3, size, dtype=torch.float64)
        own = self._ranks.read(self._meter) if self._ranks else self._meter.own_seconds()
        times[1:, rank] = torch.tensor(own)
        places = times.to(self._world.device)
        places[0, rank] = result.local_loss.detach()
        shared = torch.cat([places.flatten(), *parts])
        dist.all_reduce(shared)
        norms = list(result.layer_norms.values())
        known = torch.stack([shared[:size].max(), result.loss, result.grad_norm, *norms])
        numbers: list[float] = torch.cat([shared[size:], known]).tolist()
        max_loss, loss, norm, *layer_norms = numbers[-len(known) :]
        return _Reduced(
            work=numbers[:size],
            waits=numbers[size : 2 * size],
            sums=numbers[2 * size : -len(known)],
            max_loss=max_loss,
            loss=loss,
            norm=norm,
            layer_norms=layer_norms,
        )


class _Reduced(NamedTuple):
    #: Seconds of each rank in a step: in its own work, and waiting for data.
    work: list[float]
    waits: list[float]
    #: Sums of all `Figures`, one after the other.
    sums: list[float]
    #: The largest loss of a rank; the others are those of `StepResult`.
    max_loss: float
    loss: float
    norm: float
    layer_norms: list[float]
