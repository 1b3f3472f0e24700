"""What a run shows and writes while it goes on: the start report, step lines, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.plans import Plans
from titanlite.models.shapes import flops_per_token
from titanlite.observe.console import colorize, logger
from titanlite.observe.flops import device_name, peak_flops
from titanlite.observe.memory import MemoryReading, read_memory, reset_peak
from titanlite.observe.meter import Meter, Rates
from titanlite.observe.metrics import FILE, MetricsLog
from titanlite.observe.stepline import StepFigures, fsdp_line, human_time, titan_line
from titanlite.observe.tensorboard import TAGS, TensorBoard
from titanlite.parallel.world import World
from titanlite.runs.folder import FinalState, RunRecord, begin
from titanlite.step import StepResult


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
        self.meter = Meter(
            plans.batch.tokens_per_step,
            plans.batch.global_batch_size,
            world.size,
            self.flops_per_token,
            self.peak,
            plans.train.steps,
        )
        self._metrics: MetricsLog | None = None
        self._tensorboard: TensorBoard | None = None
        self._run: RunRecord | None = None
        self._first_step = 1

    def start(self, step: int, report: Sequence[str]) -> None:
        """Say what will run, and continue (or begin) the records at `step` steps done."""
        for line in report:
            logger.info(line)
        self._first_step = step + 1
        plan = self.plans.observe
        if self.world.rank == 0:
            path = Path(plan.dump_folder) / FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            if step == 0:
                _keep_earlier(path)
            self._metrics = MetricsLog(path)
            self._metrics.truncate_after(step)
            self._run = begin(
                path.parent,
                self.plans,
                world_size=self.world.size,
                device=device_name(self.world.device),
                first_step=step,
            )
        if plan.tensorboard_folder and (self.world.rank == 0 or not plan.rank_0_only):
            folder = Path(plan.tensorboard_folder)
            folder = folder if plan.rank_0_only else folder / f"rank_{self.world.rank}"
            self._tensorboard = TensorBoard(folder, purge_step=step + 1)
        reset_peak(self.world.device)
        self.meter.start()

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Time spent inside is reported as waiting for data."""
        return self.meter.data_wait()

    def pausing(self) -> AbstractContextManager[None]:
        """Time spent inside (validation, saving) does not count as training."""
        return self.meter.pause()

    def step(self, step: int, result: StepResult, lr: float, tokens_seen: int) -> None:
        """After every step; on the first, the last and every `log_freq` steps the figures are read and shown."""
        self.meter.step_done()
        if step % self.plans.observe.log_freq and step not in (self._first_step, self.plans.train.steps):
            return
        largest = result.local_loss.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        loss, norm, max_loss = torch.stack([result.loss, result.norm, largest]).tolist()
        rates = self.meter.read(step)
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
        self._record(step, figures, max_loss, rates, memory)
        reset_peak(self.world.device)

    def validation(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        logger.info(f"validation at {step}: loss {loss:.4f} over {tokens:,} tokens in {human_time(seconds)}")
        self._write(step, {"validation_loss": loss, "validation_tokens": tokens, "validation_seconds": seconds})

    def saved(self, step: int, folder: Path, seconds: float) -> None:
        logger.info(f"checkpoint of step {step} written to {folder} in {human_time(seconds)}")

    def finish(self, state: FinalState, step: int, reason: str = "") -> None:
        """Record how the run ended, after `step` steps. The first call counts."""
        if self._run:
            self._run.finish(state, step, reason)

    def close(self) -> None:
        if self._metrics:
            self._metrics.close()
        if self._tensorboard:
            self._tensorboard.close()

    def _show(self, figures: StepFigures) -> None:
        if self.plans.observe.log_style == "fsdp":
            if self.world.rank == 0:
                print(fsdp_line(figures, datetime.now()), flush=True)  # its readers expect the bare line
        else:
            logger.info(colorize(titan_line(figures)))

    def _record(self, step: int, figures: StepFigures, max_loss: float, rates: Rates, memory: MemoryReading) -> None:
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
            "memory_gib": memory.gib,
            "memory_percent": memory.percent,
            "reserved_gib": memory.reserved_gib,
            "reserved_percent": memory.reserved_percent,
            "alloc_retries": memory.alloc_retries,
            "ooms": memory.ooms,
        }
        self._write(step, {name: value for name, value in row.items() if value is not None})

    def _write(self, step: int, row: dict[str, float | int]) -> None:
        if self._metrics:
            self._metrics.write({"step": step, "time": time.time(), **row})
        if self._tensorboard:
            self._tensorboard.write(step, {TAGS[name]: value for name, value in row.items() if name in TAGS})


def _keep_earlier(path: Path) -> None:
    """A new run in the folder of an earlier one: its metrics are renamed, never mixed with or lost to ours."""
    if path.exists() and path.stat().st_size:
        kept = next(p for i in range(1, 10**6) if not (p := path.with_name(f"metrics-{i}.jsonl")).exists())
        path.rename(kept)
        logger.info(f"the metrics of an earlier run are kept as {kept}")
