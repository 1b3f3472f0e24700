"""The startup report: what is about to run, and where each number comes from.

Each function returns the rows (name, text) of one subject, from the sections of the config that it describes and plain
numbers; `startup_report` makes lines of all rows. device: a name of `titanlite.metrics.throughput.device_name`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from titanlite.config.sections.checkpoint import Checkpoint
from titanlite.config.sections.model import ActivationCheckpoint, Compile, Float8, Optimizer
from titanlite.config.sections.run import Guard
from titanlite.config.sections.training import Data, Training, Validation
from titanlite.metrics.throughput import is_cpu
from titanlite.utils import counted, human_bytes, human_count

if TYPE_CHECKING:
    from titanlite.parallel.activation_checkpoint import Kept
    from titanlite.parallel.float8_choice import Choice
    from titanlite.parallel.pipeline_split import Layout

Row = tuple[str, str]

#: Prefix of a line for level WARNING.
WARNING = "warning: "
#: Names of rows that come last, as `note: text` and `warning: text`.
_LAST = ("note", "warning")
#: Prefixes of notes of the config whose numbers rows of the report show already.
_SHOWN = ("global batch = ", "accumulation = ", "tokens per step = ", "data_parallel_shard = ")


def startup_report(rows: Sequence[Row]) -> list[str]:
    """Return aligned lines `name  text`, then `note:` and `warning:` lines."""
    width = max(len(name) for name, _ in rows if name not in _LAST)
    lines = [f"{name:<{width}}  {text}" for name, text in rows if name not in _LAST]
    for kind in _LAST:
        lines += [f"{kind}: {text}" for name, text in rows if name == kind and not text.startswith(_SHOWN)]
    return lines


def model_rows(name: str, parameters: Mapping[str, int]) -> list[Row]:
    """parameters: count by top-level module, over all ranks."""
    total = sum(parameters.values())
    return [
        ("model", f"{name}: {total:,} parameters ({human_count(total)})"),
        ("parameters", ", ".join(f"{module} {count:,}" for module, count in parameters.items())),
    ]


def compute_rows(
    flops_per_token: int,
    device: str,
    world_size: int,
    memory_bytes: int,
    peak_flops: float | None,
    peak_is_given: bool,
    float8: bool,
) -> list[Row]:
    """memory_bytes, peak_flops: of one device; 0 and None where unknown."""
    cpu = is_cpu(device)
    peak, rows = "", []
    if peak_flops is not None:
        peak = f"; MFU against {peak_flops / 1e12:,.4g} TFLOPS per device"
        if float8:
            peak += " (metrics.peak_tflops)" * peak_is_given
            peak += ", its peak in bf16; float8 products can be above it" * (not peak_is_given)
    elif not cpu:
        text = f"no MFU is shown: the peak of {device} is not known here; metrics.peak_tflops sets it"
        rows.append(("note", text))
    memory = f", {human_bytes(memory_bytes)} {'of memory, shared' if cpu else 'each'}" if memory_bytes else ""
    return [
        ("compute", f"{flops_per_token / 1e9:,.4g} GFLOPs per token, forward and backward{peak}"),
        ("devices", f"{world_size} x {device}{memory}"),
        *rows,
    ]


def mesh_row(degrees: Mapping[str, int], world_size: int, loss_parallel: bool, asynchronous: bool) -> Row:
    """degrees: ranks by dimension: pp, dp_replicate, dp_shard, cp, tp."""
    # Those of data parallelism are always shown: they divide a batch.
    shown = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name.startswith("dp_")]
    how = ""
    if degrees["tp"] > 1:
        how = f"; loss on {'sharded' if loss_parallel else 'gathered'} logits"
        how += "; tensor-parallel traffic overlaps with products" * asynchronous
    return "mesh", f"{' x '.join(shown)} = {counted(world_size, 'ranks')}{how}"


def pipeline_row(schedule: str, layout: Layout) -> Row:
    parts = [
        f"{names[0]} to {names[-1]} on {rank}" if len(names) > 1 else f"{names[0]} on {rank}"
        for names, rank in zip(layout.stages, layout.ranks, strict=True)
    ]
    return "pipeline", f"{schedule}, {len(parts)} stages, by pipeline rank: {', '.join(parts)}"


def precision_row(training: Training) -> Row:
    return (
        "precision",
        f"parameters {training.mixed_precision_param}, gradients reduced in {training.mixed_precision_reduce}",
    )


def float8_rows(float8: Float8, choices: Sequence[Choice], tokens: int, compiled: bool, device: str) -> list[Row]:
    """Return one row of all, and one for each kind of linear. tokens: M of a product of one rank."""
    total = sum(len(choice.names) for choice in choices)
    converted = sum(len(choice.names) for choice in choices if choice.converted)
    parts = [float8.recipe_name + ", emulated in float32 (slow, for tests)" * float8.emulate]
    if float8.enable_fsdp_float8_all_gather:
        together = float8.precompute_float8_dynamic_scale_for_fsdp
        how = "all scales by one all-reduce after the update" if together else "each scale found as it is"
        parts.append(f"weights gathered in float8, {how}")
    parts += [f"{converted:,} of {total:,} linears", f"M = {tokens:,} tokens in a product of one rank"]
    if float8.drift_check:
        parts.append(f"drift measured every {counted(float8.drift_check, 'steps')}")
    rows = [("float8", "; ".join(parts))]
    for choice in choices:
        what = "in float8" if choice.converted else f"kept: {choice.reason}"
        size = f"K x N = {choice.size.in_features:,} x {choice.size.out_features:,}"
        rows.append((f"  {choice.kind}", f"{size}, {len(choice.names)} {what}"))
    if not compiled and not is_cpu(device):
        text = (
            "float8 without training.compile is slower than bf16: scaling and rounding then run as kernels of their "
            "own, which take longer than the products save. Set training.compile = true"
        )
        rows.append(("warning", text))
    return rows


def sharding_row(
    training: Training, reshard: bool | int | None, weight_shards: int, accumulation: int, parameters: int, device: str
) -> Row:
    """reshard: as `fully_shard` takes it; None: all groups but the last two. parameters: over all ranks."""
    units = training.fsdp_units
    if isinstance(units, str):
        size = f"{training.fsdp_min_params:,} parameters or more"
        unit = {"block": "each block", "root": "the whole model", "size": size}[units]
    else:
        unit = f"each {' and '.join(units)}"
    parts = [f"units of {unit}"]
    if weight_shards > 1:
        freed: dict[bool | int | None, str] = {
            None: "freed after forward but for the last two",
            True: "freed after forward",
            False: "kept gathered until their backward",
        }
        parts.append(freed.get(reshard, f"after forward sharded over {reshard} ranks"))
        if training.prefetch:
            parts.append(f"gathered {training.prefetch} ahead")
        if accumulation > 1 and training.gradient_sync == "last":
            width = 4 if training.mixed_precision_reduce == "float32" else 2
            parts.append(
                f"whole gradients kept until the last micro-batch: {width} bytes x {parameters:,} parameters = "
                f"{human_bytes(width * parameters)} per rank (training.gradient_sync)"
            )
    if training.enable_cpu_offload:
        on_cpu = "offload to host memory is without effect on a CPU"
        parts.append(on_cpu if is_cpu(device) else "parameters, gradients and optimizer state in host memory")
    return "sharding", "; ".join(parts)


def compile_row(enabled: bool, config: Compile, tensor_parallel: int) -> Row:
    block = "each block" if tensor_parallel == 1 else "attention and feed-forward of each block"
    parts = [text for name, text in (("model", block), ("loss", "the loss")) if enabled and name in config.components]
    return "compile", f"{' and '.join(parts)}, backend {config.backend}" if parts else "off"


def activations_row(config: ActivationCheckpoint, kept: Kept, tensor_parallel: int, device: str) -> Row:
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
    if tensor_parallel > 1:
        amount += f", before {tensor_parallel} ranks share it (tensor parallelism)"
    away = f"up to {human_bytes(kept.total_bytes)} of that wait in host memory"
    where = "offload has no effect on a CPU" if is_cpu(device) else away
    return "activations", "; ".join([text, amount, *([where] if config.offload else [])])


def _runs(forward: Mapping[str, int], some: Mapping[str, int]) -> str:
    """Return `4 of 7 matmuls and attention`."""
    parts = [f"{some['matmul']} of {forward['matmul']} matmuls"] if "matmul" in some else []
    return " and ".join([*parts, *(["attention"] if some.get("attention") else [])])


def loss_row(chunks: int, tokens: int) -> Row:
    """tokens: of a micro-batch of one rank."""
    pieces = f"{chunks} pieces of {-(-tokens // chunks):,} tokens"
    return "loss", f"head and cross-entropy in {pieces}, one after the other"


def data_row(training: Training, data: Data, documents: int, tokens_per_epoch: int) -> Row:
    order = f"shuffled with seed {data.seed}" if data.shuffle else "in file order"
    size = f"{counted(documents, 'documents')}, {tokens_per_epoch:,} tokens per epoch"
    return "data", f"{training.dataset_path or training.dataset}: {size}, {order}"


def batch_rows(micro_batch: int, accumulation: int, data_parallel: int, seq_len: int) -> list[Row]:
    """micro_batch: sequences of one rank. data_parallel: ranks that read different data."""
    sequences = micro_batch * accumulation * data_parallel
    return [
        (
            "global batch",
            f"{counted(sequences, 'sequences')} = {micro_batch} per micro-batch x "
            f"{counted(accumulation, 'micro-batches')} x {counted(data_parallel, 'data-parallel ranks')}",
        ),
        ("tokens per step", f"{sequences * seq_len:,} = {counted(sequences, 'sequences')} x {seq_len:,} tokens"),
    ]


def length_row(steps: int | None, epochs: int | None, tokens_per_step: int, tokens_per_epoch: int) -> Row:
    if steps is None:
        return "length", counted(epochs or 0, "epochs")
    tokens = steps * tokens_per_step
    passes = f" = {tokens / tokens_per_epoch:.3g} epochs".replace(" 1 epochs", " 1 epoch") if tokens_per_epoch else ""
    return "length", f"{counted(steps, 'steps')}, {tokens:,} tokens{passes}"


def optimizer_row(o: Optimizer, max_norm: float) -> Row:
    return "optimizer", (
        f"{o.name}, lr {o.lr:g}, betas {o.beta1:g} and {o.beta2:g}, eps {o.eps:g}, weight decay {o.weight_decay:g}, "
        f"gradients clipped to norm {max_norm:g}"
    )


def schedule_row(
    *,
    warmup_steps: float,
    plateau_steps: float | None,
    decay_type: str,
    decay_steps: int | None,
    floor: float,
    total_steps: int | None,
) -> Row:
    """floor: lowest learning rate of the decay."""
    parts = [f"warm-up {counted(warmup_steps, 'steps')}"]
    if plateau_steps:
        parts.append(f"plateau {counted(plateau_steps, 'steps')}")
    over = "" if decay_steps is None else f" over the last {counted(decay_steps, 'steps')}"
    parts.append("then constant" if decay_type == "constant" else f"{decay_type} decay{over} to {floor:g}")
    if total_steps is not None:
        parts.append(f"{counted(total_steps, 'steps')} in all")
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
