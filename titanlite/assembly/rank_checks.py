"""Checks of all ranks before the first step: equal versions, code and config, sound devices, a
shared folder.

    warnings = check_ranks(world, config=run.toml, folder=Path("/shared/run"))  # all ranks together

A difference between ranks ends the run here, with the ranks and hosts that differ. All else that is
odd is a warning. The check draws no number from torch's or Python's generators and frees what it
allocates.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import titanlite
from titanlite import exit_codes
from titanlite.checkpoint.store_paths import StorePath, to_path
from titanlite.dist.dist_env import DistEnv, gather_objects
from titanlite.metrics.throughput import device_name
from titanlite.runs import provenance
from titanlite.runs.config_changes import config_changes
from titanlite.utils import counted, human_bytes, human_time, logger

if TYPE_CHECKING:
    from titanlite.assembly.datasets import Datasets
    from titanlite.run.config import RunConfig


#: Seconds in which another host must see a new file. File systems keep what they have read of a
#: folder for a while.
_FOLDER_SECONDS = 5.0
#: Rows of the matrices.
_ROWS = {"cuda": 4096, "cpu": 256}
#: Seconds of products on a GPU, and products at least.
_SECONDS, _PRODUCTS = 0.15, 6
_MOST_NAMED = 8
#: An absolute path as JSON, or none.
_PATH = re.compile(r'"[/~][^"]*"|\(not set\)')


class RankCheckError(RuntimeError):
    """The ranks differ, or one of them computes wrong results. All ranks raise it."""

    exit_code = exit_codes.CONFIG
    together = True


@dataclass(frozen=True)
class Rank:
    """The facts that are known about a rank."""

    number: int
    host: str
    local_rank: int
    device: str
    #: Ranks of the same kind must compute the same bits.
    kind: str
    #: Must be equal on all ranks, by name.
    facts: dict[str, str]
    #: How its config differs from that of rank 0: in paths and [launch], and in other keys.
    local_keys: str
    other_keys: str
    #: Hashes of the bits of products that should be equal; empty: other ranks may have other bits.
    digests: tuple[int, ...] = ()
    sees_folder: bool = True

    def __str__(self) -> str:
        return f"rank {self.number} ({self.host}, local rank {self.local_rank}, {self.device})"


def compare_ranks(run: RunConfig, world: DistEnv, datasets: Datasets) -> None:
    """Compare and try all ranks, for a run with this text. Raises RankCheckError."""
    saves = run.checkpoint.enable_checkpoint
    place = to_path(run.checkpoint.folder if saves else run.job.dump_folder)
    texts = {"training": datasets.train.fingerprint}
    for name, rows in datasets.validation.items():
        texts[f"validation {name}".strip()] = rows.fingerprint
    check_ranks(
        world,
        config=run.toml,
        texts=texts,
        folder=None if isinstance(place, StorePath) else place,
        needs_folder=saves,
    )


def check_ranks(
    world: DistEnv,
    *,
    config: str = "",
    texts: Mapping[str, str] | None = None,
    folder: Path | None = None,
    needs_folder: bool = True,
) -> list[str]:
    """Compare and try all ranks; log findings on rank 0 and return them.

    All ranks call it together.

    config: TOML text that must be equal. texts: fingerprints that must be equal, by name.
    folder: must be one folder for all hosts; None: not checked.
    needs_folder: a folder that is not shared is an error, else a warning.
    Raises RankCheckError on all ranks.
    """
    if world.size == 1:
        return []
    began = time.perf_counter()
    probe = None
    # If rank 0 itself cannot write, its other files will tell.
    with contextlib.suppress(OSError):
        if world.rank == 0 and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            made = folder / f".ranks-{uuid.uuid4().hex}"
            made.write_bytes(b"")
            probe = made
    mine = provenance.public_config(config)
    try:
        first, written = world.broadcast((mine, probe))
        rank = _describe(world, texts or {}, first, mine)
        _refuse(_differences(gather_objects(rank)))
        sees_folder = folder is None or written is None or _sees(folder / written.name)
        digests = products(world.device)
        ranks = gather_objects(replace(rank, digests=digests, sees_folder=sees_folder))
    finally:
        if probe is not None:
            with contextlib.suppress(OSError):
                probe.unlink()
    problems = [*_wrong_products(ranks)]
    warnings = [*_odd_ranks(ranks)]
    blind = [rank for rank in ranks if not rank.sees_folder]
    if written is not None and blind:
        (problems if needs_folder else warnings).append(
            f"the folder {str(written.parent)!r} is not shared: {_named(ranks[:1])} writes there, "
            f"and {_named(blind)} cannot see its files. Each host would keep its own part of a "
            "checkpoint: set job.dump_folder or checkpoint.folder to a folder of a file system "
            "that all hosts mount, or checkpoint.folder to an s3:// URL"
        )
    _refuse(problems)
    if world.rank == 0:
        for warning in warnings:
            logger.warning(warning)
        hosts = counted(len({rank.host for rank in ranks}), "hosts")
        took = human_time(time.perf_counter() - began)
        logger.info(f"{len(ranks)} ranks on {hosts} agree, checked in {took}")
    return warnings


def _refuse(problems: Iterable[str]) -> None:
    text = "\n".join(problems)
    if text:
        raise RankCheckError(text)


# Values that must be equal


def _describe(world: DistEnv, texts: Mapping[str, str], first: str, mine: str) -> Rank:
    """`first` and `mine` are configs of rank 0 and of this rank."""
    code = hashlib.sha256()
    for path in sorted(Path(titanlite.__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    facts = {
        **provenance.versions(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "the code of titanlite": code.hexdigest()[:8],
        **{f"text for {name}": fingerprint[:8] for name, fingerprint in texts.items()},
    }
    device = device_name(world.device)
    kind = f"{device}, {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}"
    if world.device.type == "cuda":
        about = torch.cuda.get_device_properties(world.device)
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        device = f"{device}, {human_bytes(about.total_memory)}"
        kind = f"{device}, {about.major}.{about.minor}, {about.multi_processor_count}"
    local: list[str] = []
    other: list[str] = []
    for key, change in config_changes(first, mine).items():
        # Hosts may have other paths and another [launch].
        before, _, now = _PATH.sub("path", change).partition(" -> ")
        is_local = before == now or key.startswith("launch.")
        (local if is_local else other).append(f"{key} {change}")
    return Rank(
        number=world.rank,
        host=socket.gethostname(),
        local_rank=world.local_rank,
        device=device,
        kind=kind,
        facts=facts,
        local_keys=", ".join(local[:_MOST_NAMED]),
        other_keys=", ".join(other[:_MOST_NAMED]),
    )


def _differences(ranks: Sequence[Rank]) -> Iterator[str]:
    for name in dict.fromkeys(name for rank in ranks for name in rank.facts):
        groups = _groups(ranks, [rank.facts.get(name, "none") for rank in ranks])
        if len(groups) > 1:
            yield (
                f"the ranks differ in {name}: {_shares(groups)}. Give all hosts the same packages, "
                "files and order of files"
            )
    for keys, group in _groups(ranks, [rank.other_keys for rank in ranks]).items():
        if keys:
            yield (
                f"rank 0 has another config than {_named(group)}: {keys}. Start all ranks with one "
                "file"
            )


# Measurements


def products(device: torch.device) -> tuple[int, ...]:
    """Return the digests of several products of two fixed matrices, equal ones once."""
    rows = _ROWS[device.type]
    dtype, bits, seconds = torch.float32, torch.int32, 0.0
    if device.type == "cuda":
        dtype, bits, seconds = torch.bfloat16, torch.int16, _SECONDS
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(rows, rows, generator=generator, device=device, dtype=dtype)
    b = torch.randn(rows, rows, generator=generator, device=device, dtype=dtype)
    made = torch.empty_like(a)
    digests: list[int] = []
    until = time.perf_counter() + seconds
    while len(digests) < _PRODUCTS or time.perf_counter() < until:
        torch.mm(a, b, out=made)
        digests.append(int(made.view(bits).sum(dtype=torch.int64)))
    if device.type == "cuda":
        # The run's own peaks begin with the model.
        del a, b, made
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    found = tuple(dict.fromkeys(digests))
    if os.environ.get("PYTORCH_TUNABLEOP_ENABLED") == "1" and len(found) == 1:
        # Each rank chooses its kernels by time: their bits may differ.
        found = ()
    return found


def _wrong_products(ranks: Sequence[Rank]) -> Iterator[str]:
    compared = [rank for rank in ranks if rank.digests]
    for group in _groups(compared, [rank.kind for rank in compared]).values():
        common, votes = Counter(rank.digests for rank in group).most_common(1)[0]
        # Their own products differ, or else those of a minority.
        odd = [rank for rank in group if len(rank.digests) > 1]
        if not odd and 2 * votes > len(group):
            odd = [rank for rank in group if rank.digests != common]
        elif not odd:
            odd = group
        if odd:
            which = "wrong numbers are computed"
            if len(odd) == len(group):
                which = "one of these computes wrong numbers"
            names = ", ".join(map(str, odd[:_MOST_NAMED]))
            yield (
                f"the same matrix product has other bits: {which}: {names}. Leave the host out, "
                "and test it"
            )


def _odd_ranks(ranks: Sequence[Rank]) -> Iterator[str]:
    for keys, group in _groups(ranks, [rank.local_keys for rank in ranks]).items():
        if keys:
            yield (
                f"rank 0 has another config than {_named(group)}: {keys}. These may differ if all "
                "hosts find the same there"
            )
    devices = _groups(ranks, [rank.device for rank in ranks])
    if len(devices) > 1:
        yield f"the ranks have different devices: {_shares(devices)}. The slowest decides the speed"


# The folder


def _sees(probe: Path) -> bool:
    until = time.monotonic() + _FOLDER_SECONDS
    while not os.path.exists(probe):  # False for a folder that may not be read, too
        if time.monotonic() > until:
            return False
        for folder in (probe.parent.parent, probe.parent):  # a network file system looks again
            with contextlib.suppress(OSError):
                os.listdir(folder)
        time.sleep(0.2)
    return True


# Words


def _groups(ranks: Sequence[Rank], values: Sequence[str]) -> dict[str, list[Rank]]:
    found: dict[str, list[Rank]] = defaultdict(list)
    for rank, value in zip(ranks, values, strict=True):
        found[value].append(rank)
    return found


def _shares(groups: Mapping[str, Sequence[Rank]]) -> str:
    return ", ".join(f"{value} on {_named(group)}" for value, group in groups.items())


def _named(ranks: Sequence[Rank]) -> str:
    runs = groupby(enumerate(ranks), lambda pair: pair[1].number - pair[0])
    numbers = []
    for _, run in runs:
        first, *rest = [str(rank.number) for _, rank in run]
        numbers.append(f"{first}-{rest[-1]}" if rest else first)
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    more = ", …" if len(hosts) > _MOST_NAMED else ""
    names = f"{', '.join(numbers[:_MOST_NAMED])} ({', '.join(hosts[:_MOST_NAMED])}{more})"
    return f"rank{'s' * (len(ranks) > 1)} {names}"
