"""Attention within documents as a GPU runs it: numbers, no wait of the host, one graph, training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.training.compare import DOCUMENTS, LABELS, TOKENS, WARM
from tests.training.harness import Run, alone, train, train_afresh
from titanlite.config.sections import ActivationCheckpoint, Compile, Training
from titanlite.models.document_attention import document_mask
from titanlite.models.layers import SdpaAttention
from titanlite.parallel.dist_env import DistEnv


def attend(attention: SdpaAttention, doc_ids: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, in float32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 1024, 64) for heads in (8, 2, 2, 8)]
    q, k, v, upstream = (torch.randn(shape, generator=generator).to(doc_ids.device, dtype) for shape in shapes)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    y = attention(*leaves, attention.prepare(doc_ids))
    return [t.float().cpu() for t in (y.detach(), *torch.autograd.grad(y, leaves, upstream))]


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-4)])
@pytest.mark.parametrize("compiled", [False, True])
def test_outputs_and_gradients_equal_those_of_the_cpu(
    world: DistEnv, dtype: torch.dtype, within: float, compiled: bool
) -> None:
    doc_ids = (torch.rand(2, 1024, generator=torch.Generator().manual_seed(1)) < 0.02).cumsum(1)
    expected = attend(SdpaAttention(), doc_ids, torch.float32)
    attention = SdpaAttention()
    if compiled:
        attention.compile(fullgraph=True, dynamic=False)
    for found, exact in zip(attend(attention, doc_ids.to(world.device), dtype), expected, strict=True):
        assert (found - exact).norm() / exact.norm() < within


def test_the_host_does_not_wait_for_the_mask(world: DistEnv) -> None:
    doc_ids = (torch.arange(1024, device=world.device) // 100).expand(2, -1).contiguous()
    torch.cuda.set_sync_debug_mode("error")
    try:
        document_mask(doc_ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compile", [None, Compile()])
def test_losses_equal_those_of_documents_alone_to_the_rounding_of_bf16(world: DistEnv, compile: Compile | None) -> None:
    by_operation = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    masked = Run(TOKENS, LABELS, WARM[:8], DOCUMENTS, training=Training(), activations=by_operation, compile=compile)
    tokens, labels = alone(TOKENS, LABELS, DOCUMENTS)
    apart = replace(masked, tokens=tokens, labels=labels, documents=None, compile=None)
    losses = train_afresh(world, masked).losses
    assert losses == pytest.approx(train(world, apart).losses, abs=2e-2)
