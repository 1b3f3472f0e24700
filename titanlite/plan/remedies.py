"""Settings with which a run needs less memory, for the report of a run out of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import Config
from titanlite.config.toml import quote
from titanlite.plan.memory import estimate
from titanlite.resolve.load import resolve
from titanlite.run.config import RunConfig

#: Least share of the peak that a remedy saves.
_LEAST = 0.02

_REPLICATE = "training.data_parallel_replicate_degree"
_SHARD = "training.data_parallel_shard_degree"
_AC = "activation_checkpoint.mode"


class Remedy(NamedTuple):
    """Settings with which a run needs less memory."""

    #: By key.
    changes: Mapping[str, Any]
    #: Ranks over those of the run.
    times: int
    #: Bytes of the planned peak.
    saves: int

    def __str__(self) -> str:
        parts = ["twice the ranks"] if self.times == 2 else []
        parts += [f"{key} = {quote(value)}" for key, value in self.changes.items()]
        return ", ".join(parts)


def remedies(run: RunConfig, rank: int | None = None, device: str = "cuda") -> list[Remedy]:
    """Return the changes that save memory at the planned peak, roughly the cheapest in speed first.

    rank: None: the worst one.
    """
    peak = estimate(run, rank, device).peak.total
    config = LoadedConfig(Config(**{name: getattr(run, name) for name in Config.__struct_fields__}))
    found: list[Remedy] = []
    for changes, times in _changes(run):
        # A ValueError: the run cannot be so, or has no formulas.
        with contextlib.suppress(ValueError):
            other = resolve(config.changed(changes), times * run.mesh.world_size)[1]
            same_rank = rank if other.mesh == run.mesh else None
            saves = peak - estimate(other, same_rank, device).peak.total
            if saves >= _LEAST * peak:
                found.append(Remedy(changes, times, saves))
    return found


def _changes(run: RunConfig) -> list[tuple[dict[str, Any], int]]:
    """Return keys that may save memory with as many times the ranks, roughly in the order of their
    cost in speed.
    """
    training = run.training
    mesh = run.mesh
    batch: dict[str, Any] = {}
    if training.global_batch_size == -1:
        batch["training.global_batch_size"] = run.batch.global_batch_size
    shards = {} if training.data_parallel_shard_degree == -1 else {_SHARD: -1}
    by_op = {_AC: "selective", "activation_checkpoint.selective_ac_option": "op"}
    return [
        ({"training.loss_chunks": 8}, 1),
        ({"training.prefetch": 0}, 1),
        ({"training.reshard_after_forward": "always"}, 1),
        ({"training.gradient_sync": "every"}, 1),
        ({"training.batch_size": max(training.batch_size // 2, 1), **batch}, 1),
        ({"training.data_parallel_type": "fsdp", _REPLICATE: 1, **shards}, 1),
        (by_op, 1),
        ({_AC: "full"}, 1),
        ({"activation_checkpoint.offload": True}, 1),
        ({"experimental.context_parallel_degree": 2 * mesh.context, **shards, **batch}, 1),
        ({"training.tensor_parallel_degree": 2 * mesh.tensor, **shards, **batch}, 1),
        (shards, 2),
        ({"training.enable_cpu_offload": True}, 1),
    ]
