"""The ranks of tests are copies of a process that has imported all that a plain run imports.

The fork server of `tests.support.ranks` has torch and the trainer. The rest, above all
torch's compiler, which FSDP needs, would be imported in each rank of each run: as long as a tiny
run trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import forkserver

#: What a plain run imports after its start, each with what it imports itself. None waits for disks.
MODULES = (
    "numpy.random",
    "tiktoken",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "xxhash",
    "tests.support.unsynced",
    "titanlite.checkpoint.load",
    "titanlite.checkpoint.manager",
    "titanlite.main",
    "titanlite.models.llama",
    "titanlite.plan.memory",
    "titanlite.runs.lock",
    "titanlite.runs.rank_logs",
    "titanlite.assembly.rank_checks",
    "titanlite.assembly.saves",
    "titanlite.checkpoint.verify_resume",
)

_set_preload = forkserver.set_forkserver_preload


def _set_more(modules: Sequence[str]) -> None:
    _set_preload([*modules, *MODULES])


def preload_more() -> None:
    """Let the fork server that starts later import `MODULES` too."""
    forkserver.set_forkserver_preload = _set_more
