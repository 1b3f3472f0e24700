"""Shared by the float8 tests: runs with learnable batches, and what is observed of their products
and collectives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.harness import TINY, Run, changed, stepper
from tests.support.watch import Watch
from titanlite.config.sections import Float8, Training
from titanlite.dist.dist_env import DistEnv

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
REAL = Float8(enable_float8_linear=True)
EMULATED = Float8(enable_float8_linear=True, emulate=True)
GATHERED = changed(EMULATED, enable_fsdp_float8_all_gather=True)
MX = Float8(enable_float8_linear=True, recipe_name="mxfp8", emulate=True)
PRECOMPUTED = changed(GATHERED, precompute_float8_dynamic_scale_for_fsdp=True)
#: Linears of TINY that are converted: seven in each of two blocks, and their parameters.
LINEARS = 14
CONVERTED = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
TOTAL = 123_200
#: Two ranks' parts of each weight have whole blocks of MX.
WIDE = replace(TINY, n_kv_heads=4)


def recipe(name: str, float8: Float8 = EMULATED) -> Float8:
    return changed(float8, recipe_name=name)


def learnable(steps: int, global_batch: int, seq_len: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [steps, global batch, seq_len]: nine times of ten a token is followed by
    its only successor.
    """
    generator = torch.Generator().manual_seed(0)
    successor = torch.randperm(vocab, generator=generator)
    shape = (steps, global_batch, seq_len + 1)
    noise = torch.randint(0, vocab, shape, generator=generator)
    random = torch.rand(shape, generator=generator) < 0.1
    window = noise.clone()
    for place in range(1, seq_len + 1):
        window[..., place] = torch.where(
            random[..., place], noise[..., place], successor[window[..., place - 1]]
        )
    return window[..., :-1].contiguous(), window[..., 1:].contiguous()


STEPS = 40
TOKENS, LABELS = learnable(STEPS, 8, 16, 192)
RATES = [1e-2 * min(1.0, (n + 1) / 5) for n in range(STEPS)]
#: In bf16; the first ten of the rates.
RUN = Run(TOKENS, LABELS, RATES[:10], args=TINY, training=Training())


class Seen(Watch):
    """Counts products of float8 tensors by the factors' roles and types, others by type, and
    collectives by name.
    """

    def __init__(self) -> None:
        super().__init__(self._count)
        self.products: Counter[tuple[str, ...]] = Counter()
        self.sent: Counter[str] = Counter()
        self.gathered = 0

    def _count(self, func: Any, args: Any, output: Any) -> None:
        if func is torch.ops.aten.mm.default:
            self.products[tuple(map(_what, args))] += 1
        if (
            func.namespace in ("c10d", "_c10d_functional")
            and "wait" not in str(func)
            and "barrier" not in str(func)
        ):
            name = str(func).split(".")[1].strip("_")
            self.sent[name] += 1
            if name == "allgather_base":
                self.gathered += args[0].nbytes


def _what(tensor: Tensor) -> str:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local).__name__ == "MXTensor":
        return "MXTensor"
    if hasattr(local, "_gemm_input_role"):
        return (
            f"{local._gemm_input_role.value} {str(local._data.dtype).removeprefix('torch.float8_')}"
        )
    return str(local.dtype).removeprefix("torch.")


def watch_step(world: DistEnv, run: Run) -> Seen:
    """The second step."""
    _, _, take = stepper(world, run)
    take(1)  # FSDP sets itself up
    with Seen() as seen:
        take(2)
    return seen
