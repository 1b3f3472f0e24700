"""The startup report: what is about to run, and where each number comes from.

Each function returns the row (name, text), or rows, of one subject. It takes the sections of the config that it
describes, and `Setup` with what follows from several. `startup_report` makes lines of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlite.config.run_sections import Guard, Metrics
from titanlite.config.sections import (
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    Data,
    Experimental,
    Float8,
    Model,
    Optimizer,
    Training,
    Validation,
)
from titanlite.metrics.throughput import is_cpu
from titanlite.utils import counted, human_bytes, human_count

if TYPE_CHECKING:
    from titanlite.parallel.activation_checkpoint import ActivationStats
    from titanlite.parallel.float8_choice import Float8Choice
    from titanlite.parallel.pipeline_split import StageLayout

Row = tuple[str, str]

#: Prefix of a line for level WARNING.
WARNING = "warning: "
#: Names of rows that come last, as `note: text` and `warning: text`.
_LAST = ("note", "warning")
#: Prefixes of notes of the config whose numbers rows of the report show already.
_SHOWN = ("global batch = ", "accumulation = ", "tokens per step = ", "data_parallel_shard = ")


@dataclass(frozen=True)
class Setup:
    """Numbers of a run that follow from several sections, the ranks, the model and the text."""

    #: From `titanlite.metrics.throughput.device_name`.
    device: str
    #: Ranks by dimension of the mesh: pp, dp_replicate, dp_shard, cp, tp.
    degrees: Mapping[str, int]
    #: Count by top-level module, over all ranks.
    parameters: Mapping[str, int]
    #: Sequences of a micro-batch of one rank, and micro-batches per step.
    micro_batch: int
    accumulation: int
    seq_len: int
    #: Tokens of a matrix product of one rank.
    tokens: int
    #: Of the training text.
    documents: int
    tokens_per_epoch: int

    @property
    def cpu(self) -> bool:
        return is_cpu(self.device)

    @property
    def data_parallel(self) -> int:
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def sequences(self) -> int:
        return self.micro_batch * self.accumulation * self.data_parallel


def startup_report(rows: Sequence[Row]) -> list[str]:
    """Return aligned lines `name  text`, then `note:` and `warning:` lines."""
    width = max(len(name) for name, _ in rows if name not in _LAST)
    lines = [f"{name:<{width}}  {text}" for name, text in rows if name not in _LAST]
    for kind in _LAST:
        lines += [f"{kind}: {text}" for name, text in rows if name == kind and not text.startswith(_SHOWN)]
    return lines


def model_rows(model: Model, setup: Setup) -> list[Row]:
    total = sum(setup.parameters.values())
    return [
        ("model", f"{model.name} {model.flavor}: {total:,} parameters ({human_count(total)})"),
        ("parameters", ", ".join(f"{module} {count:,}" for module, count in setup.parameters.items())),
    ]


def compute_rows(
    metrics: Metrics, float8: Float8, setup: Setup, ranks: int, flops: int, peak: float | None, memory: int
) -> list[Row]:
    """flops: per token. peak, memory: FLOPS and bytes of one device; None and 0 where unknown."""
    mfu, rows = "", []
    if peak is not None:
        mfu = f"; MFU against {peak / 1e12:,.4g} TFLOPS per device"
        if float8.enable_float8_linear and metrics.peak_tflops is not None:
            mfu += " (metrics.peak_tflops)"
        elif float8.enable_float8_linear:
            mfu += ", its peak in bf16; float8 products can be above it"
    elif not setup.cpu:
        text = f"no MFU is shown: the peak of {setup.device} is not known here; metrics.peak_tflops sets it"
        rows.append(("note", text))
    each = f", {human_bytes(memory)} {'of memory, shared' if setup.cpu else 'each'}" if memory else ""
    return [
        ("compute", f"{flops / 1e9:,.4g} GFLOPs per token, forward and backward{mfu}"),
        ("devices", f"{ranks} x {setup.device}{each}"),
        *rows,
    ]


def mesh_row(training: Training, experimental: Experimental, setup: Setup, ranks: int) -> Row:
    # The two of data parallelism are always shown: they divide a batch.
    shown = [f"{name} {degree}" for name, degree in setup.degrees.items() if degree > 1 or name.startswith("dp_")]
    how = ""
    if setup.degrees["tp"] > 1:
        how = f"; loss on {'sharded' if training.enable_loss_parallel else 'gathered'} logits"
        if experimental.enable_async_tensor_parallel:
            how += "; tensor-parallel traffic overlaps with products"
    return "mesh", f"{' x '.join(shown)} = {counted(ranks, 'ranks')}{how}"


def pipeline_row(schedule: str, layout: StageLayout) -> Row:
    parts = [
        f"{names[0]} to {names[-1]} on {rank}" if len(names) > 1 else f"{names[0]} on {rank}"
        for names, rank in zip(layout.stages, layout.ranks, strict=True)
    ]
    return "pipeline", f"{schedule}, {len(parts)} stages, by pipeline rank: {', '.join(parts)}"


def precision_row(training: Training) -> Row:
    reduce = training.mixed_precision_reduce
    return "precision", f"parameters {training.mixed_precision_param}, gradients reduced in {reduce}"


def float8_rows(float8: Float8, choices: Sequence[Float8Choice], setup: Setup, compiled: bool) -> list[Row]:
    """Return one row of all, and one for each kind of linear."""
    total = sum(len(choice.names) for choice in choices)
    converted = sum(len(choice.names) for choice in choices if choice.converted)
    parts = [float8.recipe_name + ", emulated in float32 (slow, for tests)" * float8.emulate]
    if float8.enable_fsdp_float8_all_gather:
        together = float8.precompute_float8_dynamic_scale_for_fsdp
        how = "all scales by one all-reduce after the update" if together else "each scale found as it is"
        parts.append(f"weights gathered in float8, {how}")
    parts += [f"{converted:,} of {total:,} linears", f"M = {setup.tokens:,} tokens in a product of one rank"]
    if float8.drift_check:
        parts.append(f"drift measured every {counted(float8.drift_check, 'steps')}")
    rows = [("float8", "; ".join(parts))]
    for choice in choices:
        size = f"K x N = {choice.size.in_features:,} x {choice.size.out_features:,}"
        what = "in float8" if choice.converted else f"kept: {choice.reason}"
        rows.append((f"  {choice.kind}", f"{size}, {len(choice.names)} {what}"))
    if not compiled and not setup.cpu:
        text = (
            "float8 without training.compile is slower than bf16: scaling and rounding then run as kernels of their "
            "own, which take longer than the products save. Set training.compile = true"
        )
        rows.append(("warning", text))
    return rows


def sharding_row(training: Training, reshard: bool | int | None, setup: Setup) -> Row:
    """reshard: as `fully_shard` takes it; None: all groups but the last two."""
    units, reduce, total = training.fsdp_units, training.mixed_precision_reduce, sum(setup.parameters.values())
    size = f"{training.fsdp_min_params:,} parameters or more"
    kinds = {"block": "each block", "root": "the whole model", "size": size}
    parts = ["units of " + (kinds[units] if isinstance(units, str) else f"each {' and '.join(units)}")]
    if setup.degrees["dp_shard"] * setup.degrees["cp"] > 1:
        freed: dict[bool | int | None, str] = {
            None: "freed after forward but for the last two",
            True: "freed after forward",
            False: "kept gathered until their backward",
        }
        parts.append(freed.get(reshard, f"after forward sharded over {reshard} ranks"))
        if training.prefetch:
            parts.append(f"gathered {training.prefetch} ahead")
        if setup.accumulation > 1 and training.gradient_sync == "last":
            width = 4 if reduce == "float32" else 2
            parts.append(
                f"whole gradients kept until the last micro-batch: {width} bytes x {total:,} parameters = "
                f"{human_bytes(width * total)} per rank (training.gradient_sync)"
            )
    if training.enable_cpu_offload:
        on_cpu = "offload to host memory is without effect on a CPU"
        parts.append(on_cpu if setup.cpu else "parameters, gradients and optimizer state in host memory")
    return "sharding", "; ".join(parts)


def compile_row(training: Training, config: Compile, setup: Setup) -> Row:
    block = "each block" if setup.degrees["tp"] == 1 else "attention and feed-forward of each block"
    parts = [text for name, text in (("model", block), ("loss", "the loss")) if name in config.components]
    on = training.compile and parts
    return "compile", f"{' and '.join(parts)}, backend {config.backend}" if on else "off"


def activations_row(config: ActivationCheckpoint, kept: ActivationStats, setup: Setup) -> Row:
    """kept: statistics of a traced block."""
    by_operation = config.mode == "selective" and config.selective_ac_option == "op"
    every_byte = kept.blocks * kept.plain_bytes
    amount = f"{human_bytes(kept.total_bytes)} of {human_bytes(every_byte)} kept per micro-batch"
    if by_operation:
        text = f"by operation: each block saves {_runs(kept.forward, kept.saved)}"
    elif kept.recomputing:
        text = f"{kept.recomputing} of {counted(kept.blocks, 'blocks')} keep only their input"
    else:
        text, amount = "all kept", f"{human_bytes(every_byte)} in {counted(kept.blocks, 'blocks')} per micro-batch"
    if kept.recomputing:
        again = {kind: times for kind, times in kept.recomputed.items() if times}
        text += f" and recompute{'s' * by_operation} {_runs(kept.forward, again) if again else 'no product'}"
    if config.mode == "budget":
        text = f"the compiler keeps {config.memory_budget:.0%} of what it would by itself"
        amount += " without it"
    if (ranks := setup.degrees["tp"]) > 1:
        amount += f", before {ranks} ranks share it (tensor parallelism)"
    away = f"up to {human_bytes(kept.total_bytes)} of that wait in host memory"
    where = "offload has no effect on a CPU" if setup.cpu else away
    return "activations", "; ".join([text, amount, *([where] if config.offload else [])])


def _runs(forward: Mapping[str, int], some: Mapping[str, int]) -> str:
    """Return `4 of 7 matmuls and attention`."""
    parts = [f"{some['matmul']} of {forward['matmul']} matmuls"] if "matmul" in some else []
    return " and ".join([*parts, *(["attention"] if some.get("attention") else [])])


def loss_row(chunks: int, setup: Setup) -> Row:
    pieces = f"{chunks} pieces of {-(-setup.tokens // chunks):,} tokens"
    return "loss", f"head and cross-entropy in {pieces}, one after the other"


def data_row(training: Training, data: Data, setup: Setup) -> Row:
    order = f"shuffled with seed {data.seed}" if data.shuffle else "in file order"
    size = f"{counted(setup.documents, 'documents')}, {setup.tokens_per_epoch:,} tokens per epoch"
    return "data", f"{training.dataset_path or training.dataset}: {size}, {order}"


def batch_rows(setup: Setup, steps: int | None, epochs: int | None) -> list[Row]:
    """steps: length of the run; None while the text is not counted."""
    sequences, epoch = counted(setup.sequences, "sequences"), setup.tokens_per_epoch
    per_step = setup.sequences * setup.seq_len
    length = counted(epochs or 0, "epochs")
    if steps is not None:
        passes = f" = {steps * per_step / epoch:.3g} epochs".replace(" 1 epochs", " 1 epoch") if epoch else ""
        length = f"{counted(steps, 'steps')}, {steps * per_step:,} tokens{passes}"
    return [
        (
            "global batch",
            f"{sequences} = {setup.micro_batch} per micro-batch x {counted(setup.accumulation, 'micro-batches')} x "
            f"{counted(setup.data_parallel, 'data-parallel ranks')}",
        ),
        ("tokens per step", f"{per_step:,} = {sequences} x {setup.seq_len:,} tokens"),
        ("length", length),
    ]


def optimizer_row(o: Optimizer, training: Training) -> Row:
    return "optimizer", (
        f"{o.name}, lr {o.lr:g}, betas {o.beta1:g} and {o.beta2:g}, eps {o.eps:g}, weight decay {o.weight_decay:g}, "
        f"gradients clipped to norm {training.max_norm:g}"
    )


def schedule_row(
    decay_type: str, floor: float, warmup: float, plateau: float | None, decay: int | None, total: int | None
) -> Row:
    """floor: lowest learning rate of the decay. The others are lengths in steps."""
    parts = [f"warm-up {counted(warmup, 'steps')}"]
    if plateau:
        parts.append(f"plateau {counted(plateau, 'steps')}")
    over = "" if decay is None else f" over the last {counted(decay, 'steps')}"
    parts.append("then constant" if decay_type == "constant" else f"{decay_type} decay{over} to {floor:g}")
    if total is not None:
        parts.append(f"{counted(total, 'steps')} in all")
    return "schedule", ", ".join(parts)


def guard_rows(guard: Guard) -> list[Row]:
    """Return nothing for the default policy."""
    if guard.policy == "stop" and not guard.spike_sigmas:
        return []
    bad = "a loss or gradient that is not finite"
    if guard.spike_sigmas:
        bad += f", or a loss {guard.spike_sigmas:g} deviations over the mean of the last {guard.window:,} good ones,"
    most = f"{guard.max_skips:,} within {counted(guard.window, 'steps')} at most"
    then = {
        "stop": "ends the run",
        "skip": f"is skipped, {most}",
        "rollback": f"takes the run back to the newest checkpoint, {most}",
    }
    return [("guard", f"{bad} {then[guard.policy]}")]


def validation_row(validation: Validation) -> Row:
    if not validation.enable:
        return "validation", "off"
    size = "all of" if validation.steps == -1 else f"{counted(validation.steps, 'batches')} of"
    text = validation.dataset_path or validation.dataset
    return "validation", f"every {counted(validation.freq, 'steps')} and at the end, {size} {text}"


def checkpoints_row(c: Checkpoint) -> Row:
    if not c.enable_checkpoint:
        return "checkpoints", "off (checkpoint.enable_checkpoint): the trained weights are not kept"
    when = f"every {counted(c.interval, c.interval_type)}"
    if c.enable_first_step_checkpoint:
        when += ", after step 1"
    if c.milestones:
        steps = "powers of two" if c.milestones == "powers_of_two" else ", ".join(map(str, c.milestones))
        when += f", after steps {steps} (kept for good)"
    if c.keep_best:
        when += f", when validation is among the best {c.keep_best}"
    return "checkpoints", f"{when} and at the end; start: {c.start}"
