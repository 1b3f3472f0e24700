"""torch's flight recorder: the last collectives of each rank, written when one fails, for
`torchfrtrace` to compare.

NCCL's watchdog writes the record itself. gloo records too, but nothing writes its record: this
module does.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.exit_codes import is_of_collectives
from titanlite.utils import logger, new_file

#: Environment variables of one meaning; torch takes the first that is set.
_ENTRIES: tuple[str, ...] = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PREFIX: tuple[str, ...] = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT: tuple[str, ...] = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)

#: Longest wait for the records of other ranks. A rank that was killed writes none, and a restart
#: waits for this.
_PATIENCE_SECONDS = 1.0


@contextlib.contextmanager
def recording(
    folder: str, buffer_size: int, device: torch.device
) -> Iterator[None]:
    """Record the last `buffer_size` collectives (0: none), and keep variables that the user has
    set.

    Enter it before process groups, which read the environment. When a collective fails, this rank
    writes its record to `folder`, or for "" to torch's place on GPUs alone. NCCL's watchdog also
    writes on ranks stuck elsewhere, gloo only within a collective.
    """
    wanted = {_ENTRIES: str(buffer_size)}
    if buffer_size > 0 and folder:
        wanted |= {_PREFIX: str(Path(folder).absolute() / "rank_"), _ON_TIMEOUT: "1"}
        if device.type == "cuda":
            with contextlib.suppress(
                OSError
            ):  # a folder that cannot be written to ends the run by other means
                Path(folder).mkdir(parents=True, exist_ok=True)  # the watchdog makes none
    ours = {}
    for names, value in wanted.items():
        if not any(name in os.environ for name in names):
            ours[names[0]] = value
    os.environ.update(ours)
    began = time.time()
    try:
        yield
    except RuntimeError as error:
        if (
            is_of_collectives(error)
            and device.type == "cpu"
            and _PREFIX in wanted
            and dist.is_initialized()
        ):
            _leave_record(began)
        raise  # the environment stays: NCCL's watchdog may be about to read it
    for name in ours:
        os.environ.pop(name, None)


def write_record(path: Path) -> None:
    """Write the collectives of this rank so far, in the form that `torchfrtrace` reads.

    gloo's record lacks the ranks of its groups, without which the tool stops; this adds them.
    """
    from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import _world

    record = pickle.loads(_dump_fr_trace())
    for group, name in _world.pg_names.items():
        known = record["pg_config"].get(name)
        if known is None or not ast.literal_eval(known["ranks"]):
            ranks = sorted(_world.pg_group_ranks[group])
            record["pg_config"][name] = {
                "name": name,
                "desc": group.group_desc,
                "ranks": str(ranks),
            }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")  # the launcher may end this process in the middle
    with new_file(aside) as stream:
        stream.write(pickle.dumps(record))
    aside.rename(path)


def _leave_record(since: float) -> None:
    prefix = next(os.environ[name] for name in _PREFIX if name in os.environ)
    paths = [Path(f"{prefix}{rank}") for rank in range(dist.get_world_size())]
    own = paths[dist.get_rank()]
    try:
        write_record(own)
    except Exception as error:  # report the collective's own error, not this one
        logger.warning(f"the flight recorder's record could not be written to {own}: {error}")
        return
    logger.error(
        f"this rank's last collectives are in {own}; compare the ranks: torchfrtrace {own.parent}"
    )
    # The launcher ends the others as soon as this one is gone; they may be writing theirs.
    until = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until and not all(_is_new(path, since) for path in paths):
        time.sleep(0.1)


def _is_new(path: Path, since: float) -> bool:
    return path.exists() and path.stat().st_mtime >= since
