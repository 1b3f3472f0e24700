"""The same start for two trainers: weights, batches and settings, all from a recipe.

Used by `benchmarks/torchtitan_losses.py` on both sides, in both environments, and by the test that
repeats its titanlite side. Numbers are uniform draws of numpy's `RandomState`, whose streams numpy
promises never to change:
no file travels, and no trainer's own initial weights are involved.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from titanlite.dist.dist_env import DistEnv

STEPS, GLOBAL_BATCH, MICRO_BATCH, SEQ = 4, 8, 2, 48
DIM, LAYERS, HEADS, KV_HEADS, MULTIPLE_OF, VOCAB = 64, 3, 4, 2, 32, 2304
#: Llama 3.1's stretching of the RoPE frequencies, over a context short enough that every one of its
#: three bands counts.
ROPE_THETA, ROPE_FACTOR, ROPE_CONTEXT = 10000.0, 8.0, 64
#: The norm clips the first two steps and not the last two.
LR, WEIGHT_DECAY, MAX_NORM = 4e-3, 0.1, 1.7
#: Learning rates as torchtitan 0.2.2 has them: 2 steps of warm-up, then a cosine over the rest of 5
#: steps.
WARMUP, SCHEDULE, FLOOR = 2, 5, 0.1
IGNORE = -100

#: The same in titanlite's words. Its warm-up is (n + 1) / (warmup_steps + 1), torchtitan's (n + 1)
#: / warmup_steps: one step fewer here. torchtitan stays at the peak for one step before it decays:
#: here that is the plateau.
CONFIG = f"""
[job]
description = "the same start as torchtitan's"

[model]
name = "llama3"
flavor = "debugmodel"
rope_scaling = {{ factor = {ROPE_FACTOR}, original_context = {ROPE_CONTEXT} }}

[model.overrides]
dim = {DIM}
n_layers = {LAYERS}
n_heads = {HEADS}
n_kv_heads = {KV_HEADS}
multiple_of = {MULTIPLE_OF}
rope_theta = {ROPE_THETA}

[optimizer]
name = "AdamW"
lr = {LR}
weight_decay = {WEIGHT_DECAY}

[lr_scheduler]
decay_type = "cosine"
min_lr_factor = {FLOOR}
plateau_ratio = {1 / SCHEDULE}
total_steps = {SCHEDULE}

[training]
batch_size = {MICRO_BATCH}
global_batch_size = {GLOBAL_BATCH}
seq_len = {SEQ}
steps = {STEPS}
warmup_steps = {WARMUP - 1}
max_norm = {MAX_NORM}
mixed_precision_param = "float32"
mixed_precision_reduce = "float32"
gradient_sync = "every"

[metrics]
log_freq = 1
"""


def torchtitan_model() -> dict[str, Any]:
    """Keyword arguments of torchtitan's `TransformerModelArgs`, the RoPE scaling as a table."""
    return {
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "multiple_of": MULTIPLE_OF,
        "vocab_size": VOCAB,
        "rope_theta": ROPE_THETA,
        "rope_scaling_args": {
            "scaling_factor": ROPE_FACTOR,
            "original_max_position_embeddings": ROPE_CONTEXT,
        },
    }


def torchtitan_flags() -> dict[str, object]:
    """Command-line keys of torchtitan 0.2.2."""
    return {
        "training.local_batch_size": MICRO_BATCH,
        "training.global_batch_size": GLOBAL_BATCH,
        "training.seq_len": SEQ,
        "training.steps": STEPS,
        "training.max_norm": MAX_NORM,
        "optimizer.name": "AdamW",
        "optimizer.lr": LR,
        "optimizer.weight_decay": WEIGHT_DECAY,
        "optimizer.implementation": "foreach",
        "lr_scheduler.warmup_steps": WARMUP,
        "lr_scheduler.total_steps": SCHEDULE,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": FLOOR,
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": 1,
    }


def weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The weight of that name (torchtitan's names, which are Meta's; q and k interleaved as there).

    Matrices have standard deviation fan_in ** -0.5, so that attention is far from uniform; norms
    are 0.8 to 1.2.
    """
    draw = np.random.RandomState(zlib.crc32(name.encode())).uniform(-1.0, 1.0, shape)
    if len(shape) == 1:
        return (1.0 + 0.2 * draw).astype(np.float32)
    deviation = 1.0 if name.startswith("tok_embeddings") else shape[-1] ** -0.5
    return (np.sqrt(3.0) * deviation * draw).astype(np.float32)


def sequence(index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and labels [SEQ] of the sequence with that global index.

    Low ids are frequent, so that there is something to learn; sequences end after very unequal
    lengths.
    """
    draw = np.random.RandomState(1000 + index).uniform(0.0, 1.0, SEQ + 2)
    window = (VOCAB * draw[:-1] ** 4).astype(np.int64)
    tokens, labels = window[:-1].copy(), window[1:].copy()
    labels[1 + int(SEQ * draw[-1]) :] = IGNORE
    return tokens, labels


def train_titanlite(world: DistEnv, folder: Path, *flags: str) -> list[dict[str, float]]:
    """Train with titanlite's `Trainer` from `CONFIG`; on rank 0 the rows of its metrics.jsonl, one
    per step.

    folder: an empty one, the same on all ranks or not. flags: as on the command line, after
    `CONFIG`.
    """
    from titanlite.assembly.build import build
    from titanlite.assembly.datasets import read_datasets
    from titanlite.data.rows import Row
    from titanlite.models.llama_hf import permute
    from titanlite.resolve.load import load_config
    from titanlite.runs.metrics_jsonl import FILE
    from titanlite.runs.read_jsonl import read_metrics
    from titanlite.trainer import Trainer

    config, text = folder / f"config-{world.rank}.toml", folder / f"text-{world.rank}.json"
    config.write_text(CONFIG)
    text.write_text(json.dumps({"text": "replaced below", "timestamp": "", "url": ""}) + "\n")
    dump = folder / "run"
    # Each rank has its own files, as on hosts that share no folder.
    mine = [
        f"--job.dump_folder={dump}",
        f"--training.dataset_path={text}",
        "--no-launch.preflight",
        *flags,
    ]
    run = load_config(str(config), world.size, mine)
    read = read_datasets(run)
    read.train.sequence = lambda index: Row(*sequence(index))  # type: ignore[method-assign]
    trainer = Trainer(build(run, world, read))
    parameters = dict(trainer.parts.model.named_parameters())
    drawn = {name: _tensor(weight(name, tuple(p.shape))) for name, p in parameters.items()}
    args = trainer.parts.args
    for name, value in drawn.items():
        heads = {"wq": args.n_heads, "wk": args.kv_heads}.get(name.split(".")[-2])
        place(parameters[name], permute(value, heads) if heads else value)
    trainer.train()
    return read_metrics(dump / FILE) if world.rank == 0 else []


def place(parameter: torch.nn.Parameter, full: torch.Tensor) -> None:
    """Write the full value into a parameter, plain or sharded."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        if isinstance(parameter, DTensor):
            full = distribute_tensor(
                full, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.copy_(full)


def _tensor(values: NDArray[Any]) -> torch.Tensor:
    import torch

    return torch.from_numpy(values)
