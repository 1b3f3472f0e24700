"""The settings that a search tries: keys, meshes, micro-batches, recomputation, offload."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from titanlite.features.float8 import search as float8
from titanlite.models.spec import ModelSpec
from titanlite.plan.hardware import Cluster
from titanlite.run.config import RunConfig
from titanlite.run.features import moe_layers_of

#: Models below this many parameters get no pipeline: FSDP serves them. Most ranks of one.
PIPELINE_PARAMETERS = 20e9
MOST_STAGES = 16
#: Most tokens of a micro-batch, and fewest of a sequence's part on a rank.
MOST_TOKENS = 32768
LEAST_TOKENS = 8192

Changes = dict[str, Any]

TENSOR = "training.tensor_parallel_degree"
CONTEXT = "experimental.context_parallel_degree"
PIPELINE = "experimental.pipeline_parallel_degree"
REPLICATE = "training.data_parallel_replicate_degree"
SHARD = "training.data_parallel_shard_degree"
SCHEDULE = "experimental.pipeline_parallel_schedule"
PIECES = "experimental.pipeline_parallel_microbatches"
BATCH = "training.batch_size"
GLOBAL_BATCH = "training.global_batch_size"
LOSS_CHUNKS = "training.loss_chunks"
SYNC = "training.gradient_sync"
RESHARD = "training.reshard_after_forward"
COMPILE = "training.compile"
MODE = "activation_checkpoint.mode"
OPTION = "activation_checkpoint.selective_ac_option"
AC_OFFLOAD = "activation_checkpoint.offload"
CPU_OFFLOAD = "training.enable_cpu_offload"

#: Keys that the columns of the table do not tell.
SHOWN = {
    SCHEDULE,
    LOSS_CHUNKS,
    SYNC,
    RESHARD,
    COMPILE,
    AC_OFFLOAD,
    CPU_OFFLOAD,
    *float8.SHOWN,
}

_FULL: Changes = {MODE: "full"}
#: From what recomputes nothing to what keeps least.
AC_MODES: tuple[Changes, ...] = (
    {MODE: "none"},
    {MODE: "selective", OPTION: "4"},
    {MODE: "selective", OPTION: "2"},
    {MODE: "selective", OPTION: "op"},
    _FULL,
)


class Offload(NamedTuple):
    """What is offloaded, with the AC modes to try beside it."""

    changes: Changes
    modes: tuple[Changes, ...]


#: Tried in turn until something fits.
OFFLOADS = (
    Offload({AC_OFFLOAD: False, CPU_OFFLOAD: False}, AC_MODES),
    Offload({AC_OFFLOAD: True, CPU_OFFLOAD: False}, (_FULL,)),
    Offload({AC_OFFLOAD: False, CPU_OFFLOAD: True}, AC_MODES),
    Offload({AC_OFFLOAD: True, CPU_OFFLOAD: True}, (_FULL,)),
)


class Mesh(NamedTuple):
    """Degrees of parallelism."""

    changes: Changes
    #: Ranks that read different data, and tokens of a sequence on one rank.
    readers: int
    part: int
    is_pipeline: bool


def meshes(run: RunConfig, cluster: Cluster) -> Iterator[Mesh]:
    """Yield the config's own degrees of parallelism, then all powers of two that the ranks
    allow.
    """
    mesh = run.mesh
    length = run.batch.seq_len
    yield Mesh({}, mesh.dp_degree, length // mesh.context, mesh.pipeline > 1)
    spec = run.spec
    args = run.model_args()
    is_large = spec.count_parameters(args) >= PIPELINE_PARAMETERS
    pipelines = _powers(MOST_STAGES) if is_large else [1]
    tensors = _powers(cluster.gpus_per_node)
    contexts = _powers(max(length // LEAST_TOKENS, 1))
    for pipeline, tensor, context, experts in itertools.product(
        pipelines, tensors, contexts, _of_experts(spec, args)
    ):
        readers, rest = divmod(cluster.gpus, pipeline * tensor * context)
        if rest or run.batch.global_batch_size % readers:
            continue
        degrees = {TENSOR: tensor, CONTEXT: context, PIPELINE: pipeline, **experts}
        for replicate in _replicas(readers, tensor * context, pipeline, cluster):
            for schedule in ("1F1B", "Interleaved1F1B") if pipeline > 1 else ("1F1B",):
                changes = {
                    **degrees,
                    REPLICATE: replicate,
                    SHARD: -1,
                    SCHEDULE: schedule,
                    "training.data_parallel_type": "fsdp",
                }
                yield Mesh(changes, readers, length // context, pipeline > 1)


def _of_experts(spec: ModelSpec, args: Any) -> Sequence[Changes]:
    """Return what is tried of experts."""
    moe_layers = moe_layers_of(spec, args)
    return [{}] if moe_layers is None else moe_layers.settings()


def _replicas(readers: int, ranks: int, pipeline: int, cluster: Cluster) -> Iterator[int]:
    """Yield numbers of copies of the weights. ranks: that share a reader's sequences."""
    for replicate in _powers(readers if pipeline == 1 else 1):
        if readers % replicate:
            continue
        shard = readers // replicate
        is_hybrid = shard > 1 and replicate > 1
        if is_hybrid and shard * ranks < cluster.gpus_per_node:
            # A machine with several copies sends more to the others than one with a single copy.
            continue
        yield replicate


def batches(run: RunConfig, mesh: Mesh) -> Iterator[Changes]:
    """Yield the micro-batches, the smallest first; the global batch stays."""
    total = run.batch.global_batch_size
    share = total // mesh.readers
    for size in _powers(max(MOST_TOKENS // mesh.part, 1)):
        if share % size:
            continue
        if mesh.is_pipeline:
            yield {BATCH: share, PIECES: share // size, GLOBAL_BATCH: total, SYNC: "last"}
            continue
        for sync in ("every", "last") if size < share else ("last",):
            yield {BATCH: size, GLOBAL_BATCH: total, SYNC: sync}


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4, … up to `most`."""
    return [2**n for n in range(most.bit_length())]
