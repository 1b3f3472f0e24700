"""What the launcher says about a rank: RANK, WORLD_SIZE and others.

This module imports torch inside a function, since `titanlite.main` checks the variables before the
import of torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from titanlite.parallel import ParallelismError

#: Longest wait at the start for the processes of the other ranks, and for connections to them.
RENDEZVOUS_SECONDS = 60.0

_INTEGER = re.compile(r"\s*-?\d{1,9}\s*")


_NO_LIMIT = 10**9


@dataclass(frozen=True)
class LaunchEnv:
    """What the launcher says about one rank."""

    rank: int
    world_size: int
    #: Number of this rank on its node.
    local_rank: int
    #: Ranks on this node; as many as `local_rank` shows where LOCAL_WORLD_SIZE is not set.
    local_world_size: int
    #: Host and port of the store; None for a single process.
    address: tuple[str, int] | None


def read_launch_env(group: tuple[int, int] | None = None) -> LaunchEnv:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a single
    process has none.

    group: rank and size of an existing process group, which stand for the variables.
    Raises ParallelismError that names all wrong variables and the remedies.
    """
    problems: list[str] = []
    given = {} if group is None else {"RANK": str(group[0]), "WORLD_SIZE": str(group[1])}
    environ = {**os.environ, **given}

    def number(name: str, low: int, high: int, default: int | None, meaning: str) -> int:
        """Return a variable's number; of one that is not set `default`. None: it must be set."""
        text = environ.get(name)
        if text is None and default is not None and low <= default <= high:
            return default
        if text is None:
            problems.append(
                f"{name} is not set, but {by} is: start with torchrun or ./run_llama_train.sh, or "
                f"unset {by}"
            )
        elif not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
            span = f"of at least {low}" if high == _NO_LIMIT else f"from {low} to {high}"
            problems.append(f"{name} is {text!r}, expected a whole number {span}: {meaning}")
        else:
            return int(text)
        return low

    by, address = "RANK", None
    alone = environ.get("RANK", "0").strip() == "0"
    size = number("WORLD_SIZE", 1, _NO_LIMIT, 1 if alone else None, "the number of ranks")
    if not problems:  # the limits of the others depend on it
        by = "WORLD_SIZE"
        local_size = number(
            "LOCAL_WORLD_SIZE",
            1,
            size,
            size,
            f"the ranks of this node, of {size} in all (WORLD_SIZE)",
        )
        rank = number("RANK", 0, size - 1, 0 if size == 1 else None, f"WORLD_SIZE is {size}")
        if size > 1 and group is None:
            address = (
                environ.get("MASTER_ADDR", "").strip(),
                number("MASTER_PORT", 1, 65535, None, "a free port"),
            )
            if not address[0]:
                problems.append(
                    "MASTER_ADDR is not set, but WORLD_SIZE is: set it to the host of rank 0"
                )
        by = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else by
        local_rank = number("LOCAL_RANK", 0, local_size - 1, rank, f"{by} is {local_size}")
    if problems:
        one, count = len(problems) == 1, len(problems)
        head = "environment variable " if one else f"{count} environment variables are wrong:\n  "
        raise ParallelismError(head + "\n  ".join(problems))
    return LaunchEnv(
        rank, size, local_rank, local_size if by == "LOCAL_WORLD_SIZE" else local_rank + 1, address
    )


def this_rank() -> LaunchEnv:
    """Return this process among the ranks, by the existing process group or else by the
    environment.
    """
    import torch.distributed as dist

    return read_launch_env(
        (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    )
