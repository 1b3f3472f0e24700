"""The start report: what will run, from where it continues, and what changed since the attempt
before.

Rows are what follows from several keys, from the model or from the text. `config.toml` in the run's
folder has the keys themselves. Each `*_row` function returns (name, text) of one subject, `*_rows`
a list of them.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from titanlite import __version__
from titanlite.assembly.datasets import Datasets
from titanlite.assembly.supported import accelerator_warning
from titanlite.config.data_sections import Data
from titanlite.config.model_sections import Model, Optimizer
from titanlite.config.run_sections import Metrics
from titanlite.config.sections import ActivationCheckpoint, Training
from titanlite.config.text_names import BUNDLED_TOKENIZER_NAME
from titanlite.config.urls import public_name
from titanlite.data.rows import Rows
from titanlite.data.text_report import file_lines, file_warnings, pass_warnings
from titanlite.metrics.throughput import device_name, total_memory_bytes
from titanlite.optim.schedule import Schedule
from titanlite.optim.state_bytes import state_bytes
from titanlite.parallel.fsdp import DTYPES
from titanlite.run.config import MeshSizes, RunConfig
from titanlite.run.interactions import is_below_bf16
from titanlite.run.length import with_steps
from titanlite.utils import counted, human_bytes, human_count, public

if TYPE_CHECKING:
    from torch import nn

    from titanlite.assembly.build import TrainingComponents
    from titanlite.plan.memory import KeptActivations

Row = tuple[str, str]

#: Prefix of a line for level WARNING.
WARNING = "warning: "
#: Names of rows that come last, as `note: text` and `warning: text`.
_LAST = ("note", "warning")
#: Prefixes of notes of the config whose numbers rows of the report show already.
_SHOWN = ("global batch = ", "accumulation = ", "tokens per step = ", "data_parallel_shard = ")
_NO_OFFLOAD = "offload has no effect on a CPU"


@dataclass(frozen=True)
class Setup:
    """Numbers of a run that follow from several sections, the ranks, the model and the text."""

    #: From `titanlite.metrics.throughput.device_name`.
    device: str
    cpu: bool
    mesh: MeshSizes
    #: Count by top-level module, over all ranks.
    parameters: Mapping[str, int]
    #: Sequences of a micro-batch of one rank, and micro-batches per step.
    micro_batch: int
    accumulation: int
    seq_len: int
    #: Tokens of a matrix product of one rank.
    tokens: int
    #: Size of the training text in words, and its tokens; None for a stream.
    text: str
    tokens_per_epoch: int | None
    #: Parameters that are trained; None: all.
    trained: int | None = None

    @property
    def sequences(self) -> int:
        return self.micro_batch * self.accumulation * self.mesh.dp_degree


def startup_report(rows: Sequence[Row]) -> list[str]:
    """Return aligned lines `name  text`, then `note:` and `warning:` lines."""
    width = max(len(name) for name, _ in rows if name not in _LAST)
    lines = [f"{name:<{width}}  {text}" for name, text in rows if name not in _LAST]
    for kind in _LAST:
        for name, text in rows:
            if name == kind and not text.startswith(_SHOWN):
                lines.append(f"{kind}: {text}")
    return lines


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Return parameters by top-level module, in order; a tied weight counts once."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        top = name.split(".")[0]
        counts[top] = counts.get(top, 0) + parameter.numel()
    return counts


def model_rows(model: Model, setup: Setup) -> list[Row]:
    """Return the rows of the model and its parameters by module."""
    total = sum(setup.parameters.values())
    parts = ", ".join(f"{module} {count:,}" for module, count in setup.parameters.items())
    return [
        ("model", f"{model.title}: {total:,} parameters ({human_count(total)})"),
        ("parameters", parts),
    ]


def tokenizer_row(model: Model, ids: int) -> Row:
    """Return the row of the tokenizer's file and size."""
    from titanlite.data.tokenizer.local import tokenizer_path

    bundled = ", bundled with titanlite" if model.tokenizer_path == BUNDLED_TOKENIZER_NAME else ""
    path = public(tokenizer_path(model.tokenizer_path, model.name))
    return "tokenizer", f"{path}: {ids:,} ids{bundled}"


def compute_rows(
    metrics: Metrics,
    is_below_bf16: bool,
    setup: Setup,
    flops: int,
    peak: float | None,
    memory: int,
) -> list[Row]:
    """flops: per token. peak, memory: FLOPS (None where unknown) and bytes of one device."""
    mfu = ""
    if peak is not None:
        mfu = f"; MFU against {peak / 1e12:,.4g} TFLOPS per device"
        if is_below_bf16 and metrics.peak_tflops is None:
            mfu += ", its peak in bf16"
        elif is_below_bf16:
            mfu += " (metrics.peak_tflops)"
    each = f"{human_bytes(memory)} each"
    if setup.cpu:
        each = f"{human_bytes(memory)} of memory, shared"
    rows = [
        ("compute", f"{flops / 1e9:,.4g} GFLOPs per token, forward and backward{mfu}"),
        ("devices", f"{setup.mesh.world_size} x {setup.device}, {each}"),
    ]
    if peak is None and not setup.cpu:
        text = (
            f"no MFU is shown: the peak of {setup.device} is not known here; metrics.peak_tflops "
            "sets it"
        )
        rows.append(("note", text))
    return rows


def mesh_row(mesh: MeshSizes) -> Row:
    """Return the row of the degrees: those of data parallelism, and others above 1."""
    # The two of data parallelism are always shown: they divide a batch.
    shown = []
    for name, degree in mesh.dimensions.items():
        if degree > 1 or name.startswith("dp_"):
            shown.append(f"{name} {degree}")
    shared = f"; {mesh.expert} ranks divide the experts" if mesh.expert > 1 else ""
    return "mesh", f"{' x '.join(shown)} = {counted(mesh.world_size, 'ranks')}{shared}"


def sharding_rows(training: Training, setup: Setup) -> list[Row]:
    """Return memory that sharding does not divide, and what offload moves; nothing if there is
    neither.
    """
    parts = []
    total = sum(setup.parameters.values()) if setup.trained is None else setup.trained
    if setup.mesh.weight_shards > 1 and setup.accumulation > 1 and training.gradient_sync == "last":
        width = 4 if training.mixed_precision_reduce == "float32" else 2
        parts.append(
            f"whole gradients kept until the last micro-batch: {width} bytes x {total:,} "
            f"parameters = {human_bytes(width * total)} per rank (training.gradient_sync)"
        )
    if training.enable_cpu_offload:
        away = "parameters, gradients and optimizer state in host memory"
        parts.append(_NO_OFFLOAD if setup.cpu else away)
    if not parts:
        return []
    return [("sharding", "; ".join(parts))]


def activations_row(config: ActivationCheckpoint, kept: KeptActivations, setup: Setup) -> Row:
    """kept: by the plan."""
    amount = f"{human_bytes(kept.kept)} of {human_bytes(kept.plain)} kept per micro-batch"
    count = kept.operators
    repeated = _operators(count.repeated_products, count.products, count.repeats_attention)
    if config.mode == "budget":
        text = f"the compiler keeps {config.memory_budget:.0%} of what it would by itself"
    elif config.by_op:
        saved = _operators(count.saved_products, count.products, count.saves_attention)
        text = f"by operation: each block saves {saved} and recomputes {repeated}"
    elif kept.recomputing:
        blocks = counted(kept.blocks, "blocks")
        text = f"{kept.recomputing} of {blocks} keep only their input and recompute {repeated}"
    else:
        text = "all kept"
        amount = f"{human_bytes(kept.plain)} in {counted(kept.blocks, 'blocks')} per micro-batch"
    parts = [text, amount]
    if config.offload:
        sent = f"up to {human_bytes(kept.kept)} of that wait in host memory"
        parts.append(_NO_OFFLOAD if setup.cpu else sent)
    return "activations", "; ".join(parts)


def _operators(products: int, of: int, attention: bool) -> str:
    """Return `4 of 7 matmuls and attention`."""
    words = []
    if products:
        words.append(f"{products} of {of} matmuls")
    if attention:
        words.append("attention")
    return " and ".join(words) or "no product"


def attention_row(setup: Setup, window: int | None, dtype: str, masked: bool) -> Row:
    """window: of the model, in tokens. dtype: of products. masked: attention stops at documents."""
    limited = window is not None and window < setup.seq_len
    # As `titanlite.models.document_attention` chooses; ranks that share sequences have masks.
    varlen = (limited or masked) and (setup.cpu or dtype != "float32")
    if varlen and setup.mesh.context == 1:
        text = "kernel flash of variable lengths"
    elif setup.cpu:
        text = "kernel flash for CPUs"
    else:
        text = "the first kernel that can of cuDNN, flash, efficient, math"
    if limited:
        text += f"; each token sees {window:,}, itself and those before"
    return "attention", text


def data_row(training: Training, data: Data, setup: Setup) -> Row:
    """Return the row of the text and its order."""
    order = f"shuffled with seed {data.seed}" if data.shuffle else "in file order"
    name = (
        f"{len(data.source)} sources" if data.source else training.dataset_path or training.dataset
    )
    masks = ", attention within documents" if data.mask_documents else ""
    return "data", f"{name}: {setup.text}, {order}{masks}"


def file_rows(train: Rows, validation: Mapping[str, Rows]) -> list[Row]:
    """Return what was found for the texts, and what was passed over and why. validation: by
    name.
    """
    rows = [("files", line) for line in file_lines(train)]
    for name, held_out in validation.items():
        rows += [("files", line) for line in file_lines(held_out, f"validation {name}".strip())]
    return rows


def text_warnings(
    train: Rows, validation: Mapping[str, Rows], name: str, sequences: int | None
) -> Iterator[str]:
    """Yield what is doubtful about the texts.

    name: of a single training text. sequences: of the run.
    """
    yield from file_warnings(train, name)
    for title, held_out in validation.items():
        yield from file_warnings(held_out, f"validation {title}".strip())
    if sequences is not None:
        yield from pass_warnings(train, name, sequences)


def optimizer_rows(optimizer: Optimizer, training: Training, state: float | None) -> list[Row]:
    """state: its bytes per parameter; None where they are not known."""
    parts = [f"{optimizer.name}, {training.dtype} weights"]
    if state is not None:
        parts.append(f"{state:.3g} bytes of state per parameter")
    if optimizer.ema_decay:
        parts.append(f"4 for their average, of which a step leaves {optimizer.ema_decay:g}")
    if optimizer.early_step_in_backward:
        parts.append("updates in the backward, without clipping")
    rows = [("optimizer", ", ".join(parts))]
    if training.z_loss or training.label_smoothing:
        more = f"with label smoothing {training.label_smoothing:g} and z-loss {training.z_loss:g}"
        rows.append(("loss", f"cross-entropy {more}; the cross-entropy alone is shown"))
    return rows


def batch_rows(
    setup: Setup, steps: int | None, epochs: int | None, tokens: int | None = None
) -> list[Row]:
    """steps: length of the run; None while the text is not counted. tokens: the same; None: all
    steps are as the first.
    """
    sequences = counted(setup.sequences, "sequences")
    epoch = setup.tokens_per_epoch
    per_step = setup.sequences * setup.seq_len
    length = counted(epochs or 0, "epochs")
    if steps is not None:
        tokens = tokens or steps * per_step
        length = f"{counted(steps, 'steps')}, {tokens:,} tokens"
        if epoch:
            passes = f"{tokens / epoch:.3g}"
            epochs_in_words = "1 epoch" if passes == "1" else f"{passes} epochs"
            length += f" = {epochs_in_words}"
    return [
        (
            "global batch",
            f"{sequences} = {setup.micro_batch} per micro-batch x "
            f"{counted(setup.accumulation, 'micro-batches')} x "
            f"{counted(setup.mesh.dp_degree, 'data-parallel ranks')}",
        ),
        ("tokens per step", f"{per_step:,} = {sequences} x {setup.seq_len:,} tokens"),
        ("length", length),
    ]


def schedule_row(schedule: Schedule, floor: float) -> Row:
    """floor: lowest learning rate of the decay."""
    unit = schedule.unit
    over = ""
    if schedule.decay_steps is not None:
        over = f" over the last {counted(schedule.decay_steps, unit)}"
    parts = [f"warm-up {counted(schedule.warmup_steps, unit)}"]
    if schedule.plateau_steps:
        parts.append(f"plateau {counted(schedule.plateau_steps, unit)}")
    if schedule.decay_type == "constant":
        parts.append("then constant")
    else:
        parts.append(f"{schedule.decay_type} decay{over} to {floor:g}")
    if schedule.total_steps is not None:
        parts.append(f"{counted(schedule.total_steps, unit)} in all")
    return "schedule", ", ".join(parts)


def report_lines(parts: TrainingComponents, steps: int, peak: float | None) -> list[str]:
    """Return the lines of the start report. peak: FLOPS of one device; None: not known."""
    run = with_steps(parts.run, steps)
    datasets = parts.datasets
    builder = parts.model_parts.builder
    whole = builder.spec.build_on_meta(builder.args)
    setup = _setup(parts, run, whole)
    rows = []
    if run.job.description:
        rows.append(("run", run.job.description))
    rows += [("versions", _versions()), *model_rows(run.model, setup)]
    rows.append(tokenizer_row(run.model, datasets.tokenizer.vocab_size))
    rows += _machine_rows(parts, run, setup, peak)
    rows += sharding_rows(run.training, setup)
    rows += _memory_rows(parts, run, setup)
    rows.append(data_row(run.training, run.data, setup))
    rows += file_rows(datasets.train, datasets.validation)
    rows += batch_rows(setup, run.steps, run.training.epochs, run.tokens)
    rows += optimizer_rows(run.optimizer, run.training, _state_bytes(parts, run, whole))
    rows.append(_schedule(run))
    rows += [("note", note) for note in run.notes]
    rows += [("warning", warning) for warning in _warnings(run, datasets)]
    return startup_report(rows)


def _versions() -> str:
    return f"titanlite {__version__}, torch {torch.__version__}, python {platform.python_version()}"


def _setup(parts: TrainingComponents, run: RunConfig, whole: nn.Module) -> Setup:
    """whole: the model of all ranks, on the meta device."""
    builder = parts.model_parts.builder
    batch = run.batch
    lora = run.features.lora
    return Setup(
        device=device_name(builder.device),
        cpu=builder.device.type == "cpu",
        mesh=run.mesh,
        parameters=parameter_counts(whole),
        micro_batch=batch.micro_batch_size,
        accumulation=batch.accumulation,
        seq_len=batch.seq_len,
        # Tensor-parallel ranks gather the sequence before a product.
        tokens=run.tokens_at_once,
        text=parts.datasets.train.describe(),
        tokens_per_epoch=parts.datasets.train.tokens_per_epoch,
        trained=None if lora is None else lora.adapters(run.spec, builder.args).parameters,
    )


def _machine_rows(
    parts: TrainingComponents, run: RunConfig, setup: Setup, peak: float | None
) -> list[Row]:
    """Return rows of devices and mesh, and of what divides or changes products there."""
    builder = parts.model_parts.builder
    flops = run.flops_per_token(builder.args, run.batch.seq_len)
    memory = total_memory_bytes(builder.device)
    rows = compute_rows(run.metrics, is_below_bf16(run), setup, flops, peak, memory)
    rows.append(mesh_row(run.mesh))
    for feature in run.features.on:
        rows += feature.report_rows(setup, builder, parts.model)
    return rows


def _memory_rows(parts: TrainingComponents, run: RunConfig, setup: Setup) -> list[Row]:
    """Return rows of attention, of kept activations and of the planned peak."""
    from titanlite.plan.memory import with_vocabulary
    from titanlite.plan.start_rows import planned_activations, start_rows

    device = parts.model_parts.builder.device
    planned = with_vocabulary(parts.run, parts.datasets.tokenizer.vocab_size)
    rows = start_rows(planned, device.type, total_memory_bytes(device))
    kept = planned_activations(planned, device.type)
    if kept is None:
        return rows
    window = getattr(parts.args, "window", None)
    dtype = run.training.mixed_precision_param
    return [
        attention_row(setup, window, dtype, run.data.mask_documents),
        activations_row(run.activation_checkpoint, kept, setup),
        *rows,
    ]


def _state_bytes(parts: TrainingComponents, run: RunConfig, whole: nn.Module) -> float | None:
    parameters = dict(whole.named_parameters())
    blocks = run.spec.block_names(parts.args)
    return state_bytes(parameters, run.optimizer, DTYPES[run.training.dtype], blocks)


def _schedule(run: RunConfig) -> Row:
    schedule = run.schedule
    floor = max(schedule.min_lr_factor * run.optimizer.peak_lr, schedule.min_lr or 0.0)
    return schedule_row(schedule, floor)


def _warnings(run: RunConfig, datasets: Datasets) -> list[str]:
    """Return the warnings of machine and config, and those of the texts."""
    name = public_name(run.training.dataset_path or run.training.dataset)
    sequences = None
    if run.steps is not None:
        sequences = run.course.position_after(run.steps)
    found = list(run.warnings)
    machine = accelerator_warning()
    if machine:
        found.insert(0, machine)
    return [*found, *text_warnings(datasets.train, datasets.validation, name, sequences)]
