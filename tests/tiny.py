"""Sizes of runs of `train.py` that take seconds, as flags. Tests add what they are about."""

from __future__ import annotations


def size(dim: int, layers: int, heads: int, seq_len: int) -> list[str]:
    """The debug model at this size."""
    return [
        f"--model.overrides.dim={dim}",
        f"--model.overrides.n_layers={layers}",
        f"--model.overrides.n_heads={heads}",
        f"--training.seq_len={seq_len}",
    ]


#: For what needs real blocks: losses that fall, parts on several ranks.
TWO_LAYERS = size(64, 2, 4, 32)
#: For what counts steps, files and signals: 8 steps of 4 sequences, each logged, bit for bit.
EIGHT_STEPS = [
    *size(32, 1, 2, 16),
    "--training.batch_size=1",
    "--training.global_batch_size=4",
    "--training.warmup_steps=2",
    "--lr_scheduler.total_steps=8",
    "--metrics.log_freq=1",
    "--training.mixed_precision_param=float32",
]
