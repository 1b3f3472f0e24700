"""torchao's MX products: what they need of a machine, and their import."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from titanlite.config.errors import Problem
from titanlite.config.sections import Float8
from titanlite.features.float8.checks import ENABLE, RECIPE
from titanlite.features.float8.package import release, torchao
from titanlite.features.mx.checks import BLOCK

#: The first torchao with `moe_training.mxfp8_linear`.
_TORCHAO = (0, 18)
#: torchao's kernels are compiled for it: data-center Blackwell, 10.0 and 10.3.
_MAJOR_CAPABILITY = 10
#: How torchao names the rule for the scale of a block, by recipe.
_SCALES = {"mxfp8": "rceil", "mxfp8_floor": "floor"}

#: Takes an input [..., K] and a weight [N, K]; returns [..., N].
Product = Callable[[Tensor, Tensor], Tensor]


def machine_problems(settings: Float8) -> Iterator[Problem]:
    """Find what this machine, or the torchao on it, lacks for MX products."""
    found = metadata.version("torchao")
    if release(found) < _TORCHAO:
        message = f"MXFP8 needs torchao 0.18 or later; this is torchao {found}"
        hint = "pip install 'torchao>=0.18', or take another recipe"
        yield Problem("does-not-fit", RECIPE, message, hint)
    elif not settings.emulate and (lack := lack_of_machine()):
        hint = (
            f"take another recipe, or set {ENABLE} to false; float8.emulate = true computes with "
            "the same rounded numbers in high precision, which is slow and for tests"
        )
        yield Problem("does-not-fit", RECIPE, lack, hint)


def lack_of_machine() -> str:
    """Return why this machine has no MX units, or no kernels that feed them; "": it has both."""
    if not torch.cuda.is_available():
        return "a CPU has no MXFP8 products"
    if torch.version.hip is not None:
        return "MXFP8 products of AMD GPUs are not supported"
    capability = torch.cuda.get_device_capability()
    if capability[0] != _MAJOR_CAPABILITY:
        version = ".".join(map(str, capability))
        return (
            f"{torch.cuda.get_device_name()} has compute capability {version}, and torchao's "
            "kernels for MXFP8 need 10.0 to 10.9"
        )
    if not _has_kernels():
        return (
            f"torchao {metadata.version('torchao')} has no kernels for MXFP8 with this torch: they "
            "need CUDA 12.8 or later and triton"
        )
    return ""


def _has_kernels() -> bool:
    torchao()
    from torchao.prototype.mx_formats import kernels

    return bool(kernels._triton_kernels_available and kernels._mxfp8_cuda_kernels_available)


@functools.cache
def product(recipe: str, emulate: bool) -> Product:
    """Return torchao's product of an input and a weight, both rounded to MXFP8.

    Gradients are products of rounded numbers, too. emulate: on any device, in the dtype of the
    input.
    """
    torchao()  # without the lines that it logs
    from torchao.prototype.moe_training import mxfp8_linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    scales = ScaleCalculationMode(_SCALES[recipe])
    multiply: Any = mxfp8_linear._to_mxfp8_then_scaled_mm

    def rounded(x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, multiply(x, weight, kernels, scales))

    return rounded


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, torchao's kernels only make the tensors of their results: for a trace of memory."""
    torchao()
    from torchao.prototype.mx_formats import kernels, mx_tensor

    def by_rows(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return _rounded(x)

    def by_columns(x: Tensor, **_: Any) -> tuple[Tensor | None, ...]:
        numbers, scales = _rounded(x.t())
        return None, numbers.t(), None, scales

    with (
        mock.patch.object(mx_tensor, "triton_to_mxfp8_dim0", by_rows),
        mock.patch.object(kernels, "mxfp8_quantize_cuda", by_columns),
    ):
        yield


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the numbers of x [rows, columns] and for their scales, rows first."""
    rows, columns = x.shape
    numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.float8_e8m0fnu, device=x.device)
    return numbers, scales
