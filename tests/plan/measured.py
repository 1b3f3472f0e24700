"""Bytes of a real step on the CPU, by part, and the runs of the table of plan/FORMULAS.md."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from tests.support.run_of import run_from
from tests.support.tiny import KEPT_TOKENS
from titanlite.assembly.build import build
from titanlite.cli.plan.memory_tracker import MemoryMeter
from titanlite.data.loader import Batch, to_device
from titanlite.dist.dist_env import DistEnv
from titanlite.plan.parts import RankMemory
from titanlite.resolve.load import load_config
from titanlite.run.config import RunConfig

_BASE = {
    "model.vocab_size": 2304,
    "model.overrides.dim": 128,
    "model.overrides.n_layers": 6,
    "model.overrides.n_heads": 4,
    "model.overrides.n_kv_heads": 2,
    "training.batch_size": 2,
    "training.seq_len": 256,
    "training.reshard_after_forward": "default",
    "training.mixed_precision_param": "bfloat16",
    "validation.enable": "false",
    "data.token_cache": KEPT_TOKENS.partition("=")[2],
}
_SHARD = "training.data_parallel_shard_degree"
_REPLICAS = "training.data_parallel_replicate_degree"
_TP = "training.tensor_parallel_degree"
_CP = "experimental.context_parallel_degree"
_PP = "experimental.pipeline_parallel_degree"
_SCHEDULE = "experimental.pipeline_parallel_schedule"
_MODE = "activation_checkpoint.mode"
_OPTION = "activation_checkpoint.selective_ac_option"
_OPTIMIZER = "optimizer.name"
_GLOBAL = "training.global_batch_size"
_CHUNKS = "training.loss_chunks"
_EARLY = {"optimizer.early_step_in_backward": "true", "training.max_norm": 1e9}
_FLOAT8 = {"float8.enable_float8_linear": "true", "float8.emulate": "true"}
_MIXTRAL = {"model.name": "mixtral", "model.overrides.ffn_dim": 256}
_GPT_OSS = {
    "model.name": "gpt_oss",
    "model.overrides.ffn_dim": 256,
    "model.overrides.head_dim": 32,
    "model.overrides.window": 64,
}
_GEMMA3 = {
    "model.name": "gemma3",
    "model.overrides.window": 64,
    "model.overrides.ffn_dim": 384,
    "model.overrides.head_dim": 64,
}
#: Where the logits are most of a step.
_LARGE = {"model.vocab_size": 16384, "model.tokenizer_path": "bundled"}
_PENALTY = {"training.z_loss": 1e-4}

#: Name → ranks, and flags beside those of every row.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "1 rank, AC full": (1, {_MODE: "full"}),
    "1 rank, AC op": (1, {_MODE: "selective", _OPTION: "op"}),
    "1 rank, four micro-batches": (1, {_GLOBAL: 8}),
    "1 rank, float32": (1, {"training.mixed_precision_param": "float32"}),
    "1 rank, Muon": (1, {_OPTIMIZER: "Muon"}),
    "1 rank, step in backward": (1, _EARLY),
    "1 rank, float8 rowwise, AC op": (
        1,
        {**_FLOAT8, "float8.recipe_name": "rowwise", _MODE: "selective", _OPTION: "op"},
    ),
    "1 rank, sinks, float32, AC full": (
        1,
        {**_GPT_OSS, _MODE: "full", "training.mixed_precision_param": "float32"},
    ),
    "fsdp 2": (2, {}),
    "fsdp 2, four micro-batches": (2, {_GLOBAL: 16}),
    "fsdp 2, four micro-batches, reduced each": (
        2,
        {_GLOBAL: 16, "training.gradient_sync": "every"},
    ),
    "fsdp 2, always freed, prefetch 1, AC full": (
        2,
        {"training.reshard_after_forward": "always", "training.prefetch": 1, _MODE: "full"},
    ),
    "fsdp 2, float8 gathered": (
        2,
        {
            **_FLOAT8,
            "float8.enable_fsdp_float8_all_gather": "true",
            "float8.precompute_float8_dynamic_scale_for_fsdp": "true",
        },
    ),
    "ddp 2": (2, {_REPLICAS: 2, _SHARD: 1}),
    "tp 2": (2, {_TP: 2}),
    "tp 2, norms around, AC full": (2, {_TP: 2, _MODE: "full", **_GEMMA3}),
    "tp 2, AC full, large vocabulary, z-loss": (2, {_TP: 2, _MODE: "full", **_LARGE, **_PENALTY}),
    "tp 2, two chunks, large vocabulary": (2, {_TP: 2, _MODE: "full", **_LARGE, _CHUNKS: 2}),
    "cp 2": (2, {_CP: 2}),
    "pp 2, Interleaved1F1B": (2, {_PP: 2, _SCHEDULE: "Interleaved1F1B"}),
    "sinks, cp 2": (2, {**_GPT_OSS, _CP: 2}),
    "MoE, experts over tp 2, fsdp 2, AC full": (
        4,
        {**_MIXTRAL, _TP: 2, "parallelism.expert_parallel_degree": 2, _MODE: "full"},
    ),
    "fsdp 4, AC full, Muon": (4, {_MODE: "full", _OPTIMIZER: "Muon"}),
    "hsdp 2 x 2": (4, {_REPLICAS: 2, _SHARD: 2}),
    "tp 2, fsdp 2, AC op, chunks": (
        4,
        {_TP: 2, _SHARD: 2, _MODE: "selective", _OPTION: "op", _CHUNKS: 4},
    ),
    "cp 2, fsdp 2, AC every 2nd": (4, {_CP: 2, _SHARD: 2, _MODE: "selective", _OPTION: 2}),
    "pp 2, fsdp 2": (4, {_PP: 2, _SHARD: 2}),
}


def config_of(case: str) -> tuple[int, list[str]]:
    """Return the ranks and the flags of a case."""
    ranks, flags = CASES[case]
    return ranks, [f"--{key}={value}" for key, value in {**_BASE, **flags}.items()]


def planned(case: str) -> RunConfig:
    """Return the run of a case as the plan reads it."""
    ranks, flags = config_of(case)
    return run_from("debug_model.toml", ranks, *flags)


def measure(world: DistEnv, case: str) -> RankMemory:
    """Train two steps of a run with its real components, and measure the second.

    Every rank calls it.
    """
    with second_step(world, config_of(case)[1]) as (run, parts, batches):
        return measure_step(world, run, parts, batches)


def measure_step(world: DistEnv, run: RunConfig, parts: Any, batches: list[Batch]) -> RankMemory:
    """Train one step, and measure it. parts: of the run, built."""
    blocks = run.spec.block_names(parts.args)
    meter = MemoryMeter(parts.model, parts.optimizer, blocks, run.spec.head)
    parts.train_step.phase = meter.phase
    for tensor in (t for batch in batches for t in batch if t is not None):
        meter.track(tensor)
    meter.restart()
    with meter:
        parts.train_step(batches, 2, 1e-3)
    return RankMemory(world.rank, meter.moments())


def peak_bytes(work: Callable[[], object]) -> int:
    """Run `work`, and return the most bytes that torch's allocator of the CPU handed out at one
    moment beyond those from before, as its profiler records each call.
    """
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    records = [event for event in results.events() if event.name() == "[memory]"]
    held = most = 0
    for record in sorted(records, key=lambda event: event.start_ns()):
        held += record.nbytes()
        most = max(most, held)
    return most


def allocated(world: DistEnv, case: str) -> int:
    """Return the most bytes that the allocator hands out in a step beyond those from before it.

    The least of three equal steps: a thread of gloo may free a tensor, and the profiler does not
    see that. So a step may seem to need more than it does, never less.
    """
    with second_step(world, config_of(case)[1]) as (_, parts, batches):
        takes = [functools.partial(parts.train_step, batches, step, 1e-3) for step in (2, 3, 4)]
        return min(map(peak_bytes, takes))


@contextlib.contextmanager
def second_step(
    world: DistEnv, flags: list[str], config: str = "debug_model.toml"
) -> Iterator[tuple[RunConfig, Any, list[Batch]]]:
    """Train one step of a run, and give the run, its components and the batches of the next
    step.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = f"--job.dump_folder={world.broadcast(folder)}"
        run = load_config(config, world.size, [*flags, own])
        parts = build(run, world)
        try:
            parts.train_step(to_device(parts.loader.next_step(), world.device), 1, 1e-3)
            yield run, parts, to_device(parts.loader.next_step(), world.device)
        finally:
            parts.close()
