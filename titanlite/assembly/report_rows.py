"""The rows of the start report: what follows from several keys, from the model or from the text.

`config.toml` in the run's folder has the keys themselves.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from titanlite import __version__
from titanlite.assembly.tested_machines import accelerator_warning
from titanlite.config.dataset_registry import BUNDLED_TOKENIZER_NAME
from titanlite.config.decays import DECAYS
from titanlite.config.urls import public_name
from titanlite.data.text_report import file_lines, file_warnings, pass_warnings
from titanlite.metrics.throughput import device_name, total_memory_bytes
from titanlite.optim.schedule import Schedule
from titanlite.run.config import BatchSizes, MeshSizes, RunConfig
from titanlite.run.features import Row
from titanlite.run.length import with_steps
from titanlite.utils import counted, human_bytes, human_count, public

if TYPE_CHECKING:
    from torch import nn

    from titanlite.assembly.build import TrainingComponents
    from titanlite.data.rows import Rows

#: Prefix of a line for level WARNING.
WARNING = "warning: "
#: Names of rows that come last, as `note: text` and `warning: text`.
_LAST = ("note", "warning")


def report_lines(parts: TrainingComponents, steps: int, peak: float | None) -> list[str]:
    """Return the lines of the start report, then those of `note:` and `warning:`.

    `peak` is the FLOPS of one device, if known.
    """
    run = with_steps(parts.run, steps)
    rows = [*_rows(parts, run, peak)]
    rows += [("warning" if note.warns else "note", note.text) for note in run.notes]
    name = public_name(run.training.dataset_path or run.training.dataset)
    datasets = parts.datasets
    warnings = [*filter(None, [accelerator_warning()])]
    warnings += file_warnings(datasets.train, name)
    for title, held_out in datasets.validation.items():
        warnings += file_warnings(held_out, f"validation {title}".strip())
    if run.steps is not None:
        warnings += pass_warnings(datasets.train, name, run.course.position_after(run.steps))
    rows += [("warning", warning) for warning in warnings]
    width = max(len(name) for name, _ in rows if name not in _LAST)
    lines = [f"{name:<{width}}  {text}" for name, text in rows if name not in _LAST]
    for kind in _LAST:
        lines += [f"{kind}: {text}" for name, text in rows if name == kind]
    return lines


def _rows(parts: TrainingComponents, run: RunConfig, peak: float | None) -> Iterator[Row]:
    builder = parts.model_parts.builder
    device = device_name(builder.device)
    train = parts.datasets.train
    if run.job.description:
        yield "run", run.job.description
    python = platform.python_version()
    yield "versions", f"titanlite {__version__}, torch {torch.__version__}, python {python}"
    yield "model", f"{run.model.title}: {parameters_text(builder.spec.build_on_meta(builder.args))}"
    yield "tokenizer", _tokenizer(parts, run)
    flops = run.flops_per_token(builder.args, run.batch.seq_len)
    mfu = ""
    if peak is not None:
        mfu = f"; MFU against {peak / 1e12:,.4g} TFLOPS per device"
        if run.float8.enable_float8_linear and run.metrics.peak_tflops is None:
            mfu += ", its peak in bf16"
    yield "compute", f"{flops / 1e9:,.4g} GFLOPs per token, forward and backward{mfu}"
    memory = human_bytes(total_memory_bytes(builder.device))
    if builder.device.type == "cpu":
        threads = counted(torch.get_num_threads(), "threads")
        text = f"{run.mesh.world_size} x {device}, {memory} of memory, shared, {threads} each"
        yield "devices", text
    else:
        yield "devices", f"{run.mesh.world_size} x {device}, {memory} each"
        if peak is None:
            unknown = f"no MFU is shown: the peak of {device} is not known here"
            yield "note", f"{unknown}; metrics.peak_tflops sets it"
    yield "mesh", mesh_text(run.mesh)
    for feature in run.features.on:
        yield from feature.report_rows(builder, parts.model)
    yield "data", _data(run, train)
    for name, rows in {"": train, **parts.datasets.validation}.items():
        title = "" if rows is train else f"validation {name}".strip()
        if rows is not train:
            held_out = name or run.validation.dataset_path or run.validation.dataset
            yield "validation", f"{held_out}: {rows.describe()}"
        yield from (("files", line) for line in file_lines(rows, title))
    yield "global batch", batch_text(run.batch, run.mesh)
    yield "length", length_text(run, train.tokens_per_epoch)
    yield "optimizer", f"{run.optimizer.name}, {run.training.dtype} weights"
    floor = max(run.schedule.min_lr_factor * run.optimizer.peak_lr, run.schedule.min_lr or 0.0)
    yield "schedule", schedule_text(run.schedule, floor)


def parameters_text(model: nn.Module) -> str:
    """Return the parameters by top-level module; a tied weight counts once."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        top = name.partition(".")[0]
        counts[top] = counts.get(top, 0) + parameter.numel()
    total = sum(counts.values())
    parts = ", ".join(f"{module} {count:,}" for module, count in counts.items())
    return f"{total:,} parameters ({human_count(total)}): {parts}"


def _tokenizer(parts: TrainingComponents, run: RunConfig) -> str:
    from titanlite.data.tokenizer.load_local import tokenizer_path

    bundled = ""
    if run.model.tokenizer_path == BUNDLED_TOKENIZER_NAME:
        bundled = ", bundled with titanlite"
    path = public(tokenizer_path(run.model.tokenizer_path, run.model.name))
    return f"{path}: {parts.datasets.tokenizer.vocab_size:,} ids{bundled}"


def mesh_text(mesh: MeshSizes) -> str:
    """Return the degrees of data parallelism, and others above 1."""
    shown = []
    for name, degree in mesh.dimensions.items():
        if degree > 1 or name.startswith("dp_"):
            shown.append(f"{name} {degree}")
    shared = f"; {mesh.expert} ranks divide the experts" if mesh.expert > 1 else ""
    return f"{' x '.join(shown)} = {counted(mesh.world_size, 'ranks')}{shared}"


def _data(run: RunConfig, train: Rows) -> str:
    name = run.training.dataset_path or run.training.dataset
    if run.data.source:
        name = f"{len(run.data.source)} sources"
    order = f"shuffled with seed {run.data.seed}" if run.data.shuffle else "in file order"
    masks = ", attention within documents" if run.data.mask_documents else ""
    return f"{name}: {train.describe()}, {order}{masks}"


def batch_text(batch: BatchSizes, mesh: MeshSizes) -> str:
    """Return the size of a step, and how it is made."""
    return (
        f"{counted(batch.global_batch_size, 'sequences')} x {batch.seq_len:,} tokens = "
        f"{batch.tokens_per_step:,} tokens per step; {batch.micro_batch_size} per micro-batch x "
        f"{counted(batch.accumulation, 'micro-batches')} x "
        f"{counted(mesh.dp_degree, 'data-parallel ranks')}"
    )


def length_text(run: RunConfig, epoch: int | None) -> str:
    """Return a run's length; `epoch` counts the text's tokens, if known."""
    text = f"{counted(run.steps or 0, 'steps')}, {run.tokens:,} tokens"
    if epoch and run.tokens:
        passes = f"{run.tokens / epoch:.3g}"
        text += f" = {passes} epoch{'s' * (passes != '1')}"
    return text


def schedule_text(schedule: Schedule, floor: float) -> str:
    """Return the parts of a schedule; `floor` is the decay's lowest learning rate."""
    unit = schedule.unit
    parts = [f"warm-up {counted(schedule.warmup_steps, unit)}"]
    if schedule.plateau_steps:
        parts.append(f"plateau {counted(schedule.plateau_steps, unit)}")
    over = ""
    if schedule.decay_steps is not None:
        over = f" over the last {counted(schedule.decay_steps, unit)}"
    kind = schedule.decay_type
    ends = f"{kind} decay{over} to {floor:g}"
    parts.append(ends if DECAYS[kind].has_end else f"then {kind}")
    if schedule.total_steps is not None:
        parts.append(f"{counted(schedule.total_steps, unit)} in all")
    return ", ".join(parts)
