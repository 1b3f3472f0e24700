"""The callbacks of a run, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.assembly.start_report import StartReport
from titanlite.callbacks import Callback
from titanlite.data.text_report import checks_of
from titanlite.metrics.observer import MetricsLogger
from titanlite.metrics.position import Position
from titanlite.metrics.run_callbacks import (
    AttemptRecord,
    GarbageCollection,
    Watchdog,
)
from titanlite.metrics.throughput import Throughput, device_name
from titanlite.runs.provenance import public_config

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents


def build_callbacks(
    parts: TrainingComponents,
    watchdog: Position | None,
    own: Sequence[Callback],
) -> tuple[list[Callback], Callable[[], dict[str, str]]]:
    """Return every callback of a run, in order, and a function that names the run at its services.

    The caller enters `watchdog`.
    """
    run = parts.run
    gc = GarbageCollection(run.training.gc_freq)
    figures = _figures(parts)
    metrics = _metrics(parts, gc, figures)
    every = [*_first(parts, watchdog), gc, *_of_attempt(parts, watchdog)]
    every += [*figures, metrics, *_optional(parts, metrics)]
    every += own
    for feature in run.features.on:
        every += feature.callbacks(parts, metrics.write)
    return every, metrics.run_ids


def _first(parts: TrainingComponents, watchdog: Position | None) -> Iterator[Callback]:
    run = parts.run
    watch = watchdog
    if watch is None and parts.world.size > 1:
        from titanlite.metrics.watchdog import HangWatchdog

        watch = HangWatchdog(run.stall, run.comm, end=None)
    yield Watchdog(watch or Position(), entered=watchdog is not None)
    if parts.world.timeout and parts.world.size > 1:
        from titanlite.metrics.timeouts import Timeouts

        yield Timeouts(run.comm.init_timeout_seconds, run.comm.train_timeout_seconds)
    checks = checks_of([parts.datasets.train, *parts.datasets.validation.values()])
    if checks:
        from titanlite.data.token_hashes import TokenHashes

        yield TokenHashes(checks)


def _of_attempt(parts: TrainingComponents, watchdog: Position | None) -> Iterator[Callback]:
    run = parts.run
    folder = Path(run.job.dump_folder)
    device = device_name(parts.world.device)
    attempts = AttemptRecord(folder, run.toml, run.job.description, device, watchdog)
    yield attempts
    if parts.average is not None:
        yield parts.average
    yield StartReport(parts, _peak_flops(parts), attempts)


def _optional(parts: TrainingComponents, metrics: MetricsLogger) -> Iterator[Callback]:
    run = parts.run
    if run.training.compile:
        from titanlite.metrics.compile_report import CompileReport
        from titanlite.parallel.compile import CompileWatch

        yield CompileReport(CompileWatch(run.compile.backend))
    if run.profiling.enable_profiling or run.profiling.enable_memory_snapshot:
        from titanlite.metrics.profiler import Profiler

        yield Profiler(run.profiling, parts.world.rank, parts.world.device)
    if parts.saves is not None:
        from titanlite.checkpoint.verify_resume import VerifyResume

        config = public_config(run.toml)
        yield VerifyResume(config, parts.loaders.skip, parts.loaders.share)


def _figures(parts: TrainingComponents) -> list[Any]:
    run = parts.run
    found: list[Any] = []
    moe_layers = parts.model_parts.moe_layers
    if moe_layers is not None:
        found.append(moe_layers.figures(run.spec, parts.model, parts.world.device))
    return found


def _metrics(
    parts: TrainingComponents, gc: GarbageCollection, figures: Sequence[Any]
) -> MetricsLogger:
    run = parts.run
    flops = {run.batch.seq_len: run.flops_per_token(parts.args, run.batch.seq_len)}
    for phase in run.data.phase:
        # A resume may have legs that the run from its start does not have.
        if phase.seq_len is not None:
            flops[phase.seq_len] = run.flops_per_token(parts.args, phase.seq_len)
    meter = Throughput(parts.world.size, flops, _peak_flops(parts))
    toml = public_config(run.toml)
    return MetricsLogger(run.metrics, run.job, parts.world, toml, meter, gc.read, figures)


def _peak_flops(parts: TrainingComponents) -> float | None:
    tflops = parts.run.metrics.peak_tflops
    if tflops:
        return tflops * 1e12
    if parts.world.device.type != "cuda":
        return None
    from titanlite.plan.hardware import peak_flops

    return peak_flops(device_name(parts.world.device))
