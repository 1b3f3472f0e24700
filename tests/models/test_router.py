"""The router by hand, and its losses; families' tests hold whole models against `transformers`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from titanlite.models import SPECS, resolve_args
from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.experts.layer import MoE
from titanlite.models.experts.router import Routing
from titanlite.models.gpt_oss_layers import GptOssMoE


@dataclass(frozen=True)
class Args(ExpertArgs):
    """Every option as a field."""

    expert_width: int = 24
    n_shared_experts: int = 0
    n_dense_layers: int = 0
    score: str = "softmax"
    norm_topk: bool = True
    route_scale: float = 1.0
    n_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    router_bias: bool = False
    scales_input: bool = False
    bias_update: float = 0.0


ARGS = Args(16, 2, 2, ffn_dim=40, vocab_size=32, n_experts=8, top_k=3, aux_loss=0.0)
DEEPSEEK = replace(
    ARGS, score="sigmoid", n_groups=4, top_groups=2, route_scale=2.5, bias_update=0.001
)


@pytest.mark.parametrize("args", [ARGS, DEEPSEEK], ids=["softmax", "sigmoid"])
def test_losses_by_hand_and_what_a_layer_records(args):
    """Sigmoids count as shares of a token, as probabilities are."""
    moe = MoE(replace(args, n_layers=1, aux_loss=0.5, z_loss=0.1))
    for index, parameter in enumerate(moe.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))
    if moe.expert_bias is not None:
        moe.expert_bias.copy_(torch.tensor([0.2, 0, 0, -0.3, 0.5, 0, -0.1, 0.1]))
    moe.record = torch.zeros(8 + 3, dtype=torch.float64)
    moe.load = torch.zeros(8, dtype=torch.int64)
    x = torch.randn(1, 12, 16)
    (with_losses,) = torch.autograd.grad(moe(x).sum(), moe.gate.weight)
    with torch.no_grad():
        moe(x)
    record, load = moe.record.clone(), moe.load.clone()
    moe.aux_weight = moe.z_weight = 0.0
    (without,) = torch.autograd.grad(moe(x).sum(), moe.gate.weight)
    logits = moe.gate(x[0])
    scores = logits.softmax(-1)
    if args.score == "sigmoid":
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    chosen = Routing(args).choose(logits, moe.expert_bias).experts
    rows = torch.bincount(chosen.flatten(), minlength=8)
    balance = 8 * (rows / 12 * scores.mean(0)).sum()
    z = logits.logsumexp(-1).square().mean()
    (expected,) = torch.autograd.grad(0.5 * balance + 0.1 * z, moe.gate.weight)
    torch.testing.assert_close(with_losses - without, expected, rtol=1e-3, atol=1e-5)
    assert load.tolist() == record[:8].tolist() == rows.tolist()
    wanted = torch.stack([torch.ones(()), balance, z]).double()
    torch.testing.assert_close(record[8:] / 12, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "llama4"])
def test_the_weights_of_all_layers_sum_to_the_arguments(family):
    spec = SPECS[family]
    changes: dict[str, Any] = {"n_layers": 6, "aux_loss": 0.3, "z_loss": 0.1}
    changes |= {"sparse_step": 2, "n_dense_layers": 2, "dense_blocks": [1], "nope_every": 3}
    known = {
        name: changes[name] for name in changes if name in spec.args_class.__dataclass_fields__
    }
    args = resolve_args(family, "debugmodel", known, tokenizer_size=96)
    layers = [module for module in spec.build_on_meta(args).modules() if isinstance(module, MoE)]
    assert len(layers) == len(spec.moe_layers(args))
    assert sum(layer.aux_weight for layer in layers) == pytest.approx(0.3, rel=1e-12)
    assert sum(layer.z_weight for layer in layers) == pytest.approx(0.1, rel=1e-12)


def test_one_expert_of_each_token_may_be_scaled():
    assert replace(ARGS, top_k=1, score="sigmoid", norm_topk=False).top_k == 1


def test_an_expert_without_rows_has_no_gradient_and_harms_no_other():
    args = replace(SPECS["gpt_oss"].flavors["debugmodel"], dim=32, ffn_dim=48, n_experts=5, top_k=3)
    moe = GptOssMoE(args)
    with torch.no_grad():
        for parameter in moe.parameters():
            nn.init.normal_(parameter, std=0.9)
        moe.gate.bias[2] = -1e4
    x = torch.randn(1, 7, 32, requires_grad=True)
    moe(x).sum().backward()
    for name, parameter in moe.experts.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad[2].abs().max() == 0, name
        assert parameter.grad.isfinite().all(), name
