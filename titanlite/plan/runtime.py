"""The report of a run out of memory: its plan, the allocator's figures, what to change."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from titanlite.dist.dist_env import ALLOCATOR
from titanlite.exit_codes import memory_error_of
from titanlite.plan.memory import estimate, with_vocabulary
from titanlite.plan.parts import PARTS, Moment, RankMemory, needed_bytes
from titanlite.plan.peak import APART, APART_BYTES, OTHER_PHASES
from titanlite.plan.process_memory import memory_figures, this_gpu
from titanlite.plan.remedies import Remedy, remedies
from titanlite.run.config import RunConfig
from titanlite.utils import Table, human_bytes, render

_SAVE = "Any of these saves memory, by the plan:"
#: Modules that the report names.
_MODULES = 4

Figures = Mapping[str, float]


def memory_report(run: RunConfig, error: BaseException, where: str, rank: int, device: str) -> str:
    """Return the message of a run that ends for lack of memory: its plan, the allocator's figures,
    what to change.

    error: has `memory_error_of`. where: as "backward of step 3". device: "cuda" or "cpu". It raises
    nothing.
    """
    cause = memory_error_of(error) or error
    place = _place_of(cause)
    when = "before the first step" if where == "start" else f"in {where}"
    # Torch's advice is below with its figures.
    text = str(error).partition(" If reserved but unallocated")[0]
    lines = [f"out of memory of the {place}, {when}: {text}"]
    if cause is not error:
        lines.append(f"caused by {type(cause).__name__}: {cause}")
    figures: Figures = {}
    try:
        figures = memory_figures(cause, device)
        for line in _beside_the_plan(run, figures, rank, device):
            lines.append(line)
    except Exception as failed:
        # The error itself is the one to be seen.
        lines.append(", ".join(f"{name} {human_bytes(size)}" for name, size in figures.items()))
        lines.append(f"There is no plan to compare with: {failed}")
    lines += _other_memory(run, where, of_host=device == "cuda" and place == "host")
    lines += _pieces(figures)
    return "\n".join(lines)


def last_words(run: RunConfig, error: BaseException, where: str, rank: int) -> str:
    """Return `memory_report` for the device of this process, and the step from which the run
    resumes.

    It raises nothing.
    """
    report = str(error)
    steps: list[int] = []
    section = run.checkpoint
    # There may be no memory even for this, or a store that does not answer.
    with contextlib.suppress(Exception):
        import torch

        from titanlite.checkpoint.manifest import FILE, step_folder, steps_in
        from titanlite.checkpoint.paths import to_path

        device = "cuda" if torch.cuda.is_available() else "cpu"
        report = memory_report(run, error, where, rank, device)
        if section.enable_checkpoint:
            root = to_path(section.folder)
            steps = [step for step in steps_in(root) if (step_folder(root, step) / FILE).is_file()]
    kept = "No checkpoint is found"
    if steps:
        start = "With one of these keys the" if _SAVE in report else "The"
        kept = f"{start} run resumes from step {steps[-1]} in {section.folder}"
    return f"{report}\n{kept}. The traceback is in {run.job.dump_folder}/logs/rank_{rank}.log"


def _place_of(cause: BaseException) -> str:
    """Return whose memory is out."""
    text = str(cause)
    if "CUDA error: out of memory" in text:
        return "GPU or pinned host memory"
    is_gpu = type(cause).__name__ == "OutOfMemoryError" or re.search("CUD|CUBLAS", text)
    return "GPU" if is_gpu else "host"


# The plan beside the figures


def _beside_the_plan(run: RunConfig, figures: Figures, rank: int, device: str) -> Iterator[str]:
    """Yield the plan's parts, what the process wants more, and the remedies."""
    run = with_vocabulary(run)
    planned = estimate(run, rank, device)
    yield _table(planned, figures)
    yield f"Modules that need most: {', '.join(_most_needed(planned))}"
    held = figures.get("allocated", 0) + figures.get("request", 0)
    if held > (1 + APART) * planned.peak.total + APART_BYTES:
        more = f"{human_bytes(held - planned.peak.total)} more than planned"
        yield (
            f"The process wants {more}: other memory, which the keys below do not free, or "
            "the plan is wrong"
        )
    found = remedies(run, rank, device, this_gpu(device))
    if found:
        yield _SAVE
    else:
        yield "By the plan, no single key saves much"
    width = max((len(str(one)) for one in found), default=0)
    for one in found:
        cost = "" if one.slower is None else f", about {max(one.slower, 0):.0%} slower"
        enough = ", enough by the plan" if _is_enough(one, planned, figures) else ""
        yield f"  {one!s:<{width}}  saves {human_bytes(one.saves)}{cost}{enough}"


def _is_enough(remedy: Remedy, planned: RankMemory, figures: Figures) -> bool:
    """Return whether the run has the memory with a remedy, by the plan.

    Where the run fits by its plan, the plan does not tell what is missing: the request does.
    """
    memory = figures.get("of the GPU", 0)
    if needed_bytes(planned) <= memory:
        return remedy.saves >= figures.get("request", math.inf)
    return remedy.needed <= memory


def _table(planned: RankMemory, figures: Figures) -> str:
    """Return the plan's parts beside the allocator's figures."""
    peak = planned.peak
    parts = {name: peak.parts[name] for name in PARTS if peak.parts.get(name)}
    parts["in all"] = peak.total
    for name, size in planned.host.items():
        parts[f"in host memory: {name}"] = size
    rows = []
    for planned_one, measured_one in zip_longest(parts.items(), figures.items()):
        rows.append([*_cells(planned_one), *_cells(measured_one)])
    measured = "allocator" if "reserved" in figures else "process"
    columns = (f"planned for rank {planned.rank}, {peak.place}", "", measured, "")
    return render(Table(columns, rows, (0, 2)), terminal=False)


def _cells(entry: tuple[str, float] | None) -> tuple[str, str]:
    """Return a name and its bytes as text."""
    if entry is None:
        return "", ""
    name, size = entry
    return name, human_bytes(size)


def _most_needed(planned: RankMemory) -> list[str]:
    """Return the modules that need most, one of all blocks."""
    most: dict[str, Moment] = {}
    for moment in sorted(planned.moments, key=lambda one: -one.total):
        most.setdefault(re.sub(r"\d+", "N", moment.module), moment)
    first = list(most.values())[:_MODULES]
    return [f"{moment.place} {human_bytes(moment.total)}" for moment in first]


# What else takes memory


def _other_memory(run: RunConfig, where: str, of_host: bool) -> Iterator[str]:
    """Yield what the plan leaves out."""
    phase = where.partition(" ")[0]
    if phase in OTHER_PHASES:
        lower = ""
        if phase == "validate":
            lower = f": lower validation.batch_size (now {run.validation.batch_size})"
        elif phase == "evaluate":
            now = run.eval.batch_size or run.validation.batch_size
            lower = f": lower eval.batch_size (now {now})"
        yield f"The plan is one of training steps, and leaves out the phase {phase}{lower}"
    if of_host:
        yield (
            "Host memory also holds copies of checkpoints in the background "
            "(checkpoint.async_mode) and prepared batches (data.num_workers)"
        )


def _pieces(figures: Figures) -> Iterator[str]:
    """Yield advice where memory is there, but in pieces that are too small."""
    unused = figures.get("reserved", 0) - figures.get("allocated", 0)
    in_pieces = unused > figures.get("request", unused)
    chosen = " ".join(f"{name}={os.environ[name]}" for name in ALLOCATOR if name in os.environ)
    if in_pieces and chosen and "expandable_segments:True" not in chosen:
        yield (
            f"{human_bytes(unused)} are reserved and not allocated, in pieces that are too small: "
            f"without {chosen} the allocator has expandable segments, which it can join, at no "
            "cost"
        )
