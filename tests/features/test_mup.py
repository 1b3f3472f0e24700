"""muP: what each parameter has beside the base model's, against numbers of the papers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.harness import full
from tests.support.pool import Pools
from tests.support.whole_runs import losses_of, make_trainer, train_run
from titanlite.config.model_sections import Optimizer, OptimizerGroup
from titanlite.dist.dist_env import DistEnv
from titanlite.features.mup import scales_of, summary
from titanlite.features.mup.base import base_args
from titanlite.features.mup.rules import Rules
from titanlite.loss import cross_entropy_sum
from titanlite.models import SPECS
from titanlite.optim.groups import Scale
from titanlite.optim.optimizer import build_optimizer, set_rates
from titanlite.parallel.init import init_weights

FAMILIES = [name for name in SPECS if name != "hf"]


HALF = math.sqrt(0.5)


def args_of(family: str, **changes: Any) -> Any:
    """A family's smallest model, with a vocabulary."""
    return replace(SPECS[family].flavors["debugmodel"], **{"vocab_size": 96, **changes})


def rules_of(family: str, dim: int, base: dict[str, Any] | None = None, **changes: Any) -> Rules:
    args = args_of(family, **changes)
    return Rules(SPECS[family], args, base_args(args, dim, base or {}))


def table(rules: Rules) -> dict[str, tuple[float, float, float]]:
    """Name → (initial, rate, epsilon) as multiples of the base model's, of the second block."""
    found = {}
    for name in rules.names():
        if not name.startswith("layers.") or name.startswith("layers.1."):
            numbers = tuple(round(factor, 12) for factor in rules.factors(name))
            found[name.removeprefix("layers.1.")] = numbers
    return found


#: A Llama of four times the width: table 3 of arXiv:2203.03466, relative to width 64; epsilons by
#: equation 40 of arXiv:2505.01618.
HIDDEN = (0.5, 0.25, 0.25)
VECTOR = (1.0, 1.0, 0.25)
LLAMA = {
    "tok_embeddings.weight": VECTOR,
    "attention.wq.weight": HIDDEN,
    "attention.wk.weight": HIDDEN,
    "attention.wv.weight": HIDDEN,
    "attention.wo.weight": HIDDEN,
    "attention_norm.weight": VECTOR,
    "ffn_norm.weight": VECTOR,
    "feed_forward.w1.weight": HIDDEN,
    "feed_forward.w2.weight": HIDDEN,
    "feed_forward.w3.weight": HIDDEN,
    "norm.weight": VECTOR,
    "output.weight": (0.25, 0.25, 1.0),
}


def test_each_weight_of_a_llama_has_what_the_paper_says():
    rules = rules_of("llama3", 64, ffn_dim=1024)
    assert rules.base.ffn_dim == 256 and rules.base.n_heads == 4
    assert table(rules) == LLAMA


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_of_every_family_has_a_rule(family, tied):
    rules = rules_of(family, args_of(family).dim // 2, tied=tied)
    model = SPECS[family].build_on_meta(rules.args)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert set(rules.names()) == set(shapes)
    for name, shape in shapes.items():
        size = rules.size(name)
        if name.startswith("layers."):
            assert {size.in_features, size.out_features} <= {1, *shape}, name
        rules.init(name)


def test_experts_are_hidden_matrices_and_routers_outputs():
    found = table(rules_of("mixtral", 64))
    for name in ("w1", "w2", "w3"):
        assert found[f"feed_forward.experts.{name}"][:2] == pytest.approx(HIDDEN[:2], rel=0.05)
    assert found["feed_forward.gate.weight"] == (0.25, 0.25, 1.0)
    biased = table(rules_of("gpt_oss", 64))
    assert biased["feed_forward.gate.bias"] == (1.0, 1.0, 1.0)
    assert biased["feed_forward.experts.gate_up"] == HIDDEN
    assert biased["feed_forward.experts.down_bias"] == VECTOR


def test_latents_of_one_width_make_outputs_and_inputs():
    scaled = table(rules_of("deepseek_v3", 64))
    assert scaled["attention.wkv_a.weight"] == scaled["attention.wkv_b.weight"] == HIDDEN
    fixed = table(rules_of("deepseek_v3", 64, {"kv_lora_rank": 512}))
    assert fixed["attention.wkv_a.weight"] == (0.25, 0.25, 1.0)
    assert fixed["attention.wkv_b.weight"] == (1.0, 1.0, 0.25)


def test_rates_of_muon_keep_the_spectral_norm_in_proportion():
    """Its update has the norm rate * 0.2 * sqrt(max(in, out)); wanted is that of sqrt(out / in)."""
    rules = rules_of("mixtral", 64, {"ffn_dim": 256}, ffn_dim=512, n_kv_heads=4)
    base = Rules(rules.spec, rules.base, rules.base)

    def norm(size):
        ideal = math.sqrt(size.out_features / size.in_features)
        return math.sqrt(max(size.in_features, size.out_features)) / ideal

    for name in rules.names():
        if name.startswith("layers.1.") and not name.endswith("norm.weight"):
            rate = rules.factors(name, muon=True).rate
            assert rate * norm(rules.size(name)) == pytest.approx(norm(base.size(name))), name


def filled(rules: Rules) -> Any:
    model: Any = rules.spec.build_on_meta(rules.args).to_empty(device="cpu")
    init_weights(model, rules.init, 0)
    model.init_buffers()
    return model


# The lemma: the same run as one with multipliers in its forward pass


@dataclass(frozen=True)
class Multiplied:
    """A model with explicit multipliers, as tables 8 and 1 of the papers have them."""

    rules: Rules
    #: Factors of logits, queries and blocks.
    logits: float = 1.0
    queries: float = 1.0
    blocks: float = 1.0
    #: Pattern of names → factor by which our weights, rates are smaller for a multiplier's sake.
    held: tuple[tuple[str, float], ...] = ()

    def held_by(self, name: str) -> float:
        return next((by for pattern, by in self.held if re.search(pattern, name)), 1.0)


def scale_without_multipliers(rules: Rules, name: str, is_muon: bool) -> Scale:
    ratios = rules.ratios(name)
    embedding = rules.args.embedding_scale / rules.base.embedding_scale
    held = 1 / embedding if name == "tok_embeddings.weight" else 1.0
    if is_muon:
        return Scale(math.sqrt(ratios.outputs / ratios.inputs / ratios.largest))
    eps = 1.0 if ratios.outputs == 1 else rules.base.dim / rules.args.dim
    if name.startswith("layers."):
        eps *= rules.base.n_layers / rules.args.n_layers
    return Scale(held / ratios.inputs, eps / held)


def times(factor: float) -> Callable[..., Any]:
    return lambda module, inputs, output: output * factor


def with_multipliers(one: Multiplied) -> Any:
    """The model whose forward pass multiplies, from weights without the multipliers."""
    model = filled(one.rules)
    offset = one.rules.args.norm_offset
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            by = one.held_by(name)
            if offset and name.endswith("norm.weight"):
                parameter.add_(1).div_(by).sub_(1)
            else:
                parameter.div_(by)
    for name, module in model.named_modules():
        if name == "output":
            module.register_forward_hook(times(one.logits))
        elif name.endswith("inner_attention"):
            module.register_forward_pre_hook(
                lambda module, inputs: (inputs[0] * one.queries, *inputs[1:])
            )
        elif name.endswith("_post_norm"):
            module.register_forward_hook(times(one.blocks))
    return model


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take some steps."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        tokens = torch.randint(96, (2, 17), generator=generator)
        cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]).div(32).backward()
        optimizer.step()
        optimizer.zero_grad()


CASES = {
    "tied": Multiplied(
        rules_of("llama3", 64, n_layers=2, tied=True), logits=0.25, held=((r"^norm", 0.25),)
    ),
    "wider heads": Multiplied(
        rules_of("llama3", 64, {"n_heads": 16}, n_layers=2), queries=0.5, held=((r"\.wq", 0.5),)
    ),
    "experts": Multiplied(
        rules_of("gpt_oss", 64, {"n_layers": 1}, n_layers=2),
        blocks=0.5,
        held=((r"(attention\.wo\.|experts\.down)", 0.5),),
    ),
    "wider heads with norms": Multiplied(
        rules_of("qwen3", 64, {"n_heads": 8, "head_dim": 16}, n_layers=2),
        queries=0.5,
        held=((r"q_norm", 0.5),),
    ),
    "gains plus one": Multiplied(
        rules_of("gemma3", 64, {"n_layers": 1}, n_layers=2),
        logits=0.5,
        blocks=0.5,
        held=((r"(^norm|_post_norm)", 0.5),),
    ),
}


def changes(one: Multiplied, model: nn.Module, start: nn.Module, held: bool) -> torch.Tensor:
    """How far the weights with a multiplier have moved, all in one vector.

    held: they hold it, and it is taken out.
    """
    then = dict(start.named_parameters())
    moved = []
    for name, now in model.named_parameters():
        by = one.held_by(name)
        if by != 1:
            moved.append((now - then[name]).flatten() / (by if held else 1))
    return torch.cat(moved).detach()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
@pytest.mark.parametrize("name", CASES)
def test_a_run_is_that_of_a_model_with_explicit_multipliers(name, optimizer):
    one = CASES[name]
    blocks = one.rules.spec.block_names(one.rules.args)
    # Decay draws a gain of 1 + weight to 1, and is refused there.
    decay = 0.0 if one.rules.args.norm_offset else 0.1
    # An epsilon as large as many gradients: it counts, and keeps rounding from counting.
    settings = Optimizer(name=optimizer, lr=3e-3, eps=1e-4, weight_decay=decay)
    plain = scales_of(one.rules)
    # The scales in a model with multipliers, by the papers' tables.
    explicit = partial(scale_without_multipliers, one.rules)
    multiplied = partial(with_multipliers, one)

    def run(make, scales, held):
        model = make()
        parameters = dict(model.named_parameters())
        built = build_optimizer(parameters, settings, torch.device("cpu"), blocks, scales)
        trained(model, built)
        return changes(one, model, make(), held)

    theirs = run(multiplied, explicit, held=False)
    ours = run(partial(filled, one.rules), plain, held=True)
    wrong = run(multiplied, plain, held=False)
    # Muon's iteration is in bfloat16.
    within = 0.005 if optimizer == "AdamW" else 0.05
    assert (ours - theirs).norm() / theirs.norm() < within
    assert (wrong - theirs).norm() / theirs.norm() > 0.3, "a rate without its multiplier"


# The optimizer


def test_groups_and_schedules_keep_the_factors():
    rules = rules_of("llama3", 64, ffn_dim=1024, n_layers=2)
    parameters = dict(rules.spec.build_on_meta(rules.args).named_parameters())
    group = OptimizerGroup(pattern=r"\.wo\.", lr=1e-3, weight_decay=0.5)
    settings = Optimizer(lr=1e-2, weight_decay=0.1, eps=1e-8, groups=[group])
    optimizer = build_optimizer(parameters, settings, torch.device("cpu"), (), scales_of(rules))
    names = {id(parameter): name for name, parameter in parameters.items()}
    for share in (1.0, 0.3, 1e-3):
        set_rates(optimizer, 1e-2 * share)
        for one in optimizer.param_groups:
            for parameter in one["params"]:
                name = names[id(parameter)]
                factors = rules.factors(name)
                lr, decay = (1e-3, 0.5) if ".wo." in name else (1e-2, 0.1)
                assert one["lr"] == pytest.approx(lr * share * factors.rate), name
                assert one["weight_decay"] * factors.rate == pytest.approx(decay)
                assert one["eps"] == pytest.approx(1e-8 * factors.eps)


# Whole runs


def _first_weights(world: DistEnv, folder: str) -> dict[str, float]:
    """Standard deviations of a run's initial weights."""
    trainer = make_trainer(world, folder, *MUP)
    return {name: full(one).std().item() for name, one in trainer.parts.model.named_parameters()}


def test_a_builder_draws_scaled_weights(pool, tmp_path):
    found = pool(1).run(_first_weights, str(tmp_path))[0]
    assert found["layers.0.attention.wk.weight"] == pytest.approx(0.0197 * HALF, rel=0.05)
    # Heads are twice as wide, too.
    assert found["layers.0.attention.wq.weight"] == pytest.approx(0.0197 / 2, rel=0.05)
    assert found["output.weight"] == pytest.approx(0.9866 * 32**-0.5 / 2, rel=0.05)


SIX = [
    "--training.steps=6",
    "--model.overrides.n_kv_heads=2",
    "--no-validation.enable",
    "--no-checkpoint.enable_checkpoint",
]
MUP = [*SIX, "--mup.base_dim=32", "--mup.base.n_heads=4"]


def losses(pool: Pools, folder: Path, ranks: int, *flags: str) -> list[float]:
    rows = pool(ranks).run(train_run, str(folder / f"{ranks}{len(flags)}"), *flags)[0]["rows"]
    return [loss for loss, *_ in losses_of(rows).values()]


@pytest.mark.slow
def test_ranks_that_share_the_work_lose_what_one_rank_loses(pool, tmp_path):
    alone = losses(pool, tmp_path, 1, *MUP)
    without = losses(pool, tmp_path, 1, *SIX)
    assert max(abs(a - b) for a, b in zip(alone, without, strict=True)) > 1e-2
    ways: dict[str, list[str]] = {
        "chunks": ["--training.tensor_parallel_degree=2", "--training.loss_chunks=3"],
        "pipeline": ["--experimental.pipeline_parallel_degree=2", "--training.batch_size=4"],
    }
    for name, flags in ways.items():
        found = losses(pool, tmp_path / name, 2, *MUP, *flags)
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(alone), rtol=0, atol=2e-5, msg=lambda m, n=name: n + m
        )


# What is refused and told


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_of_the_same_width_changes_nothing(family):
    rules = rules_of(family, args_of(family).dim)
    assert summary(rules) == f"the base model itself, dim {rules.args.dim}"
    for name in rules.names():
        assert rules.factors(name) == rules.factors(name, muon=True) == (1, 1, 1), name
        assert rules.init(name) == rules.spec.init_rule(name, rules.args)
