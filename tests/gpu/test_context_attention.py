"""A GPU's attention kernels take the queries of two chunks against longer keys, without a mask in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.models.layers import SdpaAttention
from titanlite.parallel.context import ContextAttention, CPRank

SEQ, DEGREE = 1024, 4


@dataclass
class AllRanks(CPRank):
    """One rank of several in one process: what the others would send is there already."""

    whole: Tensor | None = None

    def gather(self, x: Tensor, dim: int) -> Tensor:
        assert self.whole is not None
        return self.whole


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.attention: list[str] = []
        self.boolean = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "attention" in str(func):
            self.attention.append(func.overloadpacket.__name__)
        self.boolean += isinstance(out, Tensor) and out.dtype == torch.bool
        return out


def attend(device: str, dtype: torch.dtype, kv_heads: int, compiled: bool) -> tuple[float, Seen]:
    """Largest relative error of outputs and gradients of all ranks against plain attention in fp32."""
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(2, n, SEQ, 64, device=device, dtype=dtype) for n in (8, kv_heads, kv_heads, 8))
    exact = [t.float().clone().requires_grad_() for t in (q, k, v)]
    expected = SdpaAttention()(*exact, None)
    expected.backward(upstream.float())
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    errors, seen = [], Seen()
    for rank in range(DEGREE):
        share = AllRanks(rank, DEGREE, None, SEQ)  # type: ignore[arg-type]
        share.whole = torch.stack(ours[1:])
        attention: Any = ContextAttention(share)
        mask = attention.prepare(None)
        if compiled:
            attention = torch.compile(attention, fullgraph=True, dynamic=False)
        parts = [share.part(t, 2) for t in ours]
        if compiled:
            output = attention(*parts, mask)
        else:
            with seen:
                output = attention(*parts, mask)
        output.backward(share.part(upstream, 2))
        errors.append(relative(output, share.part(expected, 2)))
    errors += [relative(t.grad, whole.grad) for t, whole in zip(ours, exact, strict=True)]
    return max(errors), seen


def relative(a: Any, b: Any) -> float:
    return ((a.float() - b).norm() / b.norm()).item()


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "within"), [(torch.bfloat16, 8, 1e-2), (torch.bfloat16, 2, 1e-2), (torch.float32, 8, 1e-3)]
)
def test_kernels_know_the_mask(dtype: torch.dtype, kv_heads: int, within: float) -> None:
    error, seen = attend("cuda", dtype, kv_heads, compiled=False)
    assert error < within
    assert len(seen.attention) == 2 * DEGREE and not seen.boolean
    # A chunk that starts the sequence is the plain causal case, for which torch has more kernels.
    plain = {f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")}
    assert set(seen.attention) <= {*plain, "_efficient_attention_forward"}


def test_compiled_attention_is_the_same() -> None:
    error, _ = attend("cuda", torch.bfloat16, 2, compiled=True)
    assert error < 1e-2
