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
import socket
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

import titanlite
from titanlite import exit_codes
from titanlite.checkpoint.paths import StorePath, to_path
from titanlite.config.extensions import ANCHORED
from titanlite.config.key_types import inner_section
from titanlite.config.keys import keys, sections
from titanlite.config.value_types import paths
from titanlite.dist.dist_env import DistEnv, gather_objects
from titanlite.dist.interfaces import INTERFACES, interface_problem
from titanlite.metrics.throughput import device_name
from titanlite.runs import provenance
from titanlite.utils import counted, human_bytes, human_time, logger

if TYPE_CHECKING:
    from titanlite.assembly.datasets import Datasets
    from titanlite.run.config import RunConfig


#: Seconds between the clocks of two hosts from which they are reported.
CLOCK_SECONDS = 2.0
#: A product that takes this many times the median is reported. Programs share the cores of a CPU.
SLOW_FACTOR = {"cuda": 1.3, "cpu": 4.0}
#: Memory of a GPU in use before the run: its share, and the bytes that CUDA itself may need.
_USED_SHARE, _CONTEXT_BYTES = 0.1, 1 << 29
#: Seconds in which another host must see a new file. File systems keep what they have read of a
#: folder for a while.
_FOLDER_SECONDS = 5.0
#: Elements of the all-reduce, and rows of the matrices.
_ELEMENTS, _ROWS = {"cuda": 1 << 24, "cpu": 1 << 18}, {"cuda": 4096, "cpu": 256}
#: Seconds of products on a GPU, whose clock needs some time to rise, and products at least.
_WARM_SECONDS, _PRODUCTS = 0.15, 6
_MOST_NAMED = 8
_SAME = "Install the same on all hosts"


class RankCheckError(RuntimeError):
    """The ranks differ, or one of them computes wrong results. All ranks raise it."""

    exit_code = exit_codes.CONFIG
    together = True


class Rank(NamedTuple):
    """Facts of a rank, gathered before the measurements."""

    number: int
    host: str
    #: Tells machines with one name apart.
    boot: str
    local_rank: int
    #: By name: `versions` must be equal on all ranks, `hardware` should be. It has "devices".
    versions: dict[str, str]
    hardware: dict[str, str]
    #: Ranks of the same kind must compute the same bits.
    kind: str
    #: Hashes of titanlite's files and of the config.
    code: str
    config: str
    #: Texts by name, as their fingerprints.
    texts: dict[str, str]
    #: The file that rank 0 has written to the run's folder.
    probe: str

    def __str__(self) -> str:
        return (
            f"rank {self.number} ({self.host}, local rank {self.local_rank}, "
            f"{self.hardware['devices']})"
        )


class Measured(NamedTuple):
    """Results of a rank; times in seconds, each the shortest of several."""

    #: Whether each element of the all-reduce was right.
    sum_is_right: bool
    sum_seconds: float
    #: Of an all-reduce of four bytes.
    latency: float
    product_seconds: float
    #: Of the bits of products that should be equal; empty: other ranks may have other bits.
    digests: tuple[int, ...]
    #: Its clock right after a collective.
    clock: float
    sees_folder: bool
    #: What is odd about its GPU's memory and, with several hosts, about its network interfaces.
    notes: list[str]


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
    if world.rank == 0 and folder is not None:
        probe = _write_probe(folder)
    try:
        ranks = gather_objects(_describe(world, config, texts or {}, probe))
        config_problems, warnings = _config_findings(ranks, config)
        _refuse([*_version_problems(ranks), *config_problems, *_text_problems(ranks)])
        hosts = _first_ranks(ranks)
        asked = folder if ranks[0].probe and ranks[world.rank] in hosts else None
        sees_folder = asked is None or _sees(asked / Path(ranks[0].probe).name)
        found = gather_objects(_measure(world, sees_folder, len(hosts) > 1))
    finally:
        if probe is not None:
            with contextlib.suppress(OSError):
                probe.unlink()
    problems = _result_problems(ranks, found)
    warnings += _result_warnings(ranks, hosts, found, world.device.type)
    blind = [rank for rank in ranks if not found[rank.number].sees_folder]
    if blind:
        (problems if needs_folder else warnings).append(_folder_text(ranks[0], blind))
    _refuse(problems)
    if world.rank == 0:
        for warning in warnings:
            logger.warning(warning)
        seconds = time.perf_counter() - began
        logger.info(_summary(len(hosts), found, world.device.type, seconds))
    return warnings


def _refuse(problems: Sequence[str]) -> None:
    """Raise RankCheckError if there are problems."""
    if problems:
        raise RankCheckError("\n".join(problems))


def _first_ranks(ranks: Sequence[Rank]) -> list[Rank]:
    """Return one rank of each host: the first."""
    found: dict[tuple[str, str], Rank] = {}
    for rank in ranks:
        found.setdefault((rank.host, rank.boot), rank)
    return list(found.values())


def _result_warnings(
    ranks: Sequence[Rank], hosts: Sequence[Rank], found: Sequence[Measured], device_type: str
) -> list[str]:
    """Return what is odd and ends no run. hosts: the first rank of each."""
    warnings = []
    for name, shares in _differences(ranks, [rank.hardware for rank in ranks]).items():
        warnings.append(f"the ranks have different {name}: {shares}. The slowest decides the speed")
    warnings += _speed_warnings(ranks, found, device_type)
    warnings += _notes(ranks, found)
    if len(hosts) > 1:
        warnings += _clock_warnings(hosts, found)
    return warnings


def _summary(hosts: int, found: Sequence[Measured], device_type: str, seconds: float) -> str:
    """Return the line about ranks that agree. hosts: their number."""
    size = 4 * _ELEMENTS[device_type]
    slowest = max(result.sum_seconds for result in found)
    latency = max(result.latency for result in found)
    product = median(result.product_seconds for result in found)
    operations = 2 * _ROWS[device_type] ** 3
    return (
        f"{len(found)} ranks on {counted(hosts, 'hosts')} agree, checked in "
        f"{human_time(seconds)}: all-reduce of {human_bytes(size)} "
        f"{size / slowest / 1e9:.3g} GB/s, of 4 bytes {latency * 1e6:.0f} µs, product "
        f"{operations / product / 1e12:.3g} TFLOPS"
    )


def _describe(world: DistEnv, config: str, texts: Mapping[str, str], probe: Path | None) -> Rank:
    versions = {
        **provenance.versions(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
    }
    name = device_name(world.device)
    hardware = {"devices": name}
    kind = f"{torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}"
    if world.device.type == "cuda":
        about = torch.cuda.get_device_properties(world.device)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        kind = f"{about.major}.{about.minor}, {about.multi_processor_count}, {about.total_memory}"
        hardware["drivers"] = _read("/proc/driver/nvidia/version").partition("\n")[0]
        hardware["sizes of GPU memory"] = human_bytes(torch.cuda.mem_get_info(world.device)[1])
    return Rank(
        number=world.rank,
        host=socket.gethostname(),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        local_rank=world.local_rank,
        versions=versions,
        hardware=hardware,
        kind=f"{name}, {kind}",
        code=_code_hash(),
        config=hashlib.sha256(config.encode()).hexdigest(),
        texts=dict(texts),
        probe=str(probe or ""),
    )


def _code_hash() -> str:
    """Return a hash of titanlite's files, but for those that no run imports."""
    root = Path(titanlite.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in ("cli", "deploy", "train_configs"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _version_problems(ranks: Sequence[Rank]) -> list[str]:
    problems = []
    differ = _differences(ranks, [rank.versions for rank in ranks])
    if differ:
        listed = "; ".join(f"{name}: {shares}" for name, shares in differ.items())
        problems.append(f"the ranks have different versions of {listed}. {_SAME}")
    if len({rank.code for rank in ranks}) > 1:
        commits = gather_objects(str(provenance.git_state().record.get("commit", "no commit"))[:12])
        names = [f"files {rank.code[:8]}, commit {commits[rank.number]}" for rank in ranks]
        problems.append(
            f"the ranks run different code of titanlite: {_shares(_by_value(ranks, names))}. "
            f"{_SAME}"
        )
    return problems


def _text_problems(ranks: Sequence[Rank]) -> list[str]:
    differ = _differences(
        ranks, [{key: text[:8] for key, text in rank.texts.items()} for rank in ranks]
    )
    return [
        (
            f"the ranks read different text for {key}: {shares}. Files, tokenizer and order of "
            "documents must be the same"
        )
        for key, shares in differ.items()
    ]


def _config_findings(ranks: Sequence[Rank], config: str) -> tuple[list[str], list[str]]:
    """Return errors, and warnings of differences that hosts may have."""
    groups = list(_by_value(ranks, [rank.config for rank in ranks]).values())
    problems: list[str] = []
    warnings: list[str] = []
    texts = gather_objects(provenance.public_config(config)) if len(groups) > 1 else []
    for group in groups[1:]:
        sides = texts[0], texts[group[0].number]
        changes = provenance.config_changes(*sides)
        if not changes:  # a file with another name is no difference
            continue
        old = provenance.config_values(sides[0])
        new = provenance.config_values(sides[1])
        wrong = [key for key in changes if not _may_differ(key, old.get(key), new.get(key))]
        shown = ", ".join(f"{key} {changes[key]}" for key in (wrong or list(changes))[:_MOST_NAMED])
        text = f"rank 0 has another config than {_named(group)}: {shown}"
        if wrong:
            problems.append(f"{text}. Start all ranks with one file")
        else:
            warnings.append(f"{text}. These may differ if all hosts find the same there")
    return problems, warnings


def _may_differ(name: str, old: Any, new: Any) -> bool:
    """Return whether hosts of one run may have these two values of a key: other paths, or another
    [launch].
    """

    def without_paths(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(without_paths, value)]
        if isinstance(value, dict):
            hidden = paths(inner) if inner else []
            return {field: item for field, item in value.items() if field not in hidden}
        if name in ANCHORED and isinstance(value, str):
            return os.path.basename(value)
        return value

    section, _, field = name.partition(".")
    inner = inner_section(keys()[name].type) if name in keys() else None
    is_path = section in sections() and field in paths(sections()[section])
    return section == "launch" or is_path or without_paths(old) == without_paths(new)


def _measure(world: DistEnv, sees_folder: bool, has_others: bool) -> Measured:
    """Measure this rank. has_others: there are several hosts."""
    kind = world.device.type
    notes: list[str] = []
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        if total - free > _USED_SHARE * total + _CONTEXT_BYTES:
            notes.append(
                f"only {human_bytes(free)} of {human_bytes(total)} are free before the run on "
                f"local rank {world.local_rank}. Another process uses its GPU, see nvidia-smi "
                "there"
            )
    if has_others:
        for interface in INTERFACES if kind == "cuda" else INTERFACES[:1]:
            problem = interface_problem(interface)
            if problem:
                notes.append(problem)
    one = torch.ones(1, device=world.device)
    latency = min(_timed(world.device, partial(dist.all_reduce, one)) for _ in range(5))
    clock = time.time()
    base = (torch.arange(_ELEMENTS[kind], device=world.device) % 251).float()
    sums = []
    right = True
    for _ in range(3):
        reduced = base + world.rank % 64  # whole numbers below 2^24: their sum in float32 is exact
        sums.append(_timed(world.device, partial(dist.all_reduce, reduced)))
        right &= bool(
            (reduced == world.size * base + sum(rank % 64 for rank in range(world.size))).all()
        )
    del base, reduced
    seconds, digests = products(world.device)
    if os.environ.get("PYTORCH_TUNABLEOP_ENABLED") == "1" and len(digests) == 1:
        digests = ()  # each rank chooses its kernels by time: their bits may differ
    if kind == "cuda":  # the run's own peaks begin with the model
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    return Measured(right, min(sums), latency, seconds, digests, clock, sees_folder, notes)


def products(device: torch.device) -> tuple[float, tuple[int, ...]]:
    """Return the seconds of the fastest product of two fixed matrices, and the digests of the
    products.
    """
    rows = _ROWS[device.type]
    dtype, bits, warm = torch.float32, torch.int32, 0.0
    if device.type == "cuda":
        dtype, bits, warm = torch.bfloat16, torch.int16, _WARM_SECONDS
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(rows, rows, generator=generator, device=device, dtype=dtype)
    b = torch.randn(rows, rows, generator=generator, device=device, dtype=dtype)
    made = torch.empty_like(a)
    seconds: list[float] = []
    digests: list[int] = []
    until = time.perf_counter() + warm
    while len(digests) < _PRODUCTS or time.perf_counter() < until:
        seconds.append(_timed(device, lambda: torch.mm(a, b, out=made)))
        digests.append(int(made.view(bits).sum(dtype=torch.int64)))
    return min(seconds), tuple(dict.fromkeys(digests))


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def _result_problems(ranks: Sequence[Rank], found: Sequence[Measured]) -> list[str]:
    problems = []
    wrong = [rank for rank in ranks if not found[rank.number].sum_is_right]
    if wrong:
        problems.append(
            f"an all-reduce gives a wrong sum on {_named(wrong)}. Leave these devices out, and "
            "test them"
        )
    compared = [rank for rank in ranks if found[rank.number].digests]
    for group in _by_value(compared, [rank.kind for rank in compared]).values():
        common, votes = Counter(found[rank.number].digests for rank in group).most_common(1)[0]
        # Its own products differ.
        odd = [rank for rank in group if len(found[rank.number].digests) > 1]
        if not odd and votes < len(group):
            odd = list(group)
            if 2 * votes > len(group):
                odd = [rank for rank in group if found[rank.number].digests != common]
        if odd:
            names = _named(odd)
            if len(odd) <= _MOST_NAMED:
                names = ", ".join(map(str, odd))
            which = "wrong numbers are computed"
            if len(odd) == len(group):
                which = "one of these computes wrong numbers"
            problems.append(
                f"the same matrix product has other bits: {which}: {names}. Leave the host out, "
                "and test it"
            )
    return problems


def _speed_warnings(
    ranks: Sequence[Rank], found: Sequence[Measured], device_type: str
) -> list[str]:
    warnings = []
    for group in _by_value(ranks, [rank.kind for rank in ranks]).values():
        # Of two the faster one.
        middle = median_low(found[rank.number].product_seconds for rank in group)
        for rank in group:
            seconds = found[rank.number].product_seconds
            if seconds > SLOW_FACTOR[device_type] * middle:
                warnings.append(
                    f"{rank} is slow: a matrix product takes {seconds * 1e3:.2f} ms, "
                    f"{seconds / middle:.1f} times as long as on the others. The others will wait "
                    "for it at every step: look for other programs there and for a low clock "
                    "(nvidia-smi -q -d PERFORMANCE), or leave the host out"
                )
    return warnings


def _notes(ranks: Sequence[Rank], found: Sequence[Measured]) -> list[str]:
    notes = dict.fromkeys(note for result in found for note in result.notes)
    lines = []
    for note in notes:
        told = [rank for rank in ranks if note in found[rank.number].notes]
        lines.append(f"{_named(told)}: {note}")
    return lines


def _clock_warnings(firsts: Iterable[Rank], found: Sequence[Measured]) -> list[str]:
    """Return a warning of the hosts whose clocks differ most. firsts: one rank of each host."""
    by_clock = sorted((found[rank.number].clock, rank) for rank in firsts)
    earliest, behind = by_clock[0]
    latest, ahead = by_clock[-1]
    if latest - earliest <= CLOCK_SECONDS:
        return []
    return [
        f"the clocks of the hosts differ by {latest - earliest:.1f} s: {_named([behind])} says "
        f"{_time_text(earliest)}, {_named([ahead])} {_time_text(latest)}. Times in logs do not "
        "match, and tokens of stores may be refused. Synchronize the clocks (chrony, timedatectl "
        "set-ntp true)"
    ]


def _time_text(clock: float) -> str:
    return datetime.fromtimestamp(clock, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _write_probe(folder: Path) -> Path | None:
    """Write a file with a new name.

    None: rank 0 itself cannot write, which its other files will tell.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".ranks-{uuid.uuid4().hex}"
        probe.write_bytes(b"")
        return probe
    return None


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


def _folder_text(writer: Rank, blind: Sequence[Rank]) -> str:
    hosts = ", ".join(sorted({rank.host for rank in blind})[:_MOST_NAMED])
    return (
        f"the folder {os.path.dirname(writer.probe)!r} is not shared: {writer.host} writes there, "
        f"and {hosts} cannot see its files. Each host would keep its own part of a checkpoint: "
        "set job.dump_folder or checkpoint.folder to a folder of a file system that all hosts "
        "mount, or checkpoint.folder to an s3:// URL"
    )


def _by_value(ranks: Sequence[Rank], values: Sequence[str]) -> dict[str, list[Rank]]:
    groups: dict[str, list[Rank]] = defaultdict(list)
    for rank, value in zip(ranks, values, strict=True):
        groups[value].append(rank)
    return groups


def _differences(ranks: Sequence[Rank], tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the values and their ranks for each name whose values differ."""
    names = dict.fromkeys(name for table in tables for name in table)
    groups = {
        name: _by_value(ranks, [table.get(name, "none") for table in tables]) for name in names
    }
    return {name: _shares(of_name) for name, of_name in groups.items() if len(of_name) > 1}


def _shares(groups: Mapping[str, Sequence[Rank]]) -> str:
    return ", ".join(f"{value} on {_named(group)}" for value, group in groups.items())


def _named(ranks: Sequence[Rank]) -> str:
    """Return `ranks 0-3, 6 (host-1, host-2)`."""
    runs = groupby(enumerate(ranks), lambda pair: pair[1].number - pair[0])
    spans = [[rank.number for _, rank in span] for _, span in runs][:_MOST_NAMED]
    numbers = ", ".join(
        f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans
    )
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    more = f" and {len(hosts) - _MOST_NAMED} more" if len(hosts) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {numbers} ({', '.join(hosts[:_MOST_NAMED])}{more})"
