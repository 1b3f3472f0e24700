"""All ranks together compare a checkpoint with what was written: before it is loaded, and before it gets its name."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch.distributed as dist

from titanlite.checkpoint.index import INDEX
from titanlite.checkpoint.integrity import Progress, check_files, share
from titanlite.checkpoint.manifest import CheckpointError, Manifest
from titanlite.checkpoint.place import Place, StoreError
from titanlite.parallel.dist_env import DistEnv
from titanlite.utils import human_bytes, logger

#: How often it is said how far the comparison with the hashes has come.
_TELL_SECONDS = 10.0


def compare_to_load(folder: Place, manifest: Manifest, world: DistEnv, every_byte: bool) -> str | None:
    """What is wrong with a checkpoint's contents, the same answer on all ranks; None when nothing is.

    Each rank reads its share of the files, and the index, which all will read; without every_byte that alone.

    Raises CheckpointError, on all of them, when one of them cannot read, which says nothing of the checkpoint.
    """
    names = share(manifest.files, world.rank, world.size) if every_byte else []
    if INDEX in manifest.files and INDEX not in names:
        names.append(INDEX)
    return _compare(folder, manifest, names, world, None)


def compare_what_was_saved(
    folder: Place, manifest: Manifest, writers: Mapping[str, int], world: DistEnv, group: dist.ProcessGroup
) -> str | None:
    """As `compare_to_load`, right after a save. writers: name → rank; group: by which all ranks tell each other."""
    names = [name for name, writer in writers.items() if reader_of(writer, world.size) == world.rank]
    return _compare(folder, manifest, names, world, group)


def reader_of(writer: int, ranks: int) -> int:
    """The rank that reads what `writer` has written: on another host, if there is more than one, whose memory does not
    hold what the disks do not."""
    return (writer + ranks // 2) % ranks


def _compare(
    folder: Place, manifest: Manifest, names: list[str], world: DistEnv, group: dist.ProcessGroup | None
) -> str | None:
    mine: tuple[list[str], str]
    try:
        mine = check_files(folder, manifest, names, _told(folder, world)), ""
    except StoreError as error:
        mine = [], f"rank {world.rank} cannot read {error}"
    except Exception as error:  # the others wait for this rank's answer, whatever happened here
        mine = [], f"rank {world.rank} cannot read {folder}: {error!r}"
    found = [mine] * world.size
    dist.all_gather_object(found, mine, group)
    if unread := sorted(words for _, words in found if words):
        raise CheckpointError("; ".join(unread))
    problems = sorted({problem for part, _ in found for problem in part})
    if not problems:
        return None
    more = f" (and {len(problems) - 1} more of its files)" if len(problems) > 1 else ""
    return problems[0] + more


def _told(folder: Place, world: DistEnv) -> Progress:
    """Says every ten seconds how far it has come."""
    told = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            part = " of this rank's part" if world.size > 1 else ""
            logger.info(f"comparing {folder} with its hashes: {human_bytes(done)} of {human_bytes(total)}{part}")

    return progress
