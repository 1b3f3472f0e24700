"""Rows of the start report that the plan has."""

from __future__ import annotations

from titanlite.plan.memory import NoFormula, estimate, with_vocabulary
from titanlite.plan.parts import GIB, needed_bytes
from titanlite.run.config import RunConfig


def start_rows(run: RunConfig, vocab_size: int, total: int) -> list[tuple[str, str]]:
    """Return the start report's row, none for a model without formulas. total: bytes of one GPU.

    A CPU has no rows: most of a process's memory is not tensors. It raises nothing.
    """
    try:
        planned = estimate(with_vocabulary(run, vocab_size))
    except NoFormula:
        return []
    except Exception as error:
        return [("note", f"the memory of this run is not planned: {type(error).__name__}: {error}")]
    size = planned.peak.total
    of_rank = f", on rank {planned.rank}" if run.mesh.pipeline > 1 else ""
    needed = f"{needed_bytes(planned) / GIB:,.1f} with overhead"
    # Formulas do not know what a compiler saves.
    word = "planned at most" if run.training.compile else "planned"
    text = f"{size / GIB:,.1f} GiB of tensors, {needed}, of {total / GIB:,.1f} per GPU"
    rows = [("memory", f"{word} {text}, in {planned.peak.place}{of_rank}")]
    if needed_bytes(planned) > total:
        text = "by the plan this run needs more memory than a GPU has: it may end with code 8"
        rows.append(("warning", text))
    return rows
