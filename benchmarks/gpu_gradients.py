"""Gradients of a first step, compiled in bf16 and in float8, against eager fp32, as JSON.

    python benchmarks/gpu_gradients.py CONFIG [FLAG ...]

A form whose gradients are wrong may be fast, and its losses may fall: its speed is worth nothing.
benchmarks/gpu.py calls it for the row `gradients`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.assembly.build import build
from titanlite.dist.dist_env import DistEnv
from titanlite.resolve.load import load_config
from titanlite.trainer import Trainer

ONE_STEP = (
    *("--training.steps=1", "--lr_scheduler.total_steps=1000", "--training.max_norm=1e9"),
    *("--no-validation.enable", "--no-checkpoint.enable_checkpoint"),
)
EAGER = ("--no-training.compile",)
COMPILED = ("--training.compile",)
FLOAT8 = (*COMPILED, "--float8.enable_float8_linear")
GATHERED = (
    *FLOAT8,
    "--float8.enable_fsdp_float8_all_gather",
    "--float8.precompute_float8_dynamic_scale_for_fsdp",
)
#: The first is the reference; the others have the names of levels of benchmarks/gpu.py.
FORMS: dict[str, Sequence[str]] = {
    "fp32": (*EAGER, "--training.mixed_precision_param=float32"),
    "compile": COMPILED,
    "float8-all-gather": GATHERED,
}
#: The largest distance from fp32, in percent. Eager bf16 measured 0.7 on an H200.
LIMITS = {"compile": 3.0, "float8-all-gather": 30.0}


def main() -> None:
    """Print a row for each form but the reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    arguments, flags = parser.parse_known_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        flags.append("--float8.emulate")
    found: dict[str, dict[str, Tensor]] = {}
    rows = []
    with DistEnv.open(device_type=device) as world, tempfile.TemporaryDirectory() as folder:
        for form, more in FORMS.items():
            common = [*flags, *ONE_STEP, f"--job.dump_folder={folder}", *more]
            found[form] = gradients(world, arguments.config, common)
            if form != "fp32":
                rows.append(compared(form, found.pop(form), found["fp32"]))
    print(json.dumps(rows))


def gradients(world: DistEnv, config: str, flags: list[str]) -> dict[str, Tensor]:
    """Return the gradients of step 1, in float32 by name of the weight."""
    torch.compiler.reset()
    parts = build(load_config(config, 1, flags), world)
    names = {parameter: name for name, parameter in parts.model.named_parameters()}
    found: dict[str, Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                found[names[parameter]] = local.detach().float().clone()

    parts.optimizer.register_step_pre_hook(keep)
    Trainer(parts).train()
    del parts
    gc.collect()  # a trainer refers to itself
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def compared(
    form: str, ours: dict[str, Tensor], exact: dict[str, Tensor]
) -> dict[str, str | float | list[str]]:
    """Return a row: the distance of all gradients in percent of their norm, and what is lost."""
    distance = _norm([ours[name] - gradient for name, gradient in exact.items()])
    lost = [name for name, gradient in exact.items() if gradient.any() and not ours[name].any()]
    return {
        "what": form,
        "value": (100 * distance / _norm(list(exact.values()))).item(),
        "unit": "% of the norm from eager fp32",
        "lost": lost,
    }


def _norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


if __name__ == "__main__":
    main()
