"""The start-up report: what is about to run, and where each number comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from titanlite.config.plans import Plans
from titanlite.observe.flops import is_cpu
from titanlite.parallel.float8_choice import tokens_per_product
from titanlite.utils import counted, human_bytes, human_count

if TYPE_CHECKING:
    from titanlite.parallel.activation_checkpoint import ActivationStats
    from titanlite.parallel.float8_choice import Float8Choice
    from titanlite.parallel.pipeline_split import StageLayout

#: How a line begins that is to be logged at level WARNING.
WARNING = "warning: "
#: Beginnings of the notes of `resolve` that lines of the report say already.
_SAID = ("global batch = ", "accumulation = ", "tokens per step = ", "data_parallel_shard = ")


def start_report(
    plans: Plans,
    *,
    parameters: Mapping[str, int],
    flops_per_token: int,
    device: str,
    world_size: int,
    versions: Mapping[str, str],
    tokenizer: str,
    documents: int,
    tokens_per_epoch: int,
    memory_bytes: int,
    peak_flops: float | None,
    folders: Mapping[str, str],
    kept: ActivationStats | None = None,
    stages: StageLayout | None = None,
    float8: Sequence[Float8Choice] = (),
) -> list[str]:
    """Aligned lines `name  text`, then `note:` and `warning:` lines.

    parameters: count by top-level module, over all ranks. device: from `device_name`. memory_bytes: of one device.
    peak_flops: of one device, None when unknown. folders: what is written -> where.
    kept: of a traced block, None where none was traced. stages: of a pipeline.
    float8: what becomes of each kind of linear; empty where float8 is off.
    """
    model, batch, mesh = plans.model, plans.batch, plans.mesh
    total = sum(parameters.values())
    rows = [("run", plans.observe.description)] if plans.observe.description else []
    rows += [
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("model", f"{model.name} {model.flavor}: {total:,} parameters ({human_count(total)})"),
        ("parameters", ", ".join(f"{name} {count:,}" for name, count in parameters.items())),
        ("compute", f"{flops_per_token / 1e9:,.4g} GFLOPs per token, forward and backward{_peak(plans, peak_flops)}"),
        ("devices", f"{world_size} x {device}{_memory(memory_bytes, device)}"),
        ("mesh", _mesh(plans)),
        *([("pipeline", _pipeline(plans, stages))] if stages else []),
        ("precision", f"parameters {plans.shard.param_dtype}, gradients reduced in {plans.shard.reduce_dtype}"),
        *(_float8(plans, float8) if float8 else []),
        ("sharding", _sharding(plans, total, device)),
        ("compile", _compile(plans)),
        *([("activations", _activations(plans, kept, device))] if kept else []),
        *([("loss", _loss(plans))] if plans.loss.chunks > 1 else []),
        ("tokenizer", tokenizer),
        ("data", _data(plans, documents, tokens_per_epoch)),
        (
            "global batch",
            f"{counted(batch.global_batch_size, 'sequences')} = {batch.micro_batch_size} per micro-batch x "
            f"{counted(batch.accumulation, 'micro-batches')} x {counted(mesh.dp_degree, 'data-parallel ranks')}",
        ),
        (
            "tokens per step",
            f"{batch.tokens_per_step:,} = {counted(batch.global_batch_size, 'sequences')} x {batch.seq_len:,} tokens",
        ),
        ("length", _length(plans, tokens_per_epoch)),
        ("optimizer", _optimizer(plans)),
        ("schedule", _schedule(plans)),
        *([("guard", _guard(plans))] if plans.guard.policy != "stop" or plans.guard.spike_sigmas else []),
        ("validation", _validation(plans)),
        ("checkpoints", _checkpoints(plans)),
        *((f"{name} to", where) for name, where in folders.items()),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    lines += [f"note: {note}" for note in plans.notes if not note.startswith(_SAID)]
    if peak_flops is None and not is_cpu(device):
        lines.append(f"note: no MFU is shown: the peak of {device} is not known here; metrics.peak_tflops sets it")
    if float8 and not plans.compile.model and not is_cpu(device):
        lines.append(
            f"{WARNING}float8 without training.compile is slower than bf16: scaling and rounding then run as kernels "
            "of their own, which take longer than the products save. Set training.compile = true"
        )
    return lines + [f"{WARNING}{warning}" for warning in plans.warnings]


def _peak(plans: Plans, peak_flops: float | None) -> str:
    if peak_flops is None:
        return ""
    text = f"; MFU against {peak_flops / 1e12:,.4g} TFLOPS per device"
    if not plans.float8.enable:
        return text
    given = plans.observe.peak_flops is not None
    return f"{text} (metrics.peak_tflops)" if given else f"{text}, its peak in bf16; float8 products can be above it"


def _float8(plans: Plans, choices: Sequence[Float8Choice]) -> list[tuple[str, str]]:
    """One row of all, and one for each kind of linear."""
    plan = plans.float8
    total, converted = (sum(len(c.names) for c in some) for some in (choices, [c for c in choices if c.converted]))
    parts = [f"{plan.recipe}{', emulated in float32 (slow, for tests)' if plan.emulate else ''}"]
    if plan.all_gather:
        how = "all scales by one all-reduce after the update" if plan.precompute else "each scale found as it is"
        parts.append(f"weights gathered in float8, {how}")
    parts.append(f"{converted:,} of {total:,} linears")
    m = _tokens(plans)
    parts.append(f"M = {m:,} tokens in a product of one rank")
    if plan.drift_check:
        parts.append(f"drift measured every {counted(plan.drift_check, 'steps')}")
    rows = [("float8", "; ".join(parts))]
    for choice in choices:
        what = "in float8" if choice.converted else f"kept: {choice.reason}"
        size = f"K x N = {choice.size.in_features:,} x {choice.size.out_features:,}"
        rows.append((f"  {choice.kind}", f"{size}, {len(choice.names)} {what}"))
    return rows


def _mesh(plans: Plans) -> str:
    mesh = plans.mesh
    degrees = {"pp": mesh.pipeline, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard}
    degrees |= {"cp": mesh.context, "tp": mesh.tensor}
    # The two of data parallelism are always told: they are what a batch is divided by.
    shown = [f"{name} {n}" for name, n in degrees.items() if n > 1 or name.startswith("dp_")]
    how = ""
    if mesh.tensor > 1:
        plan = plans.tensor_parallel
        how = f"; loss on {'sharded' if plan.loss_parallel else 'gathered'} logits"
        how += "; tensor-parallel traffic overlaps with products" if plan.asynchronous else ""
    return f"{' x '.join(shown)} = {counted(mesh.world_size, 'ranks')}{how}"


def _pipeline(plans: Plans, layout: StageLayout) -> str:
    parts = [
        f"{names[0]} to {names[-1]} on {rank}" if len(names) > 1 else f"{names[0]} on {rank}"
        for names, rank in zip(layout.stages, layout.ranks, strict=True)
    ]
    return f"{plans.pipeline.schedule}, {len(parts)} stages, by pipeline rank: {', '.join(parts)}"


def _sharding(plans: Plans, total: int, device: str) -> str:
    plan, mesh = plans.shard, plans.mesh
    if isinstance(plan.units, tuple):
        unit = f"each {' and '.join(plan.units)}"
    else:
        unit = {"block": "each block", "root": "the whole model", "size": f"{plan.min_params:,} parameters or more"}[
            plan.units
        ]
    parts = [f"units of {unit}"]
    if mesh.weight_shards > 1:
        freed: dict[bool | int | None, str] = {
            None: "freed after forward but for the last two",
            True: "freed after forward",
            False: "kept gathered until their backward",
        }
        reshard = plan.reshard_after_forward
        parts.append(freed.get(reshard, f"after forward sharded over {reshard} ranks"))
        if plan.prefetch:
            parts.append(f"gathered {plan.prefetch} ahead")
    if plans.batch.accumulation > 1 and plan.gradient_sync == "last" and mesh.weight_shards > 1:
        width = 4 if plan.reduce_dtype == "float32" else 2
        parts.append(
            f"whole gradients kept until the last micro-batch: {width} bytes x {total:,} parameters = "
            f"{human_bytes(width * total)} per rank (training.gradient_sync)"
        )
    if plan.cpu_offload:
        on_cpu = "offload to host memory is without effect on a CPU"
        parts.append(on_cpu if is_cpu(device) else "parameters, gradients and optimizer state in host memory")
    return "; ".join(parts)


def _memory(memory_bytes: int, device: str) -> str:
    if not memory_bytes:
        return ""
    return f", {human_bytes(memory_bytes)} {'of memory, shared' if is_cpu(device) else 'each'}"


def _compile(plans: Plans) -> str:
    plan = plans.compile
    unit = "each block" if plans.mesh.tensor == 1 else "attention and feed-forward of each block"
    parts = [text for text, on in ((unit, plan.model), ("the loss", plan.loss)) if on]
    return f"{' and '.join(parts)}, backend {plan.backend}" if parts else "off"


def _tokens(plans: Plans) -> int:
    """M, the tokens of one product on one rank."""
    batch, microbatches = plans.batch, plans.pipeline.microbatches
    return tokens_per_product(batch.micro_batch_size, batch.seq_len, cp=plans.mesh.context, microbatches=microbatches)


def _loss(plans: Plans) -> str:
    count = _tokens(plans)
    return (
        f"head and cross-entropy in {plans.loss.chunks} pieces of {-(-count // plans.loss.chunks):,} tokens, one after "
        "the other"
    )


def _activations(plans: Plans, kept: ActivationStats, device: str) -> str:
    plan = plans.activations
    every_byte = kept.blocks * kept.plain_bytes
    amount = f"{human_bytes(kept.total_bytes)} of {human_bytes(every_byte)} kept per micro-batch"
    if plan.mode == "op":
        text = f"by operation: each block saves {_runs(kept.forward, kept.saved)}"
    elif kept.recomputing:
        text = f"{kept.recomputing} of {counted(kept.blocks, 'blocks')} keep only their input"
    else:
        text, amount = "all kept", f"{human_bytes(every_byte)} in {counted(kept.blocks, 'blocks')} per micro-batch"
    if kept.recomputing:
        again = {kind: times for kind, times in kept.recomputed.items() if times}
        text += (
            f" and recompute{'s' if plan.mode == 'op' else ''} {_runs(kept.forward, again) if again else 'no product'}"
        )
    if plan.mode == "budget":
        text = f"the compiler keeps {plan.memory_budget:.0%} of what it would by itself"
        amount += " without it"
    if plans.mesh.tensor > 1:
        amount += f", before {plans.mesh.tensor} ranks share it (tensor parallelism)"
    away = f"up to {human_bytes(kept.total_bytes)} of that wait in host memory"
    where = "offload has no effect on a CPU" if is_cpu(device) else away
    return "; ".join([text, amount, *([where] if plan.offload else [])])


def _runs(forward: Mapping[str, int], some: Mapping[str, int]) -> str:
    """`4 of 7 matmuls and attention`."""
    parts = [f"{some['matmul']} of {forward['matmul']} matmuls"] if "matmul" in some else []
    return " and ".join([*parts, *(["attention"] if some.get("attention") else [])])


def _data(plans: Plans, documents: int, tokens_per_epoch: int) -> str:
    plan = plans.data
    order = f"shuffled with seed {plan.seed}" if plan.shuffle else "in file order"
    size = f"{counted(documents, 'documents')}, {tokens_per_epoch:,} tokens per epoch"
    return f"{plan.path or plan.dataset}: {size}, {order}"


def _length(plans: Plans, tokens_per_epoch: int) -> str:
    if plans.train.steps is None:
        return counted(plans.data.epochs or 0, "epochs")
    tokens = plans.train.steps * plans.batch.tokens_per_step
    epochs = f" = {tokens / tokens_per_epoch:.3g} epochs".replace(" 1 epochs", " 1 epoch") if tokens_per_epoch else ""
    return f"{counted(plans.train.steps, 'steps')}, {tokens:,} tokens{epochs}"


def _optimizer(plans: Plans) -> str:
    plan = plans.optimizer
    return (
        f"{plan.name}, lr {plan.lr:g}, betas {plan.beta1:g} and {plan.beta2:g}, eps {plan.eps:g}, "
        f"weight decay {plan.weight_decay:g}, gradients clipped to norm {plan.max_norm:g}"
    )


def _schedule(plans: Plans) -> str:
    plan = plans.schedule
    parts = [f"warm-up {counted(plan.warmup_steps, 'steps')}"]
    if plan.plateau_steps:
        parts.append(f"plateau {counted(plan.plateau_steps, 'steps')}")
    if plan.decay_type == "constant":
        parts.append("then constant")
    else:
        over = "" if plan.decay_steps is None else f" over the last {counted(plan.decay_steps, 'steps')}"
        floor = plan.min_lr_factor * plans.optimizer.lr
        if plan.min_lr is not None:
            floor = max(floor, plan.min_lr)
        parts.append(f"{plan.decay_type} decay{over} to {floor:g}")
    if plan.total_steps is not None:
        parts.append(f"{counted(plan.total_steps, 'steps')} in all")
    return ", ".join(parts)


def _guard(plans: Plans) -> str:
    plan = plans.guard
    bad = "a loss or gradient that is not finite"
    if plan.spike_sigmas:
        bad += f", or a loss {plan.spike_sigmas:g} deviations over the mean of the last {plan.window:,} good ones,"
    most = f"{plan.max_skips:,} within {counted(plan.window, 'steps')} at most"
    return {
        "stop": f"{bad} ends the run",
        "skip": f"{bad} is skipped, {most}",
        "rollback": f"{bad} takes the run back to the newest checkpoint, {most}",
    }[plan.policy]


def _validation(plans: Plans) -> str:
    plan = plans.validation
    if not plan.enable:
        return "off"
    size = "all of" if plan.steps == -1 else f"{counted(plan.steps, 'batches')} of"
    return f"every {counted(plan.freq, 'steps')} and at the end, {size} {plan.path or plan.dataset}"


def _checkpoints(plans: Plans) -> str:
    plan = plans.checkpoint
    if not plan.enable:
        return "off (checkpoint.enable_checkpoint): the trained weights are not kept"
    when = f"every {counted(plan.interval, plan.interval_type)}"
    if plan.first_step:
        when += ", after step 1"
    if plan.milestones:
        steps = "powers of two" if plan.milestones == "powers_of_two" else ", ".join(map(str, plan.milestones))
        when += f", after steps {steps} (kept for good)"
    if plan.keep_best:
        when += f", when validation is among the best {plan.keep_best}"
    return f"{when} and at the end; start: {plan.start}"
