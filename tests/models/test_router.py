"""The router and its mixtures against the modules of `transformers`, and against a loop over
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_families import LLAMA4
from tests.support.llamas import relative, tokens_of
from titanlite.models import SPECS, resolve_args
from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.experts.layer import MoE, MoEDecoder
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
    ARGS,
    score="sigmoid",
    n_groups=4,
    top_groups=2,
    route_scale=2.5,
    bias_update=0.001,
    n_shared_experts=2,
)
V2 = replace(ARGS, norm_topk=False, route_scale=16.0, n_groups=4, top_groups=3, group_best=1)
#: Of logits: some equal, and rows of padding that are all alike.
LOGITS = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
LOGITS[5:20] = LOGITS[5:20].round()
LOGITS[20:25] = 0.0
LOGITS[25:30] = LOGITS[25]
BIAS = torch.tensor([0.2, 0, 0, -0.3, 0.5, 0, -0.1, 0.1])


def router_of(module: Any, **numbers: Any) -> Any:
    """A router of `transformers` whose logits are its inputs."""
    router = module(numbers.pop("config"))
    with torch.no_grad():
        router.weight.copy_(torch.eye(8))
        for name, values in numbers.items():
            getattr(router, name).copy_(values)
    return router


def deepseek(args: Args) -> Any:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=8,
        n_routed_experts=8,
        num_experts_per_tok=args.top_k,
        n_group=args.n_groups,
        topk_group=args.top_groups,
        norm_topk_prob=args.norm_topk,
        routed_scaling_factor=args.route_scale,
    )
    return router_of(DeepseekV3TopkRouter, config=config, e_score_correction_bias=BIAS)


def deepseek_v2(args: Args) -> Any:
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=8,
        num_attention_heads=1,
        n_routed_experts=8,
        num_experts_per_tok=args.top_k,
        topk_method="group_limited_greedy" if args.n_groups > 1 else "greedy",
        n_group=args.n_groups,
        topk_group=args.top_groups,
        routed_scaling_factor=args.route_scale,
    )
    return router_of(DeepseekV2TopkRouter, config=config)


def qwen3(args: Args) -> Any:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(
        hidden_size=8,
        num_experts=8,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=args.norm_topk,
    )
    return router_of(Qwen3MoeTopKRouter, config=config)


def gpt_oss(args: Args) -> Any:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    config = GptOssConfig(hidden_size=8, num_local_experts=8, num_experts_per_tok=args.top_k)
    return router_of(GptOssTopKRouter, config=config, bias=torch.zeros(8))


CASES: dict[str, tuple[Any, Args]] = {
    "deepseek": (deepseek, DEEPSEEK),
    "deepseek, scores as they are": (deepseek, replace(DEEPSEEK, norm_topk=False)),
    "deepseek, one of each": (deepseek, replace(DEEPSEEK, norm_topk=False, top_k=1, top_groups=1)),
    "deepseek_v2": (deepseek_v2, replace(V2, n_groups=1, top_groups=1)),
    "deepseek_v2, groups": (deepseek_v2, V2),
    "deepseek_v2, larger groups": (deepseek_v2, replace(V2, n_groups=2, top_groups=1)),
    "deepseek_v2, one of each": (deepseek_v2, replace(V2, top_k=1, top_groups=1)),
    "qwen3": (qwen3, ARGS),
    "qwen3, scores as they are": (qwen3, replace(ARGS, norm_topk=False, top_k=1)),
    "gpt_oss": (gpt_oss, replace(ARGS, score="softmax_of_chosen")),
}


@pytest.mark.parametrize("case", CASES)
def test_choices_weights_and_gradients_are_those_of_transformers(case: str) -> None:
    make, args = CASES[case]
    ours = LOGITS.clone().requires_grad_()
    theirs = LOGITS.clone().requires_grad_()
    choice = Routing(args).choose(ours, BIAS if args.expert_bias else None)
    _, weights, experts = make(args)(theirs)
    # Also of equal scores, in any order of one token's experts.
    own, order = choice.experts.sort(-1)
    other, their_order = experts.sort(-1)
    assert torch.equal(own, other)
    values = choice.weights.gather(1, order)
    torch.testing.assert_close(values, weights.gather(1, their_order), rtol=1e-6, atol=1e-7)
    slopes = torch.linspace(-1, 1, args.top_k)
    (values * slopes).sum().backward()
    (weights.gather(1, their_order) * slopes).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


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


def swiglu(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor) -> Tensor:
    return w2 @ (F.silu(w1 @ x) * (w3 @ x))


def by_token(moe: MoE, args: Args, x: Tensor) -> Tensor:
    """Each token by itself, each of its experts by itself."""
    rows = []
    for token in x.flatten(0, 1):
        choice = Routing(args).choose(moe.gate(token)[None], moe.expert_bias)
        total = torch.zeros_like(token)
        for weight, number in zip(choice.weights[0], choice.experts[0].tolist(), strict=True):
            matrices = [getattr(moe.experts, name)[number] for name in ("w1", "w2", "w3")]
            if args.scales_input:
                total = total + swiglu(*matrices, token * weight)
            else:
                total = total + swiglu(*matrices, token) * weight
        if moe.shared is not None:
            shared = moe.shared
            total = total + swiglu(shared.w1.weight, shared.w2.weight, shared.w3.weight, token)
        rows.append(total)
    return torch.stack(rows).view_as(x)


MIXTURES = {
    "deepseek": DEEPSEEK,
    "llama4": replace(
        ARGS, score="sigmoid", norm_topk=False, top_k=1, scales_input=True, n_shared_experts=1
    ),
    "torchtitan's default": replace(ARGS, score="sigmoid", norm_topk=False, scales_input=True),
    "gpt_oss": replace(ARGS, score="softmax_of_chosen", router_bias=True),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_equals_a_loop_over_tokens(name: str) -> None:
    args = MIXTURES[name]
    moe = make_moe(args)
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(9), requires_grad=True)
    found = moe(x)
    expected = by_token(moe, args, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    slope = torch.cos(found).detach()
    ours = torch.autograd.grad(found, [x, *moe.parameters()], slope)
    theirs = torch.autograd.grad(expected, [x, *moe.parameters()], slope)
    names = ["x", *(name for name, _ in moe.named_parameters())]
    for label, one, other in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6, msg=f"{label}: ".__add__)


def test_a_mixture_of_llama4_is_that_of_transformers() -> None:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    args = replace(MIXTURES["llama4"])
    ours = make_moe(args)
    config = Llama4TextConfig(
        hidden_size=16, intermediate_size=24, num_local_experts=8, num_experts_per_tok=1
    )
    theirs = Llama4TextMoe(config)
    experts = ours.experts
    shared = ours.shared
    assert shared is not None
    with torch.no_grad():
        theirs.router.weight.copy_(ours.gate.weight)
        both = torch.cat([experts.w1, experts.w3], 1)  # type: ignore[list-item]
        theirs.experts.gate_up_proj.copy_(both.mT)
        theirs.experts.down_proj.copy_(experts.w2.mT)  # type: ignore[union-attr]
        theirs.shared_expert.gate_proj.weight.copy_(shared.w1.weight)
        theirs.shared_expert.down_proj.weight.copy_(shared.w2.weight)
        theirs.shared_expert.up_proj.weight.copy_(shared.w3.weight)
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(ours(x), theirs(x)[0].view_as(x), rtol=1e-5, atol=1e-6)


def test_the_load_balancing_loss_of_sigmoids_has_shares_of_a_token() -> None:
    args = replace(DEEPSEEK, n_layers=1, aux_loss=0.5, n_shared_experts=0)
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


def test_dense_blocks_come_first_and_count_in_no_mean() -> None:
    args = replace(ARGS, n_layers=3, n_dense_layers=1, aux_loss=0.3)
    model = MoEDecoder(args)
    dense, first, second = (block.feed_forward for block in model.layers.values())
    assert tuple(dense.w1.weight.shape) == (40, 16)
    assert tuple(first.experts.w1.shape) == (8, 24, 16)
    assert first.aux_weight == second.aux_weight == pytest.approx(0.15)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4"])
@pytest.mark.parametrize("some_dense", [False, True])
def test_the_weights_of_all_layers_sum_to_the_arguments(family: str, some_dense: bool) -> None:
    spec = SPECS[family]
    changes: dict[str, Any] = {"n_layers": 6, "aux_loss": 0.3, "z_loss": 0.1}
    if some_dense:
        changes |= {"sparse_step": 2, "n_dense_layers": 2, "dense_blocks": [1], "nope_every": 3}
    known = {
        name: changes[name] for name in changes if name in spec.args_class.__dataclass_fields__
    }
    args = resolve_args(family, "debugmodel", known, tokenizer_size=96)
    layers = [module for module in spec.build_on_meta(args).modules() if isinstance(module, MoE)]
    assert len(layers) == len(spec.moe_layers(args))
    assert sum(layer.aux_weight for layer in layers) == pytest.approx(0.3, rel=1e-12)
    assert sum(layer.z_weight for layer in layers) == pytest.approx(0.1, rel=1e-12)


def test_gradients_of_routers_among_dense_blocks_are_those_of_the_mean_over_their_layers() -> None:
    args = replace(LLAMA4, aux_loss=1.0)
    torch.manual_seed(0)
    model = SPECS["llama4"].build(args)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    logits: list[Tensor] = []
    for layer in layers:
        layer.gate.register_forward_hook(lambda module, inputs, output: logits.append(output))
    tokens = tokens_of(args)
    (0 * model(tokens)).sum().backward()
    found = [layer.gate.weight.grad for layer in layers]
    for layer in layers:
        layer.gate.weight.grad = None
        layer.aux_weight = 0.0
    logits.clear()
    model(tokens)
    losses = []
    for each in logits:
        scores = each.sigmoid() / each.sigmoid().sum(-1, keepdim=True)
        shares = torch.bincount(each.argmax(-1), minlength=4) / len(each)
        losses.append(4 * (shares * scores.mean(0)).sum())
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    for layer, gradient in zip(layers, found, strict=True):
        assert gradient is not None
        assert relative(gradient, layer.gate.weight.grad) < 1e-4  # type: ignore[arg-type]


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
        (
            {"n_groups": 8},
            "group_best must be at most 1, the experts of each of n_groups = 8",
        ),
        (
            {"n_groups": 4, "top_groups": 2, "group_best": 0},
            "group_best must be positive, got 0",
        ),
        ({"n_groups": 2, "top_groups": 3}, "top_groups must be at most n_groups = 2, got 3"),
        ({"n_groups": 4, "top_groups": 1}, "top_k = 3 is more than the 2 experts of top_groups"),
        ({"route_scale": 0.0}, "route_scale must be positive, got 0.0"),
        ({"bias_update": -1.0}, "bias_update must not be negative, got -1.0"),
        ({"n_dense_layers": 2}, "n_dense_layers must be below n_layers = 2, got 2"),
        ({"expert_width": 20}, "expert_width = 20 is not a multiple of 8"),
        ({"n_experts": 0}, "top_k must be between 2 and n_experts = 0"),
    ],
)
def test_misfits(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        replace(ARGS, **changes)


def test_one_expert_of_each_token_may_be_scaled() -> None:
    assert replace(ARGS, top_k=1, score="sigmoid", norm_topk=False).top_k == 1
