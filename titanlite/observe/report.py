"""The start-up report: what is about to run, and where each number comes from."""

from __future__ import annotations

from collections.abc import Mapping

from titanlite.config.plans import Plans
from titanlite.observe.flops import is_cpu
from titanlite.observe.stepline import human_bytes, human_count

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
) -> list[str]:
    """Aligned lines `name  text`, then `note:` and `warning:` lines.

    parameters: count by top-level module, over all ranks. device: from `device_name`. memory_bytes: of one device.
    peak_flops: of one device, None when unknown. folders: what is written -> where.
    """
    model, batch, mesh = plans.model, plans.batch, plans.mesh
    total = sum(parameters.values())
    rows = [("run", plans.observe.description)] if plans.observe.description else []
    rows += [
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("model", f"{model.name} {model.flavor}: {total:,} parameters ({human_count(total)})"),
        ("parameters", ", ".join(f"{name} {count:,}" for name, count in parameters.items())),
        ("compute", f"{flops_per_token / 1e9:,.4g} GFLOPs per token, forward and backward{_peak(peak_flops)}"),
        ("devices", f"{world_size} x {device}{_memory(memory_bytes, device)}"),
        ("mesh", f"dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} = {mesh.world_size} ranks"),
        ("precision", f"parameters {plans.shard.param_dtype}, gradients reduced in {plans.shard.reduce_dtype}"),
        ("tokenizer", tokenizer),
        ("data", _data(plans, documents, tokens_per_epoch)),
        (
            "global batch",
            f"{batch.global_batch_size:,} sequences = {batch.micro_batch_size} per micro-batch x "
            f"{batch.accumulation} micro-batches x {mesh.dp_degree} data-parallel ranks",
        ),
        (
            "tokens per step",
            f"{batch.tokens_per_step:,} = {batch.global_batch_size:,} sequences x {batch.seq_len:,} tokens",
        ),
        ("length", _length(plans, tokens_per_epoch)),
        ("optimizer", _optimizer(plans)),
        ("schedule", _schedule(plans)),
        ("validation", _validation(plans)),
        ("checkpoints", _checkpoints(plans)),
        *((f"{name} to", where) for name, where in folders.items()),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    lines += [f"note: {note}" for note in plans.notes if not note.startswith(_SAID)]
    if peak_flops is None and not is_cpu(device):
        lines.append(f"note: no MFU is shown: the peak of {device} is not known here; metrics.peak_tflops sets it")
    return lines + [f"warning: {warning}" for warning in plans.warnings]


def _peak(peak_flops: float | None) -> str:
    return "" if peak_flops is None else f"; MFU against {peak_flops / 1e12:,.4g} TFLOPS per device"


def _memory(memory_bytes: int, device: str) -> str:
    if not memory_bytes:
        return ""
    return f", {human_bytes(memory_bytes)} {'of memory, shared' if is_cpu(device) else 'each'}"


def _data(plans: Plans, documents: int, tokens_per_epoch: int) -> str:
    plan = plans.data
    order = f"shuffled with seed {plan.seed}" if plan.shuffle else "in file order"
    return f"{plan.path or plan.dataset}: {documents:,} documents, {tokens_per_epoch:,} tokens per epoch, {order}"


def _length(plans: Plans, tokens_per_epoch: int) -> str:
    if plans.train.steps is None:
        return f"{plans.data.epochs} epochs"
    tokens = plans.train.steps * plans.batch.tokens_per_step
    epochs = f" = {tokens / tokens_per_epoch:.3g} epochs" if tokens_per_epoch else ""
    return f"{plans.train.steps:,} steps, {tokens:,} tokens{epochs}"


def _optimizer(plans: Plans) -> str:
    plan = plans.optimizer
    return (
        f"{plan.name}, lr {plan.lr:g}, betas {plan.beta1:g} and {plan.beta2:g}, eps {plan.eps:g}, "
        f"weight decay {plan.weight_decay:g}, gradients clipped to norm {plan.max_norm:g}"
    )


def _schedule(plans: Plans) -> str:
    plan = plans.schedule
    parts = [f"warm-up {plan.warmup_steps:,} steps"]
    if plan.plateau_steps:
        parts.append(f"plateau {plan.plateau_steps:,} steps")
    if plan.decay_type == "constant":
        parts.append("then constant")
    else:
        over = "" if plan.decay_steps is None else f" over the last {plan.decay_steps:,} steps"
        floor = plan.min_lr_factor * plans.optimizer.lr
        if plan.min_lr is not None:
            floor = max(floor, plan.min_lr)
        parts.append(f"{plan.decay_type} decay{over} to {floor:g}")
    if plan.total_steps is not None:
        parts.append(f"{plan.total_steps:,} steps in all")
    return ", ".join(parts)


def _validation(plans: Plans) -> str:
    plan = plans.validation
    if not plan.enable:
        return "off"
    size = "all of" if plan.steps == -1 else f"{plan.steps:,} batches of"
    return f"every {plan.freq:,} steps and at the end, {size} {plan.path or plan.dataset}"


def _checkpoints(plans: Plans) -> str:
    plan = plans.checkpoint
    if not plan.enable:
        return "off (checkpoint.enable_checkpoint): the trained weights are not kept"
    return f"every {plan.interval:,} steps and at the end; start: {plan.start}"
