"""Attention as a GPU runs it: over ranks that share sequences without a mask in memory, and within
documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.conftest import without_waits
from tests.support.compare import DOCUMENTS, LABELS, TOKENS, WARM
from tests.support.harness import Run, alone, train, train_afresh
from tests.support.llamas import relative
from titanlite.config.sections import ActivationCheckpoint, Compile, Training
from titanlite.features.context.balanced_chunks import CPRank
from titanlite.features.context.gathered_attention import ContextAttention
from titanlite.models.document_attention import document_mask
from titanlite.models.layers import SdpaAttention

SEQ = 1024
DEGREE = 4


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


def attend_in_parts(
    device: str, dtype: torch.dtype, kv_heads: int, compiled: bool
) -> tuple[float, Seen]:
    """Largest relative error of outputs and gradients of all ranks against plain attention
    in fp32.
    """
    torch.manual_seed(0)
    q, k, v, upstream = (
        torch.randn(2, n, SEQ, 64, device=device, dtype=dtype) for n in (8, kv_heads, kv_heads, 8)
    )
    exact = [t.float().clone().requires_grad_() for t in (q, k, v)]
    expected = SdpaAttention()(*exact, None)
    expected.backward(upstream.float())
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    errors = []
    seen = Seen()
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
        errors.append(relative(output.float(), share.part(expected, 2)))
    for part, whole in zip(ours, exact, strict=True):
        errors.append(relative(part.grad.float(), whole.grad))  # type: ignore[union-attr, arg-type]
    return max(errors), seen


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "within"),
    [(torch.bfloat16, 8, 1e-2), (torch.bfloat16, 2, 1e-2), (torch.float32, 8, 1e-3)],
)
def test_context_kernels_know_the_mask(dtype, kv_heads, within):
    error, seen = attend_in_parts("cuda", dtype, kv_heads, compiled=False)
    assert error < within
    assert len(seen.attention) == 2 * DEGREE
    assert not seen.boolean
    # A chunk that starts the sequence is the plain causal case, for which torch has more kernels.
    plain = {
        f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")
    }
    assert set(seen.attention) <= {*plain, "_efficient_attention_forward"}


@pytest.mark.numbers
def test_compiled_attention_is_the_same():
    error, _ = attend_in_parts("cuda", torch.bfloat16, 2, compiled=True)
    assert error < 1e-2


def attend(attention: SdpaAttention, doc_ids: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, in float32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 1024, 64) for heads in (8, 2, 2, 8)]
    q, k, v, upstream = (
        torch.randn(shape, generator=generator).to(doc_ids.device, dtype) for shape in shapes
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    y = attention(*leaves, attention.prepare(doc_ids if doc_ids.any() else None))
    return [t.float().cpu() for t in (y.detach(), *torch.autograd.grad(y, leaves, upstream))]


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-4)]
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("window", "documents"), [(None, True), (20, True), (100, False)])
def test_outputs_and_gradients_equal_those_of_the_cpu(
    world, dtype, within, compiled, window, documents
):
    many = (torch.rand(2, 1024, generator=torch.Generator().manual_seed(1)) < 0.02).cumsum(1)
    doc_ids = many if documents else torch.zeros(2, 1024, dtype=torch.int64)
    expected = attend(SdpaAttention(window), doc_ids, torch.float32)
    attention = SdpaAttention(window)
    if compiled:
        torch.compiler.reset()  # torch compiles one function for 8 dtypes and masks at most
        attention.compile(fullgraph=True, dynamic=False)
    for found, exact in zip(
        attend(attention, doc_ids.to(world.device), dtype), expected, strict=True
    ):
        assert relative(found, exact) < within


def test_the_host_does_not_wait_for_the_mask(world):
    doc_ids = (torch.arange(1024, device=world.device) // 100).expand(2, -1).contiguous()
    with without_waits():
        document_mask(doc_ids)


@pytest.mark.numbers
@pytest.mark.parametrize("compile", [None, Compile()])
def test_losses_equal_those_of_documents_alone_to_the_rounding_of_bf16(world, compile):
    by_operation = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    masked = Run(
        TOKENS,
        LABELS,
        WARM[:8],
        DOCUMENTS,
        training=Training(),
        activations=by_operation,
        compile=compile,
    )
    tokens, labels = alone(TOKENS, LABELS, DOCUMENTS)
    apart = replace(masked, tokens=tokens, labels=labels, documents=None, compile=None)
    losses = train_afresh(world, masked).losses
    assert losses == pytest.approx(train(world, apart).losses, abs=2e-2)
