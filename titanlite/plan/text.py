"""A plan as text for a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from titanlite.config.errors import unfit
from titanlite.plan.hardware import DEFAULT_GPUS_PER_NODE, Gpu, cluster_of, gpu_of_device
from titanlite.plan.parts import FRAGMENTATION, GIB, PARTS, needed_bytes
from titanlite.plan.plan import Disk, Leg, Plan, make_plan
from titanlite.run.config import RunConfig
from titanlite.utils import (
    Style,
    Table,
    counted,
    escape,
    human_bytes,
    human_count,
    render,
    wants_color,
)

_BAR = 24
#: Retries of the allocator in a step of runs on the null GPU that had exactly the memory that they
#: need.
FEWEST_RETRIES = 2
MOST_RETRIES = 13
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "s": 1}
#: GiB of host memory for each GPU that AWS's largest machines have: a plan that needs more says so
#: first.
_HOST_PER_GPU = 256
#: What a run without a GPU is planned for.
_WITHOUT_GPU = "h100-80g"


def plan_text(plan: Plan, style: Style) -> str:
    """Return the plan: verdict, memory by part, speed, time and disk."""
    good = style.good if plan.fits else style.warn
    lines = [good(verdict(plan)), "", memory_table(plan, style), ""]
    lines += [f"  {label:<12} {text}" for label, text in plan_rows(plan)]
    lines.append(style.dim("  assumed:"))
    lines += [style.dim(f"  - {text}") for text in plan.assumptions]
    return "\n".join(lines)


def print_plan(run: RunConfig, gpus_per_node: int) -> None:
    """Print the plan of a run on this machine's GPUs, or on those of `launch.instance_type`.

    Raises ConfigError.

    gpus_per_node: ranks on this machine. More than it has GPUs are planned for several machines.
    """
    note = ""
    if run.launch.instance_type:
        cluster = cluster_of(run)
    else:
        name = _WITHOUT_GPU
        most = DEFAULT_GPUS_PER_NODE
        here = _gpu_here()
        if here:
            name = here.name
            most = here.number
        else:
            note = f"\nplanned for {name}, since this machine has no GPU"
        if gpus_per_node > most:
            gpus_per_node = math.gcd(gpus_per_node, most)
        cluster = cluster_of(run, gpu=name, gpus_per_node=gpus_per_node)
    plan = make_plan(run, cluster)
    color = run.metrics.enable_color_printing
    if color is None:
        color = wants_color(sys.stdout)
    text = plan_text(plan, Style(color))
    print(escape(text + note, colors=True), flush=True)


class _GpusHere(NamedTuple):
    """The GPUs of this machine."""

    name: str
    number: int


def _gpu_here() -> _GpusHere | None:
    """Return the GPUs of this machine; None: it has none. Raises ConfigError for unknown ones."""
    import torch

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    if gpu_of_device(name) is None:
        message = f"the speed and memory of this machine's GPU, {name!r}, are not known"
        hint = "name a machine, as p5.48xlarge"
        raise unfit("launch.instance_type", message, hint)
    return _GpusHere(name, torch.cuda.device_count())


def verdict(plan: Plan) -> str:
    """Return one line: whether the run fits, and by how much."""
    gpus = f"{plan.run.mesh.world_size} x {plan.cluster.gpu.key}"
    share = plan.margin / plan.cluster.gpu.memory
    amount = f"{abs(plan.margin) / GIB:.1f} GiB ({abs(share):.0%})"
    host = plan.host_needed
    usable = plan.cluster.host
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
    usable = plan.cluster.gpu.memory
    peak = plan.memory.peak
    digits = 2 if peak.total >= GIB else 4
    sizes: dict[str, int] = {}
    for name in PARTS:
        size = peak.parts.get(name, 0)
        if round(size / GIB, digits):
            sizes[name] = size
    sizes["allocator overhead"] = plan.overhead
    sizes["needed"] = plan.needed
    sizes["usable"] = usable
    rows = []
    for name, size in sizes.items():
        share = size / usable
        bar = "█" * min(round(_BAR * size / usable), 2 * _BAR)
        rows.append((name, f"{size / GIB:.{digits}f}", f"{share:.1%}", bar))
    how = "traced" if plan.exact else "by formula"
    columns = (f"rank {plan.memory.rank}, {how}", "GiB", "share", "")
    return render(Table(columns, rows, left=(0, 3)), style.color)


def plan_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield label and text of all but the memory of the GPU."""
    yield "peak", f"in the {plan.memory.peak.place}"
    yield "reserved", _reserved(plan)
    yield "speed", _speed(plan)
    tokens = f"{plan.run.batch.tokens_per_step:,} tokens"
    yield "step", f"{tokens} in {_seconds(plan.speed.step_seconds)}: {_largest(plan)}"
    if len(plan.legs) > 1:
        for leg in plan.legs:
            yield f"step {leg.first:,}", _leg(plan, leg)
    if plan.run.steps is not None and plan.seconds is not None:
        yield "run", _whole_run(plan, plan.run.steps, plan.seconds)
    yield "host memory", _host(plan)
    if plan.disk:
        yield "checkpoints", _checkpoints(plan, plan.disk)


def _speed(plan: Plan) -> str:
    speed = plan.speed
    rates = f"{speed.tokens_per_second:,.0f} tokens/s per GPU"
    mfu, low, high = (f"{100 * share:.1f}" for share in (speed.mfu, *plan.mfu_range))
    return f"{rates} ({speed.low:,.0f} to {speed.high:,.0f}), MFU {mfu} % ({low} to {high})"


def _leg(plan: Plan, leg: Leg) -> str:
    """Return what the steps of a phase need."""
    batch = leg.run.batch
    sequences = counted(batch.global_batch_size, "sequences")
    size = f"{sequences} of {batch.seq_len:,} = {batch.tokens_per_step:,} tokens"
    time = f"{_seconds(leg.speed.step_seconds)} a step"
    if leg.seconds is not None and leg.steps is not None:
        unit = _unit(leg.seconds)
        time += f", {_in_unit(leg.seconds, unit)} {unit} for {counted(leg.steps, 'steps')}"
    memory = f"{needed_bytes(leg.memory) / GIB:.2f} GiB needed"
    if leg.memory is plan.memory:
        memory += ", the most of all phases"
    return f"{size}: {time}; {memory}"


def _whole_run(plan: Plan, steps: int, seconds: float) -> str:
    """Return length, time and price of all steps. seconds: of all steps."""
    speed = plan.speed
    tokens = human_count(plan.run.course.tokens_after(steps))
    fast = seconds * speed.tokens_per_second / speed.high
    slow = seconds * speed.tokens_per_second / speed.low
    unit = _unit(seconds)
    times = f"{_in_unit(seconds, unit)} {unit} ({_in_unit(fast, unit)} to {_in_unit(slow, unit)})"
    price = ""
    if plan.cost is not None:
        cost, least, most = (_digits(plan.price_of(time) or 0) for time in (seconds, fast, slow))
        each = f"{plan.cluster.price:g} per machine and hour"
        price = f", for {cost} ({least} to {most}) at {each}"
    return f"{counted(steps, 'steps')}, {tokens} tokens in {times}{price}"


def _host(plan: Plan) -> str:
    """Return the host memory of a machine, with its parts."""
    shown = [(name, size) for name, size in plan.host.items() if size >= GIB / 20]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in shown)
    nodes = plan.cluster.nodes
    each = "" if nodes == 1 else f" on each of {nodes} machines"
    host = plan.cluster.host
    of = "" if host is None else f" of {host / GIB:,.0f}"
    return f"{plan.host_needed / GIB:,.1f}{of} GiB{each}: {parts}"


def _checkpoints(plan: Plan, disk: Disk) -> str:
    """Return the size of a checkpoint, and how many there are."""
    most = ""
    if disk.total is not None:
        most = f", {disk.count:,} at most at one time: {human_bytes(disk.total)} of disk"
    if not plan.run.checkpoint.keep_latest_k:
        most += " (keep_latest_k = 0 keeps all)"
    return f"{human_bytes(disk.checkpoint)} each{most}"


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
    speed = plan.speed
    found = []
    for name, seconds in sorted(speed.parts.items(), key=lambda part: -part[1]):
        if seconds >= speed.step_seconds / 100:
            found.append(f"{name} {_seconds(seconds)}")
    return ", ".join(found)


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
    unit = _unit(min((plan.seconds for plan in plans if plan.seconds is not None), default=0))
    priced = any(plan.cost is not None for plan in plans)
    rows: list[tuple[str, ...]] = []
    for plan in plans:
        time = "–" if plan.seconds is None else _in_unit(plan.seconds, unit)
        cost = "–" if plan.cost is None else _digits(plan.cost)
        gpu = plan.cluster.gpu
        rows.append(
            (
                gpu.key,
                f"{gpu.memory / GIB:.1f}",
                f"{plan.cluster.gpus:,}",
                f"{plan.needed / GIB:.1f}",
                f"{plan.margin / gpu.memory:.0%}",
                f"{plan.speed.tokens_per_second:,.0f}",
                f"{100 * plan.speed.mfu:.1f}",
                time,
                cost,
            )
        )
    least, fewest = min((need, size) for size, need in needs.items())
    needed = f"{least / GIB:.1f}"
    for gpu, why in missing:
        memory = f"{gpu.memory / GIB:.1f}"
        rows.append((gpu.key, memory, "none", needed, "–", "–", "–", why, "–"))
    columns = ["GPU", "GiB", "GPUs", "needed GiB", "free", "tokens/s each", "MFU %", unit, "cost"]
    if not priced:
        columns.pop()
        rows = [row[:-1] for row in rows]
    sizes = ", ".join(f"{size:,}" for size in needs)
    notes = (
        f"Tried {sizes}: the fewest that the run fits. "
        f"It needs least, {needed} GiB, on {fewest:,}.",
        "Network: that of the slowest AWS machine with 8 of the GPU, else 400 Gbit/s for each GPU.",
        "A plan of one of them: --gpus N --gpu NAME, or --instance TYPE --nodes N.",
    )
    dimmed = [style.dim(note) for note in notes]
    table = render(Table(columns, rows), style.color)
    return "\n".join([_title(runs), "", table, "", *dimmed])


def _title(runs: Mapping[int, RunConfig]) -> str:
    """Return the model, and the tokens of a step by any number of GPUs."""
    tokens = sorted({run.batch.tokens_per_step for run in runs.values()})
    batch = f"{tokens[0]:,}"
    if tokens[-1] != tokens[0]:
        batch += f" to {tokens[-1]:,}"
    return f"{next(iter(runs.values())).model.title}, {batch} tokens per step"
