"""The settings that a search tries: keys, meshes, micro-batches, recomputation, offload."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from titanlite.config.rules import divisors
from titanlite.plan.hardware import Cluster
from titanlite.run.config import RunConfig

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
EXPERT = "parallelism.expert_parallel_degree"
REPLICATE = "training.data_parallel_replicate_degree"
SHARD = "training.data_parallel_shard_degree"
KIND = "training.data_parallel_type"
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

OFFLOAD = "activation_checkpoint.offload"
CPU_OFFLOAD = "training.enable_cpu_offload"

#: Choices of FSDP: a key, and the values of which a search compares its choice with the
#: first other one.
CHOICES: dict[str, tuple[str, tuple[Any, Any]]] = {
    "mixed precision": ("training.mixed_precision_param", ("bfloat16", "float32")),
    "recomputation": (MODE, ("none", "full")),
    "wrapping": ("training.fsdp_units", ("block", "root")),
    "sharding": (KIND, ("fsdp", "ddp")),
    "offload": (CPU_OFFLOAD, (False, True)),
}

#: Pieces of the loss where the whole does not fit.
CHUNKS = 8
#: Keys that the columns of the table do not tell.
SHOWN = {SCHEDULE, LOSS_CHUNKS, SYNC, RESHARD, COMPILE}
#: From what recomputes nothing to what keeps least.
AC_MODES: tuple[Changes, ...] = (
    {MODE: "none"},
    {MODE: "selective", OPTION: "4"},
    {MODE: "selective", OPTION: "2"},
    {MODE: "selective", OPTION: "op"},
    {MODE: "full"},
)


class Mesh(NamedTuple):
    """Degrees of parallelism."""

    changes: Changes
    #: Ranks that read different data, and tokens of a sequence on one rank.
    readers: int
    part: int
    is_pipeline: bool


def meshes(run: RunConfig, cluster: Cluster) -> Iterator[Mesh]:
    """Yield the config's own degrees, then all powers of two that the ranks allow."""
    mesh = run.mesh
    length = run.batch.seq_len
    yield Mesh({}, mesh.dp_degree, length // mesh.context, mesh.pipeline > 1)
    args = run.model_args()
    is_large = run.spec.count_parameters(args) >= PIPELINE_PARAMETERS
    pipelines = _powers(MOST_STAGES) if is_large else [1]
    tensors = _powers(cluster.gpus_per_node)
    contexts = _powers(max(length // LEAST_TOKENS, 1))
    # 1 of a model without experts.
    experts = divisors(math.gcd(*run.spec.moe_layers(args).values()) or 1)
    for pipeline, tensor, context, expert in itertools.product(
        pipelines, tensors, contexts, experts
    ):
        readers, rest = divmod(cluster.gpus, pipeline * tensor * context)
        if rest or run.batch.global_batch_size % readers:
            continue
        degrees = {TENSOR: tensor, CONTEXT: context, PIPELINE: pipeline, EXPERT: expert}
        schedules = ("1F1B", "Interleaved1F1B") if pipeline > 1 else ("1F1B",)
        for replicate, schedule in itertools.product(_powers(readers), schedules):
            shard, rest = divmod(readers, replicate)
            # A machine with several copies sends more to the others than one with a single copy.
            is_small = 1 < shard < cluster.gpus_per_node / (tensor * context)
            if rest or replicate > 1 and (pipeline > 1 or is_small):
                continue
            sizes = {REPLICATE: replicate, SHARD: -1, SCHEDULE: schedule, KIND: "fsdp"}
            yield Mesh({**degrees, **sizes}, readers, length // context, pipeline > 1)


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


def remedies(run: RunConfig) -> Iterator[Changes]:
    """Yield what lowers the memory, the cheapest in speed first; the global batch stays."""
    yield {LOSS_CHUNKS: CHUNKS}
    yield {RESHARD: "always"}
    yield {SYNC: "every"}
    for size in reversed(_powers(run.training.batch_size - 1)):
        yield {BATCH: size, GLOBAL_BATCH: run.batch.global_batch_size}
    yield {MODE: "full"}
    yield {OFFLOAD: True}
    yield {CPU_OFFLOAD: True}


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]
