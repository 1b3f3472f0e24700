"""What the environment says about this process and the other ranks: torchrun's variables, checked. No torch here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from titanlite import exit_codes

_WHOLE = re.compile(r"\s*-?\d{1,9}\s*")
_NO_LIMIT = 10**9


class WorldError(RuntimeError):
    """The environment's description of the ranks is incomplete, contradicts itself or cannot be used."""

    exit_code = exit_codes.CONFIG


@dataclass(frozen=True)
class Environment:
    """One process among the ranks of a run."""

    rank: int
    #: Ranks in all.
    size: int
    #: The number of this rank on its node.
    local_rank: int
    #: Ranks on this node; where nothing says so, as many as `local_rank` shows.
    local_size: int
    #: Host and port of the run's store; None for one process alone.
    address: tuple[str, int] | None


def read_environment(joined: tuple[int, int] | None = None) -> Environment:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; one process without them.

    joined: rank and size of a process group that exists already; only the two about this node are read then. Raises
    WorldError, which names everything that is wrong and what to do.
    """
    problems: list[str] = []

    def number(name: str, default: int | None, low: int, high: int, meaning: str, partner: str = "WORLD_SIZE") -> int:
        text = os.environ.get(name)
        if text is None and default is not None and low <= default <= high:
            return default
        if text is None:
            advice = f"start with torchrun or ./run_llama_train.sh, or unset {partner}"
            problems.append(f"{name} is not set, but {partner} is: {advice}")
        elif not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
            span = f"of at least {low}" if high == _NO_LIMIT else f"from {low} to {high}"
            problems.append(f"{name} is {text!r}, expected a whole number {span}: {meaning}")
        else:
            return int(text)
        return low

    alone = os.environ.get("RANK", "0").strip() == "0"
    if joined is None:
        size = number("WORLD_SIZE", 1 if alone else None, 1, _NO_LIMIT, "the number of ranks", "RANK")
    else:
        rank, size = joined
    if not problems:  # the others are measured by it
        local_size = number("LOCAL_WORLD_SIZE", size, 1, size, f"the ranks of this node, of {size} in all (WORLD_SIZE)")
        if joined is None:
            rank = number("RANK", 0 if size == 1 else None, 0, size - 1, f"WORLD_SIZE is {size}")
        by = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE"
        local_rank = number("LOCAL_RANK", rank, 0, local_size - 1, f"{by} is {local_size}", by)
        host, port = os.environ.get("MASTER_ADDR", "").strip(), 0
        if size > 1 and joined is None:
            if not host:
                problems.append("MASTER_ADDR is not set, but WORLD_SIZE is: set it to the host of rank 0")
            port = number("MASTER_PORT", None, 1, 65535, "a free port of the host of rank 0")
    if problems:
        one = len(problems) == 1
        head = "environment variable " if one else f"{len(problems)} environment variables are wrong:\n  "
        raise WorldError(head + "\n  ".join(problems))
    known = local_size if "LOCAL_WORLD_SIZE" in os.environ else local_rank + 1
    return Environment(rank, size, local_rank, known, (host, port) if port else None)
