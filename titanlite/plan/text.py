"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.plan.parts import FRAGMENTATION, GIB, PARTS, needed_bytes
from titanlite.plan.plan import Plan
from titanlite.runs.text_tables import Style, Table, render
from titanlite.utils import counted, human_bytes, human_count

_BAR = 24
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "s": 1}


def plan_text(plan: Plan, style: Style) -> str:
    """Return the plan: verdict, memory by part, speed, time and disk."""
    good = style.good if plan.fits else style.warn
    lines = [good(verdict(plan)), "", memory_table(plan, style), ""]
    lines += [f"  {label:<12} {text}" for label, text in plan_rows(plan)]
    lines += [style.dim(f"  assumed      {text}") for text in plan.speed.assumptions]
    return "\n".join(lines)


def verdict(plan: Plan) -> str:
    """Return one line: whether the run fits, and by how much."""
    share = plan.margin / plan.cluster.gpu.memory
    amount = f"{abs(plan.margin) / GIB:.1f} GiB ({abs(share):.0%})"
    if plan.margin < 0:
        says = f"does not fit: {amount} are missing"
    elif not plan.fits:
        says = "does not fit: a machine needs more host memory than it has"
    elif share < FRAGMENTATION:
        says = f"fits barely, with {amount} to spare, less than the plan's error"
    else:
        says = f"fits, with {amount} to spare"
    gpus = f"{plan.run.mesh.world_size} x {plan.cluster.gpu.key}"
    return f"{plan.run.model.title} on {gpus} {says}"


def memory_table(plan: Plan, style: Style) -> str:
    """Return the parts at the peak, each with a bar of its share of the GPU."""
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
    """Yield label and text of all but GPU memory."""
    speed = plan.speed
    yield "peak", f"in the {plan.memory.peak.place}"
    rate = f"{speed.tokens_per_second:,.0f} tokens/s per GPU"
    between = f"{speed.low:,.0f} to {speed.high:,.0f}"
    yield "speed", f"{rate} ({between}), MFU {100 * speed.mfu:.1f} %"
    tokens = f"{plan.run.batch.tokens_per_step:,} tokens"
    yield "step", f"{tokens} in {_seconds(speed.step_seconds)}: {_largest(plan)}"
    if len(plan.legs) > 1:
        for leg in plan.legs:
            batch = leg.run.batch
            sequences = counted(batch.global_batch_size, "sequences")
            time = f"{_seconds(leg.speed.step_seconds)} a step"
            if leg.seconds is not None and leg.steps is not None:
                time += f", {_time(leg.seconds)} for {counted(leg.steps, 'steps')}"
            memory = f"{needed_bytes(leg.memory) / GIB:.2f} GiB needed"
            text = f"{sequences} of {batch.seq_len:,} tokens: {time}; {memory}"
            yield f"step {leg.first:,}", text
    steps = plan.run.steps
    if steps is not None and plan.seconds is not None:
        tokens = human_count(plan.run.course.tokens_after(steps))
        fast = _time(plan.seconds * speed.tokens_per_second / speed.high)
        slow = _time(plan.seconds * speed.tokens_per_second / speed.low)
        time = _time(plan.seconds)
        yield "run", f"{counted(steps, 'steps')}, {tokens} tokens in {time} ({fast} to {slow})"
    yield "host memory", _host(plan)
    if plan.checkpoint:
        yield "checkpoints", f"{human_bytes(plan.checkpoint)} each"


def _host(plan: Plan) -> str:
    shown = [(name, size) for name, size in plan.host.items() if size >= GIB / 20]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in shown)
    host = plan.cluster.host
    of = "" if host is None else f" of {host / GIB:,.0f}"
    return f"{plan.host_needed / GIB:,.1f}{of} GiB on each machine: {parts}"


def _largest(plan: Plan) -> str:
    """Return the parts of at least a hundredth of a step, longest first."""
    speed = plan.speed
    found = []
    for name, seconds in sorted(speed.parts.items(), key=lambda part: -part[1]):
        if seconds >= speed.step_seconds / 100:
            found.append(f"{name} {_seconds(seconds)}")
    return ", ".join(found)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _time(seconds: float) -> str:
    """Return a time in the largest unit of which it has two, else seconds."""
    unit = next((unit for unit, size in _UNITS.items() if seconds >= 2 * size), "s")
    number = seconds / _UNITS[unit]
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.1f} {unit}"
