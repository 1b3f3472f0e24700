"""The callbacks of a run, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.assembly.start_report import StartReport
from titanlite.callbacks import Callback, Figures
from titanlite.data.text_report import checks_of
from titanlite.metrics.housekeeping import (
    AttemptRecord,
    GarbageCollection,
    Watchdog,
)
from titanlite.metrics.metrics_logger import MetricsLogger
from titanlite.metrics.phase_tracker import Position
from titanlite.metrics.throughput import Throughput, device_name
from titanlite.runs import PREDICTION
from titanlite.runs.provenance import public_config

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents


def build_callbacks(
    parts: TrainingComponents, watchdog: Position | None, own: Sequence[Callback]
) -> tuple[list[Callback], Callable[[], dict[str, str]]]:
    """Return every callback of a run, in order, and what names the run at its services.

    The caller enters `watchdog`.
    """
    run, world = parts.run, parts.world
    watch = watchdog or Position()
    if watchdog is None and world.size > 1:
        from titanlite.metrics.watchdog import HangWatchdog

        watch = HangWatchdog(run.stall, run.comm, end=None)
    every: list[Any] = [Watchdog(watch, entered=watchdog is not None)]
    if world.timeout and world.size > 1:
        from titanlite.metrics.timeouts import Timeouts

        every.append(Timeouts(run.comm.init_timeout_seconds, run.comm.train_timeout_seconds))
    checks = checks_of([parts.datasets.train, *parts.datasets.validation.values()])
    if checks:
        from titanlite.data.damaged_tokens_callback import TokenHashes

        every.append(TokenHashes(checks))
    garbage = GarbageCollection(run.training.gc_freq)
    folder, device = Path(run.job.dump_folder), device_name(world.device)
    attempts = AttemptRecord(folder, run.toml, run.job.description, device, watchdog)
    every += [garbage, attempts]
    if parts.average is not None:
        every.append(parts.average)
    peak = _peak_flops(parts, device)
    metrics = _metrics(parts, garbage, peak)
    every += [StartReport(parts, peak, attempts), metrics, *_figures(parts)]
    if world.device.type == "cuda" or (folder / PREDICTION).exists():
        from titanlite.assembly.prediction_callback import KeptPrediction

        every.append(KeptPrediction(parts, attempts, metrics))
    if world.size > 1:
        from titanlite.metrics.replicas import EqualReplicas

        every.append(EqualReplicas())
    if run.training.compile:
        from titanlite.metrics.compile_report import CompileReport
        from titanlite.parallel.compile import CompileWatch

        every.append(CompileReport(CompileWatch(run.compile.backend)))
    if run.profiling.enable_profiling or run.profiling.enable_memory_snapshot:
        from titanlite.metrics.profiler import Profiler

        every.append(Profiler(run.profiling, world.rank, world.device))
    if parts.saves is not None:
        from titanlite.checkpoint.verify_resume import VerifyResume

        every.append(VerifyResume(public_config(run.toml), parts.loaders.skip, parts.loaders.share))
    every += own
    for feature in run.features.on:
        every += feature.callbacks(parts, metrics.write)
    # What figures count at the end of a step is in the log of this step.
    place = every.index(metrics)
    every[place:] = sorted(every[place:], key=lambda one: not isinstance(one, Figures))
    return every, metrics.run_ids


def _figures(parts: TrainingComponents) -> Iterator[Figures]:
    """Yield the figures that keys or the model switch on."""
    moe = parts.model_parts.moe_layers
    if moe is not None:
        yield moe.figures(parts.run.spec, parts.model, parts.world.device)


def _metrics(
    parts: TrainingComponents, garbage: GarbageCollection, peak: float | None
) -> MetricsLogger:
    run = parts.run
    flops = {run.batch.seq_len: run.flops_per_token(parts.args, run.batch.seq_len)}
    for phase in run.data.phase:
        # A resume may have legs that the run from its start does not have.
        if phase.seq_len is not None:
            flops[phase.seq_len] = run.flops_per_token(parts.args, phase.seq_len)
    meter = Throughput(parts.world.size, flops, peak)
    toml = public_config(run.toml)
    return MetricsLogger(run.metrics, run.job, parts.world, toml, meter, garbage.read)


def _peak_flops(parts: TrainingComponents, device: str) -> float | None:
    tflops = parts.run.metrics.peak_tflops
    if tflops:
        return tflops * 1e12
    if parts.world.device.type != "cuda":
        return None
    from titanlite.plan.hardware import peak_flops

    return peak_flops(device)
