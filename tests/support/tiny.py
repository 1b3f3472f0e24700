"""Sizes of runs of `train.py` that take seconds, as flags. Tests add what they are about."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import titanlite


def _kept_tokens() -> str:
    """The flag with which all runs of all tests share the tokens of the bundled text.

    Reading it anew takes each rank of each run longer than a tiny run trains. Other code that reads
    has other tokens.
    """
    digest = hashlib.sha256()
    for source in sorted((Path(titanlite.__file__).parent / "data").rglob("*.py")):
        digest.update(source.read_bytes())
    folder = (
        Path(tempfile.gettempdir())
        / f"titanlite-tests-{os.getuid()}"
        / f"tokens-{digest.hexdigest()[:12]}"
    )
    return f"--data.token_cache={folder}"


KEPT_TOKENS = _kept_tokens()


def size(dim: int, layers: int, heads: int, seq_len: int) -> list[str]:
    """The debug model at this size."""
    return [
        f"--model.overrides.dim={dim}",
        f"--model.overrides.n_layers={layers}",
        f"--model.overrides.n_heads={heads}",
        f"--training.seq_len={seq_len}",
        KEPT_TOKENS,
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
TWENTY_STEPS = [
    *TWO_LAYERS,
    "--training.batch_size=2",
    "--training.global_batch_size=8",
    "--training.warmup_steps=3",
    "--optimizer.lr=1e-2",
    "--lr_scheduler.total_steps=20",
    "--metrics.log_freq=1",
    "--training.mixed_precision_param=float32",
    "--validation.freq=10",
    "--validation.steps=2",
    "--validation.batch_size=4",
    "--validation.seq_len=32",
    "--checkpoint.enable_checkpoint",
]
