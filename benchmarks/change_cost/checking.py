"""Helpers of the checks, which run the changed tree by its commands and read its logs.

A check goes by the keys of its task and by numbers alone, so it holds for any implementation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: The changed tree: the first argument, or the one around this file.
TREE = Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parents[1]).resolve()
SMALL = (
    "--model.overrides.dim=64",
    "--model.overrides.n_layers=2",
    "--model.overrides.n_heads=4",
    "--model.overrides.n_kv_heads=2",
    "--training.seq_len=64",
    "--training.global_batch_size=8",
    "--training.batch_size=2",
    "--training.warmup_steps=2",
    "--metrics.log_freq=1",
    "--no-validation.enable",
)
TENSOR = "--training.tensor_parallel_degree=2"
REPLICAS = "--training.data_parallel_replicate_degree=2"
PIPELINE = "--experimental.pipeline_parallel_degree=2"


def require(condition: bool, message: str) -> None:
    """End the check with exit code 1 and the message, unless the condition holds."""
    if not condition:
        print(f"FAIL: {message}")
        sys.exit(1)


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `titanlite` of the changed tree in an empty folder."""
    env = {**os.environ, "PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1", **environment}
    with tempfile.TemporaryDirectory() as empty:
        return subprocess.run(
            [sys.executable, "-m", "titanlite", *words],
            cwd=empty,
            env=env,
            capture_output=True,
            text=True,
        )


def is_accepted(*flags: str) -> bool:
    """Whether a config with these flags passes the check before a run."""
    return command("config", "check", "debug_model.toml", *flags).returncode == 0


def require_keys(*flags: str) -> None:
    """End the check where the tree knows no such keys: nothing was implemented."""
    require(is_accepted(*flags), f"a config with {' '.join(flags)} is refused")


def train(folder: Path, ranks: int, *flags: str, recorder: str = "") -> list[dict[str, Any]]:
    """Train a small Llama on real ranks and return the rows of its metrics.jsonl.

    recorder: a class of recorders.py, whose files `records` reads.
    """
    if recorder:
        flags = (*flags, f'--job.callbacks=["{HERE}/recorders.py:{recorder}"]')
    done = command(
        *("train", "debug_model.toml", "--nproc-per-node", str(ranks)),
        *SMALL,
        f"--job.dump_folder={folder}",
        *flags,
        RECORDS=str(folder),
    )
    said = (done.stdout + done.stderr)[-3000:]
    require(done.returncode == 0, f"{ranks} ranks with {' '.join(flags)}:\n{said}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def records(folder: Path) -> list[Any]:
    """Return what each rank's recorder saved, in the order of ranks."""
    import torch

    files = sorted(folder.glob("rank_*.pt"))
    return [torch.load(file, weights_only=True) for file in files]


def is_near(found: float, wanted: float, relative: float) -> bool:
    return abs(found - wanted) <= relative * abs(wanted)


def require_same_losses(
    name: str, found: list[dict[str, Any]], wanted: list[dict[str, Any]], relative: float
) -> None:
    """End the check where two runs logged other steps, losses or gradient norms; 0: to the bit."""
    steps = [row["step"] for row in wanted]
    require([row["step"] for row in found] == steps, f"{name}: steps are missing")
    for ours, theirs in zip(found, wanted, strict=True):
        for key, bound in (("loss", relative), ("grad_norm", 100 * relative)):
            require(
                is_near(ours[key], theirs[key], bound),
                f"{name}: {key} of step {ours['step']} is {ours[key]}, not {theirs[key]}",
            )
