"""torchao: what a machine needs for it, its import, and its linears in a model."""

from __future__ import annotations

import functools
import logging
import re
import sys
import warnings
from importlib import metadata
from typing import Any

import torch
from torch import nn

#: The first with float8 products: Ada and Hopper.
_CAPABILITY = (8, 9)


def lack_of_machine() -> str:
    """Return why this machine, or its packages, have no right float8 products; "": they have."""
    if not torch.cuda.is_available():
        return "a CPU has no float8 products"
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < _CAPABILITY:
        version = ".".join(map(str, capability))
        return (
            f"{torch.cuda.get_device_name()} has compute capability {version}, and float8 "
            "products need 8.9"
        )
    of_torch = metadata.version("torch")
    of_torchao = metadata.version("torchao")
    if release(of_torch) >= (2, 14) and release(of_torchao) < (0, 18):
        # triton issue 11111: inductor of torch 2.14 meets it, and torchao 0.18 avoids it.
        return (
            f"torch {of_torch} stores compiled float8 values wrong, and torchao {of_torchao} does "
            "not prevent it: pip install 'torchao>=0.18'"
        )
    return ""


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@functools.cache
def torchao() -> Any:
    """Import `torchao.float8`, which takes seconds, without its log lines and warnings about other
    devices.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.float8
        import torchao.float8.float8_linear
        import torchao.float8.float8_tensor_parallel
    return torchao.float8


def float8_linears(model: nn.Module) -> list[Any]:
    """Return the linears of a model that compute in float8."""
    name = "torchao.float8.float8_linear"
    if name not in sys.modules:
        return []
    kind = sys.modules[name].Float8Linear
    return [module for module in model.modules() if isinstance(module, kind)]
