"""A plan as text for a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence

from titanlite.derive import RunConfig
from titanlite.metrics.console import wants_color
from titanlite.plan.hardware import DEFAULT_GPUS_PER_NODE, Gpu, cluster_of
from titanlite.plan.parts import GIB, PARTS
from titanlite.plan.plan import Plan, make_plan
from titanlite.utils import Style, Table, counted, escape, human_bytes, human_count, human_time, render

_BAR = 24
_MONTH = 30 * 86400
#: What a run without a GPU is planned for.
_WITHOUT_GPU = "h100-80g"


def plan_text(plan: Plan, style: Style) -> str:
    """Return the plan: verdict, memory by part, speed, time and disk."""
    good = style.good if plan.fits else style.warn
    rows = [f"  {label:<12} {text}" for label, text in plan_rows(plan)]
    notes = [style.dim(f"  - {text}") for text in plan.assumptions]
    return "\n".join([good(verdict(plan)), "", memory_table(plan, style), "", *rows, style.dim("  assumed:"), *notes])


def print_plan(run: RunConfig, gpus_per_node: int) -> None:
    """Print the plan of a run on this machine's GPUs, or on those of `launch.instance_type`. Raises ConfigError.

    gpus_per_node: ranks on this machine. More than it has GPUs are planned for several machines.
    """
    gpu = size = None
    if not run.launch.instance_type:
        import torch

        here = torch.cuda.is_available()
        gpu = torch.cuda.get_device_name() if here else _WITHOUT_GPU
        most = torch.cuda.device_count() if here else DEFAULT_GPUS_PER_NODE
        size = gpus_per_node if gpus_per_node <= most else math.gcd(gpus_per_node, most)
    plan = make_plan(run, cluster_of(run, gpu=gpu, gpus_per_node=size))
    color = run.metrics.enable_color_printing
    print(escape(plan_text(plan, Style(wants_color(sys.stdout) if color is None else color)), colors=True), flush=True)


def verdict(plan: Plan) -> str:
    """Return one line: whether the run fits, and by how much."""
    gpus = f"{plan.run.mesh.world_size} x {plan.cluster.gpu.key}"
    amount = f"{abs(plan.margin) / GIB:.1f} GiB ({abs(plan.margin) / plan.cluster.gpu.memory:.0%})"
    says = f"fits, with {amount} to spare" if plan.fits else f"does not fit: {amount} are missing"
    return f"{plan.run.model.title} on {gpus} {says}"


def memory_table(plan: Plan, style: Style) -> str:
    """Return the parts at the peak, with a bar for each: its share of the GPU's memory."""
    usable, peak = plan.cluster.gpu.memory, plan.memory.peak.parts
    digits = 2 if plan.memory.peak.total >= GIB else 4
    parts = {name: peak[name] for name in PARTS if round(peak.get(name, 0) / GIB, digits)}
    rows = [*parts.items(), ("allocator overhead", plan.overhead), ("needed", plan.needed), ("usable", usable)]
    bars = ("█" * min(round(_BAR * size / usable), 2 * _BAR) for _, size in rows)
    numbers = ((name, f"{size / GIB:.{digits}f}", f"{size / usable:.1%}") for name, size in rows)
    shown = [(*number, bar) for number, bar in zip(numbers, bars, strict=True)]
    how = "traced" if plan.exact else "by formula"
    return render(Table((f"rank {plan.memory.rank}, {how}", "GiB", "share", ""), shown, left=(0, 3)), style.color)


def plan_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield label and text of all but the memory of the GPU."""
    speed, run, nodes, peak = plan.speed, plan.run, plan.cluster.nodes, plan.memory.peak
    yield "peak", f"in the {peak.place}"
    mfu, low, high = (f"{100 * share:.1f}" for share in (speed.mfu, *plan.mfu_range))
    rates = f"{speed.tokens_per_second:,.0f} tokens/s per GPU ({speed.low:,.0f} to {speed.high:,.0f})"
    yield "speed", f"{rates}, MFU {mfu} % ({low} to {high})"
    yield "step", f"{run.batch.tokens_per_step:,} tokens in {speed.step_seconds:.3g} s: {_largest(plan)}"
    if run.steps is not None and plan.seconds is not None:
        tokens = human_count(run.steps * run.batch.tokens_per_step)
        slow, fast = (plan.seconds * speed.tokens_per_second / rate for rate in (speed.low, speed.high))
        spread = f"{_time(plan.seconds)} ({_time(fast)} to {_time(slow)})"
        price = "" if plan.cost is None else f", for {plan.cost:,.2f} at {plan.cluster.price:g} per machine and hour"
        yield "run", f"{counted(run.steps, 'steps')}, {tokens} tokens in {spread}{price}"
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.host.items() if size >= GIB / 20)
    each = "" if nodes == 1 else f" on each of {nodes} machines"
    yield "host memory", f"{sum(plan.host.values()) / GIB:.1f} GiB{each}: {parts}"
    if disk := plan.disk:
        most = "" if disk.total is None else f", {disk.count:,} at most at one time: {human_bytes(disk.total)} of disk"
        yield "checkpoints", f"{human_bytes(disk.checkpoint)} each{most}"


def _largest(plan: Plan) -> str:
    """Return the parts of a step that take a hundredth of it, the longest first."""
    parts = sorted(plan.speed.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {s:.3g} s" for name, s in parts if s >= plan.speed.step_seconds / 100)


def _time(seconds: float) -> str:
    return human_time(seconds) if seconds < _MONTH else f"{seconds / 86400:,.0f} days"


def gpu_table(plans: Sequence[Plan], missing: Sequence[tuple[Gpu, str]], needs: Mapping[int, int], style: Style) -> str:
    """Return a row for each kind of GPU.

    plans: on the fewest that the run fits. missing: GPUs that cannot train it, and why. needs: number → bytes of each.
    """
    rows: list[tuple[str, ...]] = []
    for plan in plans:
        gpu, time = plan.cluster.gpu, "–" if plan.seconds is None else _time(plan.seconds)
        memory = f"{gpu.memory / GIB:.1f}", f"{plan.cluster.gpus:,}", f"{plan.needed / GIB:.1f}"
        rates = f"{plan.speed.tokens_per_second:,.0f}", f"{100 * plan.speed.mfu:.1f}"
        rows.append((gpu.key, *memory, f"{plan.margin / gpu.memory:.0%}", *rates, time))
    least, fewest = min((need, size) for size, need in needs.items())
    for gpu, why in missing:
        rows.append((gpu.key, f"{gpu.memory / GIB:.1f}", "none", f"{least / GIB:.1f}", *["–"] * 3, why))
    columns = ("GPU", "GiB", "fewest", "needed GiB", "free", "tokens/s each", "MFU %", "time")
    sizes = ", ".join(f"{size:,}" for size in needs)
    end = f"The fewest of {sizes} GPUs that the run fits; it needs least, {least / GIB:.1f} GiB, on {fewest:,}."
    hint = "A plan of one of them: --gpus N --gpu NAME, or --instance TYPE --nodes N."
    return "\n".join([render(Table(columns, rows), style.color), "", style.dim(end), style.dim(hint)])
