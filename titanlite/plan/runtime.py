"""The report of a run out of memory: its plan, the allocator's figures, what to change."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlite.config.keys import sections
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import Config
from titanlite.config.toml import quote
from titanlite.exit_codes import memory_error_of
from titanlite.parallel.dist_env import ALLOCATOR
from titanlite.plan.hardware import Gpu, cluster_of, gpu_of_device
from titanlite.plan.memory import estimate, with_vocabulary
from titanlite.plan.parts import PARTS, Moment, RankMemory, needed_bytes
from titanlite.plan.peak import APART, APART_BYTES, OTHER_PHASES
from titanlite.start.derive import RunConfig
from titanlite.start.fit import check_loaded
from titanlite.utils import Table, human_bytes, render

if TYPE_CHECKING:
    pass

#: Remedies that are shown, and the least share of the peak that each saves.
_REMEDIES, _LEAST = 3, 0.02
_SAVE = "Any of these saves memory, by the plan:"
_REQUEST = re.compile(r"(?:allocate|allocating) ([\d.]+ (?:bytes|[KMGT]iB))")


# Out of memory


class Remedy(NamedTuple):
    """Settings with which a run needs less memory."""

    #: By key.
    changes: Mapping[str, Any]
    #: Number of ranks where it is another one.
    ranks: int | None
    #: Bytes of the planned peak.
    saves: int
    #: Bytes of a GPU that are needed then.
    needed: int
    #: Predicted share of the speed that it costs; None where the GPU is not known.
    slower: float | None

    def __str__(self) -> str:
        on = [f"{self.ranks} ranks"] if self.ranks else []
        return ", ".join([*on, *(f"{key} = {quote(value)}" for key, value in self.changes.items())])


def changed(run: RunConfig, changes: Mapping[str, Any], ranks: int | None = None) -> RunConfig:
    """Return the run with other values of these keys, on so many ranks.

    Raises ConfigError where it cannot be so.
    """
    config = LoadedConfig(Config(**{name: getattr(run, name) for name in sections()})).changed(
        changes
    )
    return check_loaded(
        config, [], ranks or run.mesh.world_size, training=False, look_at_text=False
    )[1]


def remedies(
    run: RunConfig, rank: int | None = None, device: str = "cuda", gpu: Gpu | None = None
) -> list[Remedy]:
    """Return up to three changes that save memory at the planned peak, the cheapest in speed first.

    rank: None: the worst one. gpu: None: not known, and the order is roughly that of the cost.
    """
    peak, rate, found = estimate(run, rank, device).peak.total, _rate(run, gpu), list[Remedy]()
    others = list[tuple[float | None, Mapping[str, Any], int | None, RunConfig]]()
    for changes, ranks in _candidates(run):
        with contextlib.suppress(ValueError):  # a ConfigError: the run cannot be so
            other = changed(run, changes, ranks)
            others.append((rate and 1 - (_rate(other, gpu) or rate) / rate, changes, ranks, other))
    for slower, settings, ranks, other in sorted(others, key=lambda one: round(one[0] or 0.0, 2)):
        with contextlib.suppress(ValueError):  # no formulas
            memory = estimate(other, rank if other.mesh == run.mesh else None, device)
            if peak - memory.peak.total >= _LEAST * peak:
                found.append(
                    Remedy(settings, ranks, peak - memory.peak.total, needed_bytes(memory), slower)
                )
        if len(found) == _REMEDIES:
            break
    return found


def _rate(run: RunConfig, gpu: Gpu | None) -> float | None:
    """Return the predicted tokens per second of a GPU; None where nothing predicts them."""
    if gpu is None:
        return None
    from titanlite.plan.speed import predict

    size = math.gcd(int(os.environ.get("LOCAL_WORLD_SIZE", "8")), run.mesh.world_size)
    with contextlib.suppress(ValueError):  # a ConfigError
        cluster = cluster_of(
            run, gpu="" if run.launch.instance_type else gpu.key, gpus_per_node=size
        )
        return predict(run, cluster).tokens_per_second
    return None


def _candidates(run: RunConfig) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Yield settings and other ranks, roughly in the order of their cost in speed."""
    t, mesh = run.training, run.mesh
    same_batch = (
        {"training.global_batch_size": run.batch.global_batch_size}
        if t.global_batch_size == -1
        else {}
    )
    shard, replicate = (
        "training.data_parallel_shard_degree",
        "training.data_parallel_replicate_degree",
    )

    def shards(count: int) -> dict[str, Any]:
        return {} if t.data_parallel_shard_degree == -1 else {shard: count}

    if t.loss_chunks < 8:
        yield {"training.loss_chunks": 8}, None
    yield {"training.prefetch": 0}, None
    yield {"training.reshard_after_forward": "always"}, None
    yield {"training.gradient_sync": "every"}, None
    yield {"training.batch_size": max(t.batch_size // 2, 1), **same_batch}, None
    if t.data_parallel_type == "ddp":
        yield {"training.data_parallel_type": "fsdp", replicate: 1, shard: -1}, None
    elif mesh.dp_replicate % 2 == 0:
        yield {replicate: mesh.dp_replicate // 2, **shards(mesh.dp_shard * 2)}, None
    for option in ({"mode": "selective", "selective_ac_option": "op"}, {"mode": "full"}):
        yield {f"activation_checkpoint.{name}": value for name, value in option.items()}, None
    yield {"activation_checkpoint.offload": True}, None
    degrees = {
        "experimental.context_parallel_degree": mesh.context,
        "training.tensor_parallel_degree": mesh.tensor,
    }
    for key, degree in degrees.items():
        if mesh.dp_shard % 2 == 0:
            yield {key: 2 * degree, **shards(mesh.dp_shard // 2), **same_batch}, None
    if t.data_parallel_type == "fsdp":
        yield shards(2 * mesh.dp_shard), 2 * mesh.world_size
    yield {"training.enable_cpu_offload": True}, None


def memory_report(run: RunConfig, error: BaseException, where: str, rank: int, device: str) -> str:
    """Return the message of a run that ends for lack of memory: its plan, the allocator's figures,
    what to change.

    error: has `memory_error_of`. where: as "backward of step 3". device: "cuda" or "cpu". It raises
    nothing.
    """
    cause, figures = memory_error_of(error) or error, dict[str, float]()
    text = str(error).partition(" If reserved but unallocated")[
        0
    ]  # torch's advice is below with its figures
    place = (
        "GPU"
        if type(cause).__name__ == "OutOfMemoryError" or re.search("CUD|CUBLAS", str(cause))
        else "host"
    )
    of_host = device == "cuda" and place == "host"
    if "CUDA error: out of memory" in str(cause):
        place = "GPU or pinned host memory"
    when = "before the first step" if where == "start" else f"in {where}"
    lines = [f"out of memory of the {place}, {when}: {text}"]
    if cause is not error:
        lines.append(f"caused by {type(cause).__name__}: {cause}")
    try:
        figures = _allocator(cause, device)
        run = with_vocabulary(run)
        planned = estimate(run, rank, device)
        lines += _plan_lines(planned, figures)
        held = figures.get("allocated", 0) + figures.get("request", 0)
        if held > (1 + APART) * planned.peak.total + APART_BYTES:
            more = f"{human_bytes(held - planned.peak.total)} more than planned"
            lines.append(
                f"The process wants {more}: other memory, which the keys below do not free, or "
                "the plan is wrong"
            )
        gpu = _gpu(device)
        found = remedies(run, rank, device, gpu)
        width = max((len(str(one)) for one in found), default=0)
        lines.append(_SAVE if found else "By the plan, no single key saves much")
        fits = needed_bytes(planned) <= figures.get(
            "of the GPU", 0
        )  # then the plan does not tell what is missing
        for one in found:
            enough = (
                one.saves >= figures.get("request", math.inf)
                if fits
                else one.needed <= figures.get("of the GPU", 0)
            )
            cost = "" if one.slower is None else f", about {max(one.slower, 0):.0%} slower"
            lines.append(
                f"  {one!s:<{width}}  saves "
                f"{human_bytes(one.saves)}{cost}{', enough by the plan' * enough}"
            )
    except Exception as failed:  # the error itself is the one to be seen
        lines.append(", ".join(f"{name} {human_bytes(size)}" for name, size in figures.items()))
        lines.append(f"There is no plan to compare with: {failed}")
    if (phase := where.partition(" ")[0]) in OTHER_PHASES:
        lower = (
            f": lower validation.batch_size (now {run.validation.batch_size})"
            if phase == "validate"
            else ""
        )
        lines.append(f"The plan is one of training steps, and leaves out the phase {phase}{lower}")
    if of_host:
        others = (
            "copies of checkpoints in the background (checkpoint.async_mode) and prepared batches "
            "(data.num_workers)"
        )
        lines.append(f"Host memory also holds {others}")
    unused = figures.get("reserved", 0) - figures.get("allocated", 0)
    chosen = " ".join(f"{name}={os.environ[name]}" for name in ALLOCATOR if name in os.environ)
    if (
        unused > figures.get("request", unused)
        and chosen
        and "expandable_segments:True" not in chosen
    ):
        lines.append(
            f"{human_bytes(unused)} are reserved and not allocated, in pieces that are too small: "
            f"without {chosen} the allocator has expandable segments, which it can join, at no "
            "cost"
        )
    return "\n".join(lines)


def last_words(run: RunConfig, error: BaseException, where: str, rank: int) -> str:
    """Return `memory_report` for the device of this process, and from where the run goes on.

    It raises nothing.
    """
    report, steps, section = str(error), list[int](), run.checkpoint
    with contextlib.suppress(Exception):  # no memory even for this, or a store that does not answer
        import torch

        from titanlite.checkpoint.manifest import FILE, step_folder, steps_in
        from titanlite.checkpoint.paths import to_path

        report = memory_report(
            run, error, where, rank, "cuda" if torch.cuda.is_available() else "cpu"
        )
        if section.enable_checkpoint:
            root = to_path(section.folder)
            steps = [step for step in steps_in(root) if (step_folder(root, step) / FILE).is_file()]
    start = "With one of these keys the" if _SAVE in report else "The"
    kept = (
        f"{start} run resumes from step {steps[-1]} in {section.folder}"
        if steps
        else "No checkpoint is found"
    )
    return f"{report}\n{kept}. The traceback is in {run.job.dump_folder}/logs/rank_{rank}.log"


def _plan_lines(planned: RankMemory, figures: Mapping[str, float]) -> list[str]:
    """Return the plan's parts beside the allocator's figures, and the modules in which most is
    needed.
    """
    peak = planned.peak
    parts = {name: peak.parts[name] for name in PARTS if peak.parts.get(name)} | {
        "in all": peak.total
    }
    parts |= {f"in host memory: {name}": size for name, size in planned.host.items()}
    rows = [
        [text for name, size in pair for text in (name, human_bytes(size) if name else "")]
        for pair in zip_longest(parts.items(), figures.items(), fillvalue=("", 0))
    ]
    measured = "allocator" if "reserved" in figures else "process"
    columns = (f"planned for rank {planned.rank}, {peak.place}", "", measured, "")
    most: dict[str, Moment] = {}  # blocks are alike
    for moment in sorted(planned.moments, key=lambda one: -one.total):
        most.setdefault(re.sub(r"\d+", "N", moment.module), moment)
    top = [f"{moment.place} {human_bytes(moment.total)}" for moment in list(most.values())[:4]]
    return [
        render(Table(columns, rows, (0, 2)), terminal=False),
        f"Modules that need most: {', '.join(top)}",
    ]


def _allocator(error: BaseException, device: str) -> dict[str, float]:
    """Return the bytes that an allocator, or on a CPU the system, gave this process, and those of
    the request.
    """
    figures: dict[str, float] = {}
    if device == "cuda":
        import torch

        stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
        for name in ("allocated", "reserved"):
            figures[name] = stats.get(f"{name}_bytes.all.current", 0)
            figures[f"{name}, peak"] = stats.get(f"{name}_bytes.all.peak", 0)
        # While the error passes, tensors are freed: its text has the figures of the moment.
        if now := re.search(
            r"memory ([\d.]+ \S+) is allocated by PyTorch, and ([\d.]+ \S+) is reserved", str(error)
        ):
            figures["allocated"] = _bytes(now[1])
            figures["reserved"] = _bytes(now[1]) + _bytes(now[2])
        if total := re.search(r"total capacity of ([\d.]+ \S+)", str(error)):
            figures["of the GPU"] = _bytes(total[1])
        elif stats:
            figures["of the GPU"] = torch.cuda.get_device_properties().total_memory
    else:
        figures["resident, peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if request := _REQUEST.search(str(error)):
        figures["request"] = _bytes(request[1])
    return figures


def _gpu(device: str) -> Gpu | None:
    """Return the GPU of this process; None: a CPU, or a GPU that is not known."""
    import torch

    return (
        gpu_of_device(torch.cuda.get_device_name())
        if device == "cuda" and torch.cuda.is_available()
        else None
    )


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(unit)
