"""The callbacks of a run, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titanlite.assembly.datasets import Datasets
from titanlite.assembly.report_rows import report_lines
from titanlite.assembly.start_report import SkippedText, StartReport
from titanlite.callbacks import Callback
from titanlite.data.text_report import checks_of
from titanlite.metrics.dead_weights import DeadWeights
from titanlite.metrics.observer import MetricsLogger
from titanlite.metrics.run_callbacks import (
    AttemptRecord,
    CompileReport,
    GarbageCollection,
    Timeouts,
    Watchdog,
)
from titanlite.metrics.throughput import Throughput, device_name
from titanlite.metrics.watchdog import HangWatchdog
from titanlite.run.config import RunConfig
from titanlite.runs.provenance import public_config

if TYPE_CHECKING:
    from titanlite.assembly.build import TrainingComponents
    from titanlite.metrics.samples import PromptSampler
    from titanlite.trainer import Trainer


def build_callbacks(
    parts: TrainingComponents,
    watchdog: HangWatchdog | None,
    sampler: PromptSampler | None,
    own: Sequence[Callback],
) -> tuple[list[Callback], Callable[[], dict[str, str]]]:
    """Return every callback of a run, in order, and a function that names the run at its services.

    watchdog: entered by the caller. sampler: of `prompt_sampler`. own: those of the user.
    """
    run = parts.run
    gc = GarbageCollection(run.training.gc_freq)
    attempts = AttemptRecord(
        Path(run.job.dump_folder),
        run.toml,
        run.job.description,
        device_name(parts.world.device),
        watchdog,
    )
    figures = _figures(parts)
    metrics = _metrics(parts, gc, figures)
    if sampler is not None:
        sampler.show = metrics.write_texts
    tasks = run.features.tasks
    hub = run.features.hub
    # The watchdog is first: other ranks wait for it.
    every: list[Callback | None] = [
        Watchdog(
            watchdog or HangWatchdog(run.stall, run.comm, end=None), entered=watchdog is not None
        ),
        _timeouts(parts),
        _token_hashes(parts),
        gc,
        attempts,
        parts.average,
        _start_report(parts, attempts),
        # Before the metrics, which begin a new peak.
        _peak_check(parts),
        *figures,
        metrics,
        DeadWeights(),
        _equal_replicas(parts),
        _compile_report(parts),
        _float8_error(parts, metrics),
        _profiler(parts),
        _verify_resume(parts),
        _document_log(parts),
        sampler,
        *own,
        # The last: an evaluation may end with the save of a run.
        tasks.begin(parts, metrics.write) if tasks else None,
        # It waits at the end.
        hub.callback(parts) if hub else None,
    ]
    return [callback for callback in every if callback is not None], metrics.run_ids


def prompt_sampler(run: RunConfig, datasets: Datasets) -> PromptSampler | None:
    """Return what samples prompts during training; None without prompts. Raises ConfigError."""
    if not run.sample.prompts:
        return None
    from titanlite.metrics.samples import PromptSampler

    longest = run.model_args(datasets.tokenizer.vocab_size).max_seq_len // run.mesh.context
    folder = Path(run.job.dump_folder)
    return PromptSampler(run.sample, datasets.tokenizer, longest, run.mesh.tensor, folder)


def _figures(parts: TrainingComponents) -> list[Any]:
    """Return the callbacks whose figures are sums over all ranks: of sources, of experts."""
    run = parts.run
    found: list[Any] = []
    if run.data.source:
        from titanlite.data.mixtures.figures import SourceFigures

        model = parts.model_parts
        share = parts.loaders.share
        found.append(SourceFigures(parts.datasets.train, model.loss, share, model.factors))
    moe_layers = parts.model_parts.moe_layers
    if moe_layers is not None:
        found.append(moe_layers.figures(run.spec, parts.model, parts.world.device))
    return found


def _metrics(
    parts: TrainingComponents, gc: GarbageCollection, figures: Sequence[Any]
) -> MetricsLogger:
    run = parts.run
    meter = Throughput(
        run.batch.tokens_per_step,
        run.batch.global_batch_size,
        parts.world.size,
        run.flops_per_token(parts.args, run.batch.seq_len),
        _peak_flops(parts),
    )
    for batch in run.legs.values():
        flops = run.flops_per_token(parts.args, batch.seq_len)
        meter.flops_by_length[batch.seq_len] = flops
    toml = public_config(run.toml)
    return MetricsLogger(run.metrics, run.job, parts.world, toml, meter, gc.read, figures)


def _peak_flops(parts: TrainingComponents) -> float | None:
    """Return the FLOPS that the device can do: those given, or of a known one; else None."""
    tflops = parts.run.metrics.peak_tflops
    if tflops:
        return tflops * 1e12
    if parts.world.device.type != "cuda":
        return None
    from titanlite.plan.hardware import peak_flops

    return peak_flops(device_name(parts.world.device))


def _timeouts(parts: TrainingComponents) -> Callback | None:
    if not parts.world.timeout:
        return None
    comm = parts.run.comm
    return Timeouts(comm.init_timeout_seconds, comm.train_timeout_seconds)


def _equal_replicas(parts: TrainingComponents) -> Callback | None:
    if parts.world.size == 1:
        return None
    from titanlite.metrics.replicas import EqualReplicas

    return EqualReplicas()


def _token_hashes(parts: TrainingComponents) -> Callback | None:
    checks = checks_of([parts.datasets.train, *parts.datasets.validation.values()])
    if not checks:
        return None
    from titanlite.data.token_hashes import TokenHashes

    return TokenHashes(checks)


def _start_report(parts: TrainingComponents, attempts: AttemptRecord) -> Callback:
    run = parts.run
    peak = _peak_flops(parts)

    def lines(trainer: Trainer) -> list[str]:
        return report_lines(parts, trainer.steps, peak)

    in_epochs = run.training.epochs is not None
    skip = SkippedText(parts.loaders.skip, run.course)
    lora = run.features.lora
    if lora is None:
        return StartReport(lines, run.checkpoint, skip, attempts, in_epochs)
    section = lora.checkpoint(run.checkpoint)
    return StartReport(lines, section, skip, attempts, in_epochs, lora.source_key)


def _peak_check(parts: TrainingComponents) -> Callback | None:
    if parts.world.device.type != "cuda":
        return None
    from titanlite.plan.memory import with_vocabulary
    from titanlite.plan.peak import PeakCheck

    planned = with_vocabulary(parts.run, parts.datasets.tokenizer.vocab_size)
    return PeakCheck(planned, torch.cuda.max_memory_allocated)


def _compile_report(parts: TrainingComponents) -> Callback | None:
    if not parts.run.training.compile:
        return None
    from titanlite.parallel.compile import watch_compilation

    watch = watch_compilation(parts.model_parts.builder, parts.model)
    return None if watch is None else CompileReport(watch)


def _float8_error(parts: TrainingComponents, metrics: MetricsLogger) -> Callback | None:
    float8 = parts.run.features.float8
    if float8 is None:
        return None
    return float8.drift_check(parts.model_parts.builder.param_dtype, metrics.write)


def _profiler(parts: TrainingComponents) -> Callback | None:
    section = parts.run.profiling
    if not (section.enable_profiling or section.enable_memory_snapshot):
        return None
    from titanlite.metrics.profiler import Profiler

    return Profiler(section, parts.world.rank, parts.world.device)


def _verify_resume(parts: TrainingComponents) -> Callback | None:
    """Return the check of a resumed run; None where checkpoints are off."""
    if parts.saves is None:
        return None
    from titanlite.checkpoint.verify_resume import VerifyResume

    config = public_config(parts.run.toml)
    return VerifyResume(config, parts.loaders.skip, parts.loaders.share)


def _document_log(parts: TrainingComponents) -> Callback | None:
    run = parts.run
    if not run.data.log_documents:
        return None
    from titanlite.config.urls import public_name
    from titanlite.metrics.document_log import DocumentLog

    rows = parts.datasets.train
    rank, ranks = parts.loaders.share
    # No rank has read the other ranks' part of a stream: each writes its own.
    part = (rank, ranks) if rows.lanes is not None else None
    leads = all(parts.mesh.get_local_rank(name) == 0 for name in ("pp", "cp", "tp"))
    path = None
    if leads and (rank == 0 or part is not None):
        name = "documents.jsonl" if rank == 0 else f"documents-rank_{rank}.jsonl"
        path = Path(run.job.dump_folder) / name
    text = public_name(run.training.dataset_path or run.training.dataset)
    return DocumentLog(path, rows, text, part)
