"""Settings with which a run needs less memory, for the report of a run out of memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from titanlite.config.keys import sections
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import Config
from titanlite.config.toml import quote
from titanlite.plan.hardware import Gpu, cluster_of
from titanlite.plan.memory import estimate
from titanlite.plan.parts import needed_bytes
from titanlite.resolve.load import resolve
from titanlite.run.config import RunConfig

#: Most remedies, and the least share of the peak that each saves.
_MOST = 3
_LEAST = 0.02

_REPLICATE = "training.data_parallel_replicate_degree"
_SHARD = "training.data_parallel_shard_degree"


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
        parts = [f"{self.ranks} ranks"] if self.ranks else []
        for key, value in self.changes.items():
            parts.append(f"{key} = {quote(value)}")
        return ", ".join(parts)


class _Change(NamedTuple):
    """Other values of keys, and other ranks."""

    keys: Mapping[str, Any]
    ranks: int | None = None


class _Option(NamedTuple):
    """A change that is valid."""

    change: _Change
    run: RunConfig
    slower: float | None


def changed(run: RunConfig, changes: Mapping[str, Any], ranks: int | None = None) -> RunConfig:
    """Return the run with other values of these keys, on `ranks` ranks.

    Raises ConfigError where it cannot be so.
    """
    config = LoadedConfig(Config(**{name: getattr(run, name) for name in sections()}))
    size = ranks or run.mesh.world_size
    checked = resolve(config.changed(changes), size)
    return checked[1]


def remedies(
    run: RunConfig, rank: int | None = None, device: str = "cuda", gpu: Gpu | None = None
) -> list[Remedy]:
    """Return up to three changes that save memory at the planned peak, the cheapest in speed first.

    rank: None: the worst one. gpu: None: not known, and the order is roughly that of the cost.
    """
    peak = estimate(run, rank, device).peak.total
    found: list[Remedy] = []
    options = _options(run, gpu)
    options.sort(key=lambda option: round(option.slower or 0.0, 2))
    for change, other, slower in options:
        # A ValueError: there are no formulas.
        same_rank = rank if other.mesh == run.mesh else None
        with contextlib.suppress(ValueError):
            memory = estimate(other, same_rank, device)
            saves = peak - memory.peak.total
            if saves >= _LEAST * peak:
                remedy = Remedy(change.keys, change.ranks, saves, needed_bytes(memory), slower)
                found.append(remedy)
        if len(found) == _MOST:
            break
    return found


def _options(run: RunConfig, gpu: Gpu | None) -> list[_Option]:
    """Return the changes that are valid, roughly in the order of their cost in speed."""
    rate = _rate(run, gpu)
    found = []
    for change in _changes(run):
        # A ConfigError: the run cannot be so.
        with contextlib.suppress(ValueError):
            other = changed(run, change.keys, change.ranks)
            slower = rate
            if rate:
                slower = 1 - (_rate(other, gpu) or rate) / rate
            found.append(_Option(change, other, slower))
    return found


def _rate(run: RunConfig, gpu: Gpu | None) -> float | None:
    """Return the predicted tokens per second of a GPU; None where nothing predicts them."""
    if gpu is None:
        return None
    from titanlite.plan.speed import predict

    size = math.gcd(int(os.environ.get("LOCAL_WORLD_SIZE", "8")), run.mesh.world_size)
    name = "" if run.launch.instance_type else gpu.key
    # A ConfigError: the GPU does not fit the run.
    with contextlib.suppress(ValueError):
        cluster = cluster_of(run, gpu=name, gpus_per_node=size)
        return predict(run, cluster).tokens_per_second
    return None


def _changes(run: RunConfig) -> Iterator[_Change]:
    """Yield what may save memory, roughly in the order of its cost in speed."""
    training = run.training
    mesh = run.mesh
    same_batch: dict[str, Any] = {}
    if training.global_batch_size == -1:
        same_batch["training.global_batch_size"] = run.batch.global_batch_size
    if training.loss_chunks < 8:
        yield _Change({"training.loss_chunks": 8})
    yield _Change({"training.prefetch": 0})
    yield _Change({"training.reshard_after_forward": "always"})
    yield _Change({"training.gradient_sync": "every"})
    yield _Change({"training.batch_size": max(training.batch_size // 2, 1), **same_batch})
    if training.data_parallel_type == "ddp":
        yield _Change({"training.data_parallel_type": "fsdp", _REPLICATE: 1, _SHARD: -1})
    elif mesh.dp_replicate % 2 == 0:
        half = {_REPLICATE: mesh.dp_replicate // 2}
        yield _Change({**half, **_shards(run, mesh.dp_shard * 2)})
    yield _Change(
        {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "op",
        }
    )
    yield _Change({"activation_checkpoint.mode": "full"})
    yield _Change({"activation_checkpoint.offload": True})
    if mesh.dp_shard % 2 == 0:
        rest = {**_shards(run, mesh.dp_shard // 2), **same_batch}
        yield _Change({"experimental.context_parallel_degree": 2 * mesh.context, **rest})
        yield _Change({"training.tensor_parallel_degree": 2 * mesh.tensor, **rest})
    if training.data_parallel_type == "fsdp":
        yield _Change(_shards(run, 2 * mesh.dp_shard), 2 * mesh.world_size)
    yield _Change({"training.enable_cpu_offload": True})


def _shards(run: RunConfig, count: int) -> dict[str, Any]:
    """Return the key for `count` ranks that shard weights; none where it follows from the rest."""
    if run.training.data_parallel_shard_degree == -1:
        return {}
    return {_SHARD: count}
