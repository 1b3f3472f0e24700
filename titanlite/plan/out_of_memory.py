"""The report of a run out of memory: its plan, and the keys that lower it."""

from __future__ import annotations

import re

from titanlite.callbacks import SLOW_PHASES
from titanlite.exit_codes import memory_error_of
from titanlite.plan.memory import estimate, with_vocabulary
from titanlite.plan.parts import PARTS
from titanlite.run.config import RunConfig
from titanlite.runs.text_tables import Table, render
from titanlite.utils import human_bytes

#: Settings that lower the memory of most runs.
_REMEDIES = """\
What lowers it, the cheapest in speed first: training.loss_chunks = 8,
training.reshard_after_forward = "always", training.gradient_sync = "every", a smaller
training.batch_size with training.global_batch_size as it is, activation_checkpoint.mode = "full",
tensor or context parallelism, more ranks, training.enable_cpu_offload = true.
`titanlite plan CONFIG --search` proposes the fastest settings that fit."""


def memory_report(run: RunConfig, error: BaseException, where: str, rank: int, device: str) -> str:
    """Return the message of a run out of memory: its plan, and what to change. It raises nothing.

    error: has `memory_error_of`. where: as "backward of step 3". device: "cuda" or "cpu".
    """
    cause = memory_error_of(error) or error
    when = "before the first step" if where == "start" else f"in {where}"
    text = str(cause)
    is_gpu = type(cause).__name__ == "OutOfMemoryError" or re.search("CUD|CUBLAS", text)
    place = "GPU" if is_gpu else "host"
    if "CUDA error: out of memory" in text:
        place = "GPU or pinned host memory"
    lines = [f"out of memory of the {place}, {when}: {error}"]
    if cause is not error:
        lines.append(f"caused by {type(cause).__name__}: {cause}")
    try:
        planned = estimate(with_vocabulary(run), rank, device)
        peak = planned.peak
        sizes = {name: peak.parts.get(name, 0) for name in PARTS}
        sizes |= {f"in host memory: {name}": size for name, size in planned.host.items()}
        sizes["in all, on the device"] = peak.total
        rows = [(name, human_bytes(size)) for name, size in sizes.items() if size]
        table = Table((f"planned for rank {rank}, {peak.place}", ""), rows)
        lines += [render(table, terminal=False), _REMEDIES]
    except Exception as failed:
        # The error itself is the one to be seen.
        lines.append(f"There is no plan to compare with: {failed}")
    phase = where.partition(" ")[0]
    if phase in SLOW_PHASES:
        keys = "validation.batch_size and eval.batch_size count there"
        lines.append(f"The plan is one of training steps, not of the phase {phase}: {keys}")
    lines.append(f"The traceback is in {run.job.dump_folder}/logs/rank_{rank}.log")
    return "\n".join(lines)
