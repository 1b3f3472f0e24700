"""Small models whose blocks are recomputed or kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.support.block_trace import ActivationStats, trace_block
from tests.support.harness import TINY, Run, batches
from titanlite.config.sections import ActivationCheckpoint
from titanlite.models import get_spec
from titanlite.parallel.activation_checkpoint import apply_ac

CPU = torch.device("cpu")
SPEC = get_spec("llama3")
FOUR = replace(TINY, n_layers=4)
BLOCKS = SPEC.block_names(FOUR)
TOKENS, LABELS = batches(2, 8, 32, 192)
RUN = Run(TOKENS, LABELS, [1e-3, 1e-3], args=FOUR)


def build(settings: ActivationCheckpoint) -> nn.Module:
    torch.manual_seed(3)
    model = SPEC.build(FOUR)
    apply_ac(model, BLOCKS, settings, CPU)
    return model


def traced(settings: ActivationCheckpoint, dtype: torch.dtype = torch.float32) -> ActivationStats:
    return trace_block(SPEC.build_on_meta(FOUR), BLOCKS, settings, (4, 32), CPU, dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(TOKENS[0]).logsumexp(-1).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
