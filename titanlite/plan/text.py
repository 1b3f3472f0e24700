"""A plan as text for a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence

from titanlite.config.errors import ConfigError, Problem
from titanlite.metrics.console import wants_color
from titanlite.plan.hardware import DEFAULT_GPUS_PER_NODE, Gpu, cluster_of, gpu_of_device
from titanlite.plan.parts import FRAGMENTATION, GIB, PARTS
from titanlite.plan.plan import Plan, make_plan
from titanlite.start.derive import RunConfig
from titanlite.utils import Style, Table, counted, escape, human_bytes, human_count, render

_BAR = 24
#: Retries of the allocator in a step of runs on the null GPU that had exactly the memory that they
#: need.
FEWEST_RETRIES, MOST_RETRIES = 2, 13
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "s": 1}
#: GiB of host memory for each GPU that AWS's largest machines have: a plan that needs more says so
#: first.
_HOST_PER_GPU = 256
#: What a run without a GPU is planned for.
_WITHOUT_GPU = "h100-80g"


def plan_text(plan: Plan, style: Style) -> str:
    """Return the plan: verdict, memory by part, speed, time and disk."""
    good = style.good if plan.fits else style.warn
    rows = [f"  {label:<12} {text}" for label, text in plan_rows(plan)]
    notes = [style.dim(f"  - {text}") for text in plan.assumptions]
    return "\n".join(
        [
            good(verdict(plan)),
            "",
            memory_table(plan, style),
            "",
            *rows,
            style.dim("  assumed:"),
            *notes,
        ]
    )


def print_plan(run: RunConfig, gpus_per_node: int) -> None:
    """Print the plan of a run on this machine's GPUs, or on those of `launch.instance_type`.

    Raises ConfigError.

    gpus_per_node: ranks on this machine. More than it has GPUs are planned for several machines.
    """
    gpu = size = note = None
    if not run.launch.instance_type:
        import torch

        here = torch.cuda.is_available()
        gpu = torch.cuda.get_device_name() if here else _WITHOUT_GPU
        note = None if here else f"planned for {gpu}, since this machine has no GPU"
        if here and gpu_of_device(gpu) is None:
            message = f"the speed and memory of this machine's GPU, {gpu!r}, are not known"
            raise ConfigError(
                [Problem("", "launch.instance_type", message, "name a machine, as p5.48xlarge")]
            )
        most = torch.cuda.device_count() if here else DEFAULT_GPUS_PER_NODE
        size = gpus_per_node if gpus_per_node <= most else math.gcd(gpus_per_node, most)
    plan = make_plan(run, cluster_of(run, gpu=gpu, gpus_per_node=size))
    color = run.metrics.enable_color_printing
    text = plan_text(plan, Style(wants_color(sys.stdout) if color is None else color))
    print(escape(f"{text}\n{note}" if note else text, colors=True), flush=True)


def verdict(plan: Plan) -> str:
    """Return one line: whether the run fits, and by how much."""
    gpus = f"{plan.run.mesh.world_size} x {plan.cluster.gpu.key}"
    share = plan.margin / plan.cluster.gpu.memory
    amount = f"{abs(plan.margin) / GIB:.1f} GiB ({abs(share):.0%})"
    host, usable = plan.host_needed, plan.cluster.host
    if plan.margin < 0:
        says = f"does not fit: {amount} are missing"
    elif not plan.fits:
        says = (
            f"does not fit: a machine needs {host / GIB:,.0f} GiB of host memory, and has "
            f"{(usable or 0) / GIB:,.0f}"
        )
    elif share < FRAGMENTATION:
        says = f"fits barely, with {amount} to spare, less than the plan's error"
    else:
        says = f"fits, with {amount} to spare"
    if usable is None and host > _HOST_PER_GPU * GIB * plan.cluster.gpus_per_node:
        says += f", and needs a host of {host / GIB:,.0f} GiB"
    return f"{plan.run.model.title} on {gpus} {says}"


def memory_table(plan: Plan, style: Style) -> str:
    """Return the parts at the peak, with a bar for each: its share of the GPU's memory."""
    usable, peak = plan.cluster.gpu.memory, plan.memory.peak.parts
    digits = 2 if plan.memory.peak.total >= GIB else 4
    parts = {name: peak[name] for name in PARTS if round(peak.get(name, 0) / GIB, digits)}
    rows = [
        *parts.items(),
        ("allocator overhead", plan.overhead),
        ("needed", plan.needed),
        ("usable", usable),
    ]
    bars = ("█" * min(round(_BAR * size / usable), 2 * _BAR) for _, size in rows)
    numbers = ((name, f"{size / GIB:.{digits}f}", f"{size / usable:.1%}") for name, size in rows)
    shown = [(*number, bar) for number, bar in zip(numbers, bars, strict=True)]
    how = "traced" if plan.exact else "by formula"
    return render(
        Table((f"rank {plan.memory.rank}, {how}", "GiB", "share", ""), shown, left=(0, 3)),
        style.color,
    )


def plan_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield label and text of all but the memory of the GPU."""
    speed, run, nodes, peak = plan.speed, plan.run, plan.cluster.nodes, plan.memory.peak
    host = plan.cluster.host
    yield "peak", f"in the {peak.place}"
    yield "reserved", _reserved(plan)
    mfu, low, high = (f"{100 * share:.1f}" for share in (speed.mfu, *plan.mfu_range))
    rates = (
        f"{speed.tokens_per_second:,.0f} tokens/s per GPU ({speed.low:,.0f} to {speed.high:,.0f})"
    )
    yield "speed", f"{rates}, MFU {mfu} % ({low} to {high})"
    yield (
        "step",
        f"{run.batch.tokens_per_step:,} tokens in {_seconds(speed.step_seconds)}: {_largest(plan)}",
    )
    if run.steps is not None and plan.seconds is not None:
        tokens = human_count(run.steps * run.batch.tokens_per_step)
        times = [
            plan.seconds,
            *(plan.seconds * speed.tokens_per_second / rate for rate in (speed.high, speed.low)),
        ]
        mean, fast, slow = (_in_unit(time, unit := _unit(plan.seconds)) for time in times)
        price = ""
        if plan.cost is not None:
            cost, least, most = (_digits(plan.price_of(time) or 0) for time in times)
            price = (
                f", for {cost} ({least} to {most}) at {plan.cluster.price:g} per machine and hour"
            )
        yield (
            "run",
            (
                f"{counted(run.steps, 'steps')}, {tokens} tokens in {mean} {unit} ({fast} to "
                f"{slow}){price}"
            ),
        )
    parts = ", ".join(
        f"{name} {size / GIB:.1f}" for name, size in plan.host.items() if size >= GIB / 20
    )
    each = "" if nodes == 1 else f" on each of {nodes} machines"
    of = "" if host is None else f" of {host / GIB:,.0f}"
    yield "host memory", f"{plan.host_needed / GIB:,.1f}{of} GiB{each}: {parts}"
    if disk := plan.disk:
        most = (
            ""
            if disk.total is None
            else f", {disk.count:,} at most at one time: {human_bytes(disk.total)} of disk"
        )
        most += "" if run.checkpoint.keep_latest_k else " (keep_latest_k = 0 keeps all)"
        yield "checkpoints", f"{human_bytes(disk.checkpoint)} each{most}"


def _reserved(plan: Plan) -> str:
    """Return what nvidia-smi will show, and what the fit is judged by."""
    typical, low, high = (f"{size / GIB:.1f}" for size in plan.reserved)
    shown = f"about {typical} GiB in nvidia-smi ({low} to {high})"
    if plan.margin < 0:
        return f"{shown}, if the GPU had the room"
    if plan.tight:
        retries = f"{FEWEST_RETRIES} to {MOST_RETRIES} times with no more than needed"
        return (
            f"{shown} where there is room. This GPU has less: it fits by what is needed, but "
            "tightly. "
            f"In each step the allocator may give blocks back and ask again, {retries}"
        )
    return f"{shown}, since the allocator keeps freed blocks; the fit is judged by what is needed"


def _largest(plan: Plan) -> str:
    """Return the parts of a step that take a hundredth of it, the longest first."""
    parts = sorted(plan.speed.parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{name} {_seconds(s)}" for name, s in parts if s >= plan.speed.step_seconds / 100
    )


def _digits(number: float) -> str:
    """Return three digits of a number, and zeros: 13,900."""
    return f"{float(f'{number:.3g}'):,.10g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _unit(seconds: float) -> str:
    """Return the largest unit of which a time has two, else seconds."""
    return next((unit for unit, size in _UNITS.items() if seconds >= 2 * size), "s")


def _in_unit(seconds: float, unit: str) -> str:
    number = seconds / _UNITS[unit]
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def gpu_table(
    plans: Sequence[Plan],
    missing: Sequence[tuple[Gpu, str]],
    runs: Mapping[int, RunConfig],
    needs: Mapping[int, int],
    style: Style,
) -> str:
    """Return a row for each kind of GPU.

    plans: on the fewest that the run fits. missing: GPUs that cannot train it, and why. runs,
    needs: number of GPUs → the run, and bytes of each.
    """
    rows: list[tuple[str, ...]] = []
    unit = _unit(min((plan.seconds for plan in plans if plan.seconds is not None), default=0))
    priced = any(plan.cost is not None for plan in plans)
    for plan in plans:
        gpu, time = plan.cluster.gpu, "–" if plan.seconds is None else _in_unit(plan.seconds, unit)
        memory = f"{gpu.memory / GIB:.1f}", f"{plan.cluster.gpus:,}", f"{plan.needed / GIB:.1f}"
        rates = f"{plan.speed.tokens_per_second:,.0f}", f"{100 * plan.speed.mfu:.1f}"
        cost = ("–" if plan.cost is None else _digits(plan.cost),) if priced else ()
        rows.append((gpu.key, *memory, f"{plan.margin / gpu.memory:.0%}", *rates, time, *cost))
    least, fewest = min((need, size) for size, need in needs.items())
    for gpu, why in missing:
        memory = f"{gpu.memory / GIB:.1f}", "none", f"{least / GIB:.1f}"
        rows.append((gpu.key, *memory, *["–"] * 3, why, *["–"] * priced))
    columns = (
        "GPU",
        "GiB",
        "GPUs",
        "needed GiB",
        "free",
        "tokens/s each",
        "MFU %",
        unit,
        *["cost"] * priced,
    )
    tokens = sorted({run.batch.tokens_per_step for run in runs.values()})
    batch = " to ".join(f"{number:,}" for number in dict.fromkeys((tokens[0], tokens[-1])))
    notes = (
        f"Tried {', '.join(f'{size:,}' for size in needs)}: the fewest that the run fits. "
        f"It needs least, {least / GIB:.1f} GiB, on {fewest:,}.",
        "Network: that of the slowest AWS machine with 8 of the GPU, else 400 Gbit/s for each GPU.",
        "A plan of one of them: --gpus N --gpu NAME, or --instance TYPE --nodes N.",
    )
    title = f"{next(iter(runs.values())).model.title}, {batch} tokens per step"
    return "\n".join(
        [title, "", render(Table(columns, rows), style.color), "", *map(style.dim, notes)]
    )
