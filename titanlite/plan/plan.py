"""The needs of a run: memory, time and disk. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from titanlite.config.errors import unfit
from titanlite.plan.hardware import Cluster
from titanlite.plan.memory import NoFormula, estimate, with_vocabulary
from titanlite.plan.optimizer import state_bytes
from titanlite.plan.parts import BYTES, GIB, RankMemory, needed_bytes
from titanlite.plan.speed import Speed, predict
from titanlite.plan.weights import Weight
from titanlite.run.config import RunConfig

#: Host memory of a rank that trains on a GPU, in bytes, without text: Python, torch and CUDA's
#: libraries.
PROCESS = 3 * GIB


@dataclass(frozen=True)
class Leg:
    """Needs of the steps that have one size (`[[data.phase]]`)."""

    #: The run, as if all its steps were like these.
    run: RunConfig
    #: The first of them, and how many there are; None: the length of the run is not known.
    first: int
    steps: int | None
    memory: RankMemory
    speed: Speed

    @property
    def seconds(self) -> float | None:
        """Time without validation and saves; None: the number of steps is unknown."""
        return None if self.steps is None else self.steps * self.speed.step_seconds


@dataclass(frozen=True)
class Plan:
    """Needs of one run on one cluster."""

    run: RunConfig
    cluster: Cluster
    #: Memory of the rank that needs most, in the leg that needs most.
    memory: RankMemory
    #: The memory is of a trace, not of formulas.
    exact: bool
    #: Seconds and rates of the first step.
    speed: Speed
    #: Name → bytes of host memory of one machine.
    host: Mapping[str, int]
    #: Bytes of a checkpoint; None: the run saves none.
    checkpoint: int | None
    legs: tuple[Leg, ...]

    @property
    def overhead(self) -> int:
        """Bytes of a GPU that hold no live tensor, see docs/plan.md."""
        return self.needed - self.memory.peak.total

    @property
    def needed(self) -> int:
        """Bytes of GPU memory at the peak."""
        return needed_bytes(self.memory)

    @property
    def margin(self) -> int:
        """Bytes of GPU memory that stay free at the peak; negative: missing."""
        return self.cluster.gpu.memory - self.needed

    @property
    def fits(self) -> bool:
        """Whether the fullest GPU, and the host where known, have the memory."""
        return self.margin >= 0 and self.host_needed <= (self.cluster.host or math.inf)

    @property
    def host_needed(self) -> int:
        """Bytes of one machine's host memory."""
        return sum(self.host.values())

    @property
    def seconds(self) -> float | None:
        """Time without validation and saves; None: the number of steps is unknown."""
        seconds = [leg.seconds for leg in self.legs if leg.seconds is not None]
        return sum(seconds) if len(seconds) == len(self.legs) else None

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON, see docs/plan.md; unknown numbers are null, others finite."""
        peak = self.memory.peak
        speed = self.speed
        return {
            "model": self.run.model.title,
            "world_size": self.run.mesh.world_size,
            "gpu": self.cluster.gpu.key,
            "nodes": self.cluster.nodes,
            "exact": self.exact,
            "fits": self.fits,
            "rank": self.memory.rank,
            "peak_gib": peak.total / GIB,
            "phase": peak.phase,
            "module": peak.module,
            "parts": in_gib(peak.parts),
            "overhead_gib": self.overhead / GIB,
            "needed_gib": self.needed / GIB,
            "usable_gib": self.cluster.gpu.memory / GIB,
            "margin_gib": self.margin / GIB,
            "host_gib": self.host_needed / GIB,
            "host_usable_gib": self.cluster.host and self.cluster.host / GIB,
            "host_parts": in_gib(self.host),
            "checkpoint_gib": self.checkpoint and self.checkpoint / GIB,
            "tokens_per_step": self.run.batch.tokens_per_step,
            "steps": self.run.steps,
            "step_seconds": speed.step_seconds,
            "step_parts": dict(speed.parts),
            "hours": None if self.seconds is None else self.seconds / 3600,
            "tokens_per_second": speed.tokens_per_second,
            "tokens_per_second_range": [speed.low, speed.high],
            "mfu": speed.mfu,
            "assumptions": list(speed.assumptions),
        }


def in_gib(parts: Mapping[str, int]) -> dict[str, float]:
    """Return the parts in GiB."""
    return {name: size / GIB for name, size in parts.items()}


def make_plan(
    run: RunConfig,
    cluster: Cluster,
    trace: Callable[[RunConfig, int], RankMemory] | None = None,
) -> Plan:
    """Plan a run on a cluster of as many GPUs as its mesh has ranks.

    Its memory is that of the rank that needs most, by formula. trace: (run, rank) → its memory
    instead, as `titanlite.cli.plan.memory_trace` measures it.

    Raises ConfigError for a model without formulas, unless it is traced.
    """
    run = with_vocabulary(run)
    rank = 0
    if trace:
        with suppress(NoFormula):
            rank = estimate(run).rank
    legs: list[Leg] = []
    firsts = list(run.legs)
    ends = [first - 1 for first in firsts[1:]]
    for first, end in zip(firsts, [*ends, run.steps], strict=True):
        steps = None
        if run.steps is not None and end is not None:
            steps = max(min(end, run.steps) - first + 1, 0)
        steady = run.steady_at(first)
        memory = trace(steady, rank) if trace else formula(steady)
        legs.append(Leg(steady, first, steps, memory, predict(steady, cluster)))
    memory = max((leg.memory for leg in legs), key=lambda memory: memory.peak.total)
    speed = legs[0].speed
    largest = max((leg.run for leg in legs), key=lambda run: run.batch.tokens_per_step)
    host = host_memory(largest, cluster, memory)
    checkpoint = checkpoint_bytes(run) if run.checkpoint.enable_checkpoint else None
    return Plan(run, cluster, memory, trace is not None, speed, host, checkpoint, tuple(legs))


def formula(run: RunConfig) -> RankMemory:
    """Return the memory of the rank that needs most, by formulas.

    Raises ConfigError if none exist.
    """
    try:
        return estimate(run)
    except NoFormula as error:
        command = f"titanlite plan CONFIG --gpus {run.mesh.world_size} --gpu NAME --exact"
        hint = f"`{command}` traces a step of the code instead"
        raise unfit("", str(error), hint) from None


def host_memory(run: RunConfig, cluster: Cluster, memory: RankMemory) -> dict[str, int]:
    """Return one machine's host memory by part, in bytes."""
    # Inputs and labels in 64 bits. A stream holds two prepared steps back.
    tokens = run.batch.micro_batch_size * run.batch.accumulation * run.batch.seq_len
    loaders = (run.data.prefetch + 2) * 16 * tokens
    parts = {"processes": PROCESS, **memory.host, "loaders": loaders}
    if run.checkpoint.enable_checkpoint and run.checkpoint.async_mode != "disabled":
        held = {**memory.peak.parts, **memory.host}
        weights = held.get("parameters", 0)
        adapters = run.trained(run.model_args()).adapters
        if adapters is not None:
            # Frozen weights are in no checkpoint.
            shares = run.mesh.weight_shards * run.mesh.pipeline
            weights = math.ceil(adapters / shares) * BYTES[run.training.dtype]
        parts["copy of an asynchronous save"] = weights + held.get("optimizer", 0)
    ranks = min(cluster.gpus_per_node, run.mesh.world_size)
    return {name: size * ranks for name, size in parts.items()}


# Checkpoints


def checkpoint_bytes(run: RunConfig) -> int:
    """Return the size of a checkpoint: weights, optimizer state and averages."""
    args = run.model_args()
    trained = run.trained(args)
    parameters = trained.adapters
    if parameters is None:
        parameters = run.spec.count_parameters(args)
    size = parameters * (BYTES[run.training.dtype] + trained.averages)
    # In the optimizer's state norms count as matrices; Muon's are those of blocks.
    matrices = parameters
    if run.optimizer.name == "Muon" and not run.lora.rank:
        costs = run.spec.pipeline_costs(args, 1) if run.spec.pipeline_costs else {}
        blocks = [name for name in run.spec.block_names(args) if name in costs]
        matrices = sum(costs[name].parameters for name in blocks)
    master = BYTES[run.training.dtype]
    matrix = Weight(4096, 2048, 1, (4096, 2048))
    other = Weight(4096, 2048, 1)
    state = matrices * state_bytes(matrix, run.optimizer, master)
    state += (parameters - matrices) * state_bytes(other, run.optimizer, master)
    return size + round(state)
