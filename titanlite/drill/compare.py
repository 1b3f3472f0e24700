"""Two checkpoints side by side, in a process of its own: the one that asks has no torch."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

from titanlite.drill.ranks import PATIENCE_SECONDS, RanksError, prepare


def unequal_tensors(left: Path, right: Path) -> list[str]:
    """Names of tensors that are not the same bit for bit, or that only one has. Raises RanksError."""
    prepare()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_compare, args=(left, right, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(PATIENCE_SECONDS) else "it took too long"
    except EOFError:
        found = "the process that compares them died"
    process.kill()
    process.join()
    if isinstance(found, str):
        raise RanksError(f"{left} and {right} cannot be compared: {found}")
    return list(found)


def _compare(left: Path, right: Path, answer: Connection) -> None:
    from titanlite.tools.tensors import Contents, compare

    try:
        unequal = [one.name for one in compare(Contents(left), Contents(right)) if one.elements or not one.comparable]
    except Exception as error:
        answer.send(str(error) or repr(error))
    else:
        answer.send(unequal)
