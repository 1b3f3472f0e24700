"""The router by hand, and its losses; families' tests hold whole models against `transformers`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from titanlite.models import SPECS, resolve_args
from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.experts.layer import MoE
from titanlite.models.experts.router import Routing
from titanlite.models.spec import ShapeError


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
#: Logits with some equal ones, and with rows of padding that are all alike.
LOGITS = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
LOGITS[5:20] = LOGITS[5:20].round()
LOGITS[20:25] = 0.0
LOGITS[25:30] = LOGITS[25]
BIAS = torch.tensor([0.2, 0, 0, -0.3, 0.5, 0, -0.1, 0.1])


def test_the_bias_of_experts_changes_the_choice_alone() -> None:
    routing = Routing(replace(ARGS, score="sigmoid", norm_topk=False))
    plain = routing.choose(LOGITS)
    pushed = routing.choose(LOGITS, torch.tensor([0.0, 0, 0, 0, 0, 9, 9, 9]))
    assert (pushed.experts.sort(-1).values == torch.tensor([5, 6, 7])).all()
    assert torch.equal(pushed.weights, LOGITS.sigmoid().gather(1, pushed.experts))
    shifted = routing.choose(LOGITS, torch.full((8,), 0.25))
    assert torch.equal(shifted.experts.sort(-1).values, plain.experts.sort(-1).values)


def make_moe(args: Args) -> MoE:
    moe = MoE(args)
    for index, parameter in enumerate(moe.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))
    if moe.expert_bias is not None:
        moe.expert_bias.copy_(BIAS)
    return moe


def test_the_load_balancing_loss_of_sigmoids_has_shares_of_a_token() -> None:
    args = replace(DEEPSEEK, n_layers=1, aux_loss=0.5)
    moe = make_moe(args)
    x = torch.randn(1, 12, 16)
    (with_loss,) = torch.autograd.grad(moe(x).sum(), moe.gate.weight)
    moe.aux_weight = 0.0
    (without,) = torch.autograd.grad(moe(x).sum(), moe.gate.weight)
    scores = moe.gate(x[0]).sigmoid()
    chosen = Routing(args).choose(moe.gate(x[0]), moe.expert_bias).experts
    shares = torch.bincount(chosen.flatten(), minlength=8) / 12
    loss = 8 * (shares * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
    (expected,) = torch.autograd.grad(0.5 * loss, moe.gate.weight)
    torch.testing.assert_close(with_loss - without, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "llama4"])
def test_the_weights_of_all_layers_sum_to_the_arguments(family: str) -> None:
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"score": "relu"}, "score must be one of softmax, softmax_of_chosen, sigmoid, got 'relu'"),
        ({"top_k": 1}, "top_k must be between 2 and n_experts = 8, got 1: a single expert's"),
        (
            {"top_k": 9, "norm_topk": False},
            "top_k must be between 1 and n_experts = 8, got 9$",
        ),
        ({"n_groups": 3}, "n_groups = 3 does not divide n_experts = 8"),
        ({"n_groups": 8}, "group_best must be at most 1, the experts of each of n_groups = 8"),
        ({"n_groups": 2, "top_groups": 3}, "top_groups must be at most n_groups = 2, got 3"),
        ({"n_groups": 4, "top_groups": 1}, "top_k must be at most 2, the experts of top_groups"),
        ({"route_scale": 0.0}, "route_scale must be positive, got 0.0"),
        ({"bias_update": -1.0}, "bias_update must not be negative, got -1.0"),
        ({"n_dense_layers": 2}, "n_dense_layers must be below n_layers = 2, got 2"),
        ({"expert_width": 20}, "expert_width = 20 is not a multiple of 8"),
        ({"n_experts": 0}, "top_k must be between 2 and n_experts = 0"),
        ({"n_experts": 32768}, "n_experts must be at most 32767"),
    ],
)
def test_misfits(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        replace(ARGS, **changes)


def test_one_expert_of_each_token_may_be_scaled() -> None:
    assert replace(ARGS, top_k=1, score="sigmoid", norm_topk=False).top_k == 1
