"""What the launcher says about a rank: RANK, WORLD_SIZE and others.

This module imports torch inside a function, since `titanlite.main` checks the variables before the
import of torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from titanlite.dist import ParallelismError

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
    """Read the rank's variables of the launcher; a single process has none.

    `group` is rank and size of an existing process group, which replace them. Raises
    ParallelismError that names all wrong variables and the remedies.
    """
    given = {} if group is None else {"RANK": str(group[0]), "WORLD_SIZE": str(group[1])}
    read = _Variables({**os.environ, **given})
    is_first = read.text("RANK", "0") == "0"
    size = read.number("WORLD_SIZE", 1, _NO_LIMIT, 1 if is_first else None, "the number of ranks")
    # The limits of the others depend on it.
    read.check()
    read.by = "WORLD_SIZE"
    meaning = f"the ranks of this node, of {size} in all (WORLD_SIZE)"
    local_size = read.number("LOCAL_WORLD_SIZE", 1, size, size, meaning)
    rank = read.number("RANK", 0, size - 1, 0 if size == 1 else None, f"WORLD_SIZE is {size}")
    address = None
    if size > 1 and group is None:
        host = read.text("MASTER_ADDR")
        address = host, read.number("MASTER_PORT", 1, 65535, None, "a free port")
        if not host:
            read.problems.append(
                "MASTER_ADDR is not set, but WORLD_SIZE is: set it to the host of rank 0"
            )
    knows_local_size = "LOCAL_WORLD_SIZE" in read.environ
    if knows_local_size:
        read.by = "LOCAL_WORLD_SIZE"
    local_rank = read.number("LOCAL_RANK", 0, local_size - 1, rank, f"{read.by} is {local_size}")
    read.check()
    if not knows_local_size:
        local_size = local_rank + 1
    return LaunchEnv(rank, size, local_rank, local_size, address)


class _Variables:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[str] = []
        #: The variable because of which others must be set.
        self.by = "RANK"

    def text(self, name: str, default: str = "") -> str:
        return self.environ.get(name, default).strip()

    def number(self, name: str, low: int, high: int, default: int | None, meaning: str) -> int:
        """A `default` of None means that the variable must be set."""
        text = self.environ.get(name)
        if text is None and default is not None and low <= default <= high:
            return default
        if text is None:
            self.problems.append(
                f"{name} is not set, but {self.by} is: start with torchrun or "
                f"./run_llama_train.sh, or unset {self.by}"
            )
        elif not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
            span = f"of at least {low}" if high == _NO_LIMIT else f"from {low} to {high}"
            self.problems.append(f"{name} is {text!r}, expected a whole number {span}: {meaning}")
        else:
            return int(text)
        return low

    def check(self) -> None:
        if not self.problems:
            return
        head = "environment variable "
        if len(self.problems) > 1:
            head = f"{len(self.problems)} environment variables are wrong:\n  "
        raise ParallelismError(head + "\n  ".join(self.problems))


def this_rank() -> LaunchEnv:
    """Return this process among the ranks, by process group or environment."""
    import torch.distributed as dist

    return read_launch_env(
        (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    )
