"""What a run shows and writes while it goes on: the start report, step lines, metrics.jsonl, TensorBoard, and more."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.plans import Plans
from titanlite.config.scan import loads
from titanlite.metrics.console import StepFigures, colorize, fsdp_line, titan_line
from titanlite.metrics.float8_error import Float8Error
from titanlite.metrics.jsonl import FILE, MetricsLog
from titanlite.metrics.live import LiveView, start_view
from titanlite.metrics.startup_report import WARNING
from titanlite.metrics.stragglers import RankComparison, StragglerDetector
from titanlite.metrics.tensorboard import TensorBoard, tags
from titanlite.metrics.throughput import (
    GCTimer,
    MemoryReading,
    Rates,
    Throughput,
    device_name,
    peak_flops,
    read_memory,
    reset_peak,
)
from titanlite.metrics.wandb import WandbWriter
from titanlite.models.shapes import flops_per_token
from titanlite.parallel.world import World
from titanlite.runs.provenance import config_text
from titanlite.step import StepResult
from titanlite.utils import human_time, logger

if TYPE_CHECKING:
    from titanlite.checkpoint.paths import AnyPath


class Observer:
    """Turns steps into figures. Between two logs it only keeps time: no device is read, nothing is communicated.

    args: the model's arguments, for FLOPs.
    """

    def __init__(self, plans: Plans, world: World, args: Any) -> None:
        assert plans.train.steps is not None
        self.plans, self.world = plans, world
        plan = plans.observe
        self.flops_per_token = flops_per_token(args, plans.batch.seq_len)
        self.peak = plan.peak_flops or (peak_flops(device_name(world.device)) if world.device.type == "cuda" else None)
        self.meter = self._new_meter()
        self._metrics: MetricsLog | None = None
        self._tensorboard: TensorBoard | None = None
        self._tracker: WandbWriter | None = None
        self._ranks = StragglerDetector(world.device)
        self._garbage = GCTimer()
        self._logs = 0
        self._failed = True
        self._view: LiveView | None = None
        self._first_step = 1
        #: The validation that a run which goes on owes is recorded already: an attempt since then was lost.
        self._validated = False

    def start(self, step: int, report: Sequence[str], model: nn.Module | None = None) -> None:
        """Say what will run, and continue (or begin) the records at `step` steps done.

        model: what will be trained; on GPUs the time of its head tells how fast each of them is.
        """
        for line in report:
            # Every rank has the report in its own log; the console is told of a warning once.
            warns = line.startswith(WARNING) and self.world.rank == 0
            level, text = (logging.WARNING, line.removeprefix(WARNING)) if warns else (logging.INFO, line)
            logger.log(level, text, extra={"wrap": True})
        self._first_step = step + 1
        plan = self.plans.observe
        if self.world.rank == 0:
            path = Path(plan.dump_folder) / FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            if step == 0:
                _keep_earlier(path)
            self._metrics = MetricsLog(path)
            self._metrics.truncate_after(step)
            self._validated = self._metrics.has(step, "validation_loss")
        self._open_tensorboard(step)
        if plan.wandb and self.world.rank == 0:
            config = loads(config_text(self.plans.config_toml))
            self._tracker = WandbWriter(Path(plan.dump_folder), config, plan.description, step + 1)
        if plan.progress and plan.log_style == "titan":
            self._view = start_view(step, self.plans.train.steps or 0)
        reset_peak(self.world.device)
        self._ranks = StragglerDetector(self.world.device, model)
        self._garbage.start()
        self.meter.start()

    def roll_back(self, step: int, plans: Plans) -> None:
        """The run is at `step` steps done again: what was recorded after it goes. Weights & Biases keeps what it has.

        plans: those of the start, perhaps with another number of steps.
        """
        assert plans.train.steps is not None
        self.plans = plans
        self._first_step = step + 1
        if self._metrics:
            self._metrics.truncate_after(step)
        if self._tensorboard:
            self._tensorboard.close()
            self._open_tensorboard(step)
        reset_peak(self.world.device)
        self.meter = self._new_meter()

    def _new_meter(self) -> Throughput:
        batch, steps = self.plans.batch, self.plans.train.steps
        assert steps is not None
        return Throughput(
            batch.tokens_per_step, batch.global_batch_size, self.world.size, self.flops_per_token, self.peak, steps
        )

    def _open_tensorboard(self, step: int) -> None:
        plan = self.plans.observe
        if plan.tensorboard_folder and (self.world.rank == 0 or not plan.rank_0_only):
            folder = Path(plan.tensorboard_folder)
            folder = folder if plan.rank_0_only else folder / f"rank_{self.world.rank}"
            self._tensorboard = TensorBoard(folder, purge_step=step + 1)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time spent inside is reported as waiting for data."""
        with self.meter.data_wait(), self._ranks.data_wait():
            yield

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Time spent inside (validation, saving) does not count as training."""
        with self.meter.pause(), self._ranks.pause():
            yield

    def logs(self, step: int) -> bool:
        """Whether the figures of this step will be read and shown: the first, the last and every `log_freq` steps."""
        return step % self.plans.observe.log_freq == 0 or step in (self._first_step, self.plans.train.steps)

    def wants_layer_norms(self, step: int) -> bool:
        """Whether this step, the next to be done, should bring gradient norms by layer."""
        every = self.plans.observe.layer_norms
        return every > 0 and self._logs % every == 0 and self.logs(step)

    def step(self, step: int, result: StepResult, lr: float, tokens_seen: int) -> None:
        """After every step; where `logs` says so the figures are read and shown."""
        self.meter.step_done()
        self._ranks.step_done()
        if not self.logs(step):
            if self._view:
                self._view.tick(step)
            return
        self._logs += 1
        layers = result.layer_norms or {}
        largest, (loss, norm, *layer_norms) = self._reduce(result, [result.loss, result.norm, *layers.values()])
        rates = self.meter.read(step)
        max_loss, *times = largest
        size = self.world.size
        ranks = self._ranks.compare(times[:size], times[size:], rates.seconds_per_step)
        memory = read_memory(self.world.device)
        figures = StepFigures(
            step=step,
            loss=loss,
            norm=norm,
            lr=lr,
            # Reserved where there is an allocator: what the device has no longer free, as this line always showed.
            memory_gib=memory.gib if memory.reserved_gib is None else memory.reserved_gib,
            memory_percent=memory.percent if memory.reserved_gib is None else memory.reserved_percent,
            tps=rates.tps,
            mfu=rates.mfu,
            tokens_seen=tokens_seen,
            seconds_left=rates.seconds_left,
            samples_per_second=rates.samples_per_second,
        )
        self._show(figures)
        if self.world.rank == 0 and ranks and (warning := self._ranks.warning(ranks)):
            logger.warning(f"step {step}: {warning}")
        garbage = self._garbage.read() / rates.steps
        self._record(
            step, figures, max_loss, garbage, rates, memory, ranks, dict(zip(layers, layer_norms, strict=True))
        )
        reset_peak(self.world.device)

    def _reduce(self, result: StepResult, mine: Sequence[torch.Tensor]) -> tuple[list[float], list[float]]:
        """Over ranks: the largest loss, each rank's own work, each one's waiting for data; and `mine`, as numbers.

        One all-reduce and one reading of the device. Every rank has a place of its own, where the others have zero.
        """
        times = torch.zeros(2, self.world.size)
        times[:, self.world.rank] = torch.tensor(self._ranks.read())
        shared = torch.cat([result.local_loss.detach().float().view(1), times.flatten().to(self.world.device)])
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        numbers: list[float] = torch.cat([shared, torch.stack(list(mine)).float()]).tolist()
        return numbers[: len(shared)], numbers[len(shared) :]

    def validation(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        logger.info(f"validation at {step}: loss {loss:.4f} over {tokens:,} tokens in {human_time(seconds)}")
        if not (self._validated and step < self._first_step):
            self._write(step, {"validation_loss": loss, "validation_tokens": tokens, "validation_seconds": seconds})

    def drift(self, step: int, drift: Float8Error) -> None:
        """What float8 changes in the loss, with the weights that this step starts from."""
        logger.info(
            f"float8 drift at {step}: loss {drift.float8:.5f}, in high precision {drift.exact:.5f}: "
            f"{drift.difference:+.1e} ({drift.relative:+.2%})"
        )
        row = {"float8_loss": drift.float8, "float8_exact_loss": drift.exact}
        self._write(step, {**row, "float8_drift": drift.difference, "float8_drift_relative": drift.relative})

    def saved(self, step: int, folder: AnyPath, seconds: float) -> None:
        logger.info(f"checkpoint of step {step} written to {folder} in {human_time(seconds)}")

    def run_ids(self) -> dict[str, str]:
        """Where the run is recorded: service → id of the run there. Rank 0 knows."""
        return {"wandb": self._tracker.run_id} if self._tracker and self._tracker.run_id else {}

    def finish(self, state: str) -> None:
        """Note the state at the end: a run that failed is closed faster."""
        self._failed = state not in ("done", "preempted")

    def close(self) -> None:
        """End what shows and writes. Of a run that failed, within two seconds: other ranks leave after three."""
        if self._view:
            self._view.close(0.3 if self._failed else 2.0)
        if self._metrics:
            self._metrics.close()
        if self._tensorboard:
            self._tensorboard.close(failed=self._failed)
        if self._tracker:
            self._tracker.close(failed=self._failed)
        self._ranks.close()
        self._garbage.close()

    def _show(self, figures: StepFigures) -> None:
        if self.plans.observe.log_style == "fsdp":
            if self.world.rank == 0:
                with suppress(OSError):  # a terminal that was closed
                    print(fsdp_line(figures, datetime.now()), flush=True)  # its readers expect the bare line
        else:
            logger.info(colorize(titan_line(figures)), extra={"figures": figures})

    def _record(
        self,
        step: int,
        figures: StepFigures,
        max_loss: float,
        garbage_seconds: float,
        rates: Rates,
        memory: MemoryReading,
        ranks: RankComparison | None,
        layer_norms: Mapping[str, float],
    ) -> None:
        row = {
            "loss": figures.loss,
            "max_loss": max_loss,
            "grad_norm": figures.norm,
            "lr": figures.lr,
            "tokens_seen": figures.tokens_seen,
            "tps": rates.tps,
            "tflops": rates.tps * self.flops_per_token / 1e12,
            "mfu": rates.mfu,
            "seconds_per_step": rates.seconds_per_step,
            "data_seconds": rates.data_seconds,
            "data_percent": rates.data_percent,
            "gc_seconds": garbage_seconds,
            "slowest_rank": None if ranks is None else ranks.slowest,
            "fastest_rank": None if ranks is None else ranks.fastest,
            "lag_seconds": None if ranks is None else ranks.lag_seconds,
            "lag_percent": None if ranks is None else ranks.lag_percent,
            "memory_gib": memory.gib,
            "memory_percent": memory.percent,
            "reserved_gib": memory.reserved_gib,
            "reserved_percent": memory.reserved_percent,
            "alloc_retries": memory.alloc_retries,
            "ooms": memory.ooms,
            **{f"grad_norm/{layer}": value for layer, value in layer_norms.items()},
        }
        self._write(step, {name: value for name, value in row.items() if value is not None})

    def _write(self, step: int, row: dict[str, float | int]) -> None:
        if self._metrics:
            self._metrics.write({"step": step, "time": time.time(), **row})
        for board in (self._tensorboard, self._tracker):
            if board:
                board.write(step, tags(row))


def _keep_earlier(path: Path) -> None:
    """A new run in the folder of an earlier one: its metrics are renamed, never mixed with or lost to ours."""
    if path.exists() and path.stat().st_size:
        kept = next(p for i in range(1, 10**6) if not (p := path.with_name(f"metrics-{i}.jsonl")).exists())
        path.rename(kept)
        logger.info(f"the metrics of an earlier run are kept as {kept}")
