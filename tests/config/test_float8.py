"""The float8 section: what is converted and why not, what is refused, and what the start-up report says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.refusals import refusal
from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.config.plans import BatchPlan, Float8Plan, MeshPlan, PipelinePlan
from titanlite.config.unbuilt import without_effect
from titanlite.models import SHAPES, get_spec, resolve_args
from titanlite.models.spec import Size
from titanlite.parallel.float8 import check_float8
from titanlite.parallel.float8_choice import Choice, choose, converted_names, matches, tokens
from titanlite.prepare import checked_plans, load_plans

F8, ON = "--float8.", "--float8.enable_float8_linear"
KINDS = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
KINDS += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
LLAMA = get_spec("llama3")
ARGS = resolve_args("llama3", "8B")


def choices(plan: Float8Plan = Float8Plan(enable=True), args: Any = ARGS, tensor: int = 1) -> dict[str, Choice]:  # noqa: B008
    found = choose(LLAMA.linears(args), plan, LLAMA.tensor_plan(args), tensor)
    return {choice.kind: choice for choice in found}


# What is converted


@pytest.mark.parametrize("family", SHAPES)
def test_sizes_are_those_of_the_model(family: str) -> None:
    """The config knows them without torch."""
    spec = get_spec(family)
    for flavor in SHAPES[family]:
        args = resolve_args(family, flavor, {"n_layers": 2}, tokenizer_size=512)
        model = spec.build_on_meta(args)
        real = {n: Size(m.in_features, m.out_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        assert spec.linears(args) == real, flavor


def test_all_but_the_head_is_converted() -> None:
    found = choices()
    assert list(found) == [*KINDS, "output"]
    assert [kind for kind, choice in found.items() if choice.converted] == KINDS
    assert found["output"].reason == "the head"
    assert found["attention.wk"].size == Size(4096, 1024) and len(found["attention.wk"].names) == 32
    assert len(converted_names(found.values())) == 7 * 32


@pytest.mark.parametrize(
    ("part", "name", "is_part"),
    [
        ("wq", "layers.0.attention.wq", True),
        ("attention", "layers.0.attention.wq", True),
        ("attention.wq", "layers.0.attention.wq", True),
        ("layers.1", "layers.1.attention.wq", True),
        ("layers.1", "layers.10.attention.wq", True),
        ("layers.1.", "layers.10.attention.wq", False),
        ("w", "layers.0.attention.wq", True),
        ("layers.0.wq", "layers.0.attention.wq", False),
        ("", "layers.0.attention.wq", False),
    ],
)
def test_a_filter_is_any_part_of_a_name(part: str, name: str, is_part: bool) -> None:
    assert matches(part, name) is is_part


def test_what_is_filtered_or_small_or_odd_stays_and_says_why() -> None:
    found = choices(Float8Plan(enable=True, keep=("wo", "w2"), min_features=2048))
    assert found["attention.wo"].reason == "float8.filter_fqns: wo"
    assert found["attention.wk"].reason == "below float8.min_features = 2048" and found["attention.wq"].converted
    reasons = {(c.kind, c.reason) for c in choose(LLAMA.linears(ARGS), Float8Plan(enable=True, keep=("layers.1",)))}
    assert {("attention.wq", "float8.filter_fqns: layers.1"), ("attention.wq", "")} < reasons
    odd = choices(args=resolve_args("llama3", "8B", {"ffn_dim": 1000}))
    assert odd["feed_forward.w1"].reason == "N = 1000 is not a multiple of 16"
    assert odd["feed_forward.w2"].reason == "K = 1000 is not a multiple of 16"


def test_a_filter_that_cuts_a_number_is_a_warning() -> None:
    """`layers.1` reads as one layer, and is in the names of eleven."""
    flags = ["--model.overrides.n_layers=20", ON, f"{F8}filter_fqns=layers.1,w2,layers.7"]
    (warning,) = load_plans("debug_model.toml", 1, flags).warnings
    assert warning == (
        'float8.filter_fqns: "layers.1" is also part of layers.10, layers.11, layers.12 and 7 more, which stay in high '
        'precision too; "layers.1." is not'
    )
    assert (
        load_plans("debug_model.toml", 1, [*flags, f"{F8}filter_fqns=layers.1.,w2,layers.2.attention"]).warnings == ()
    )


@pytest.mark.parametrize(
    ("flavor", "recipe", "kept"),
    [
        ("8B", "tensorwise", ["attention.wk", "attention.wv"]),
        ("8B", "rowwise", ["attention.wk", "attention.wv"]),
        ("3.1-70B", "tensorwise", []),
        ("3.1-70B", "rowwise", ["attention.wk", "attention.wv"]),
    ],
)
def test_auto_filter_small_kn_keeps_what_is_too_small_for_the_recipe(flavor: str, recipe: Any, kept: list[str]) -> None:
    flags = [f"--model.flavor={flavor}", ON, f"{F8}filter_fqns=w2,auto_filter_small_kn", f"{F8}recipe_name={recipe}"]
    plan = load_plans("debug_model.toml", 1, flags).float8
    assert plan.keep == ("w2",) and plan.skip_small
    found = choices(plan, resolve_args("llama3", flavor))
    assert [kind for kind, choice in found.items() if choice.reason.startswith("auto_filter_small_kn")] == kept
    if kept:
        assert found["attention.wk"].reason == f"auto_filter_small_kn: too small to gain by {recipe}"
    assert found["feed_forward.w2"].reason == "float8.filter_fqns: w2" and found["attention.wq"].converted


def test_sizes_count_as_tensor_parallelism_leaves_them() -> None:
    args = resolve_args("llama3", "8B", {"ffn_dim": 48})
    whole, parts = choices(args=args), choices(args=args, tensor=2)
    assert whole["feed_forward.w1"].converted and whole["feed_forward.w2"].converted
    assert parts["feed_forward.w1"].reason == "N = 24 is not a multiple of 16"
    assert parts["feed_forward.w2"].reason == "K = 24 is not a multiple of 16"
    assert parts["attention.wq"].size == Size(4096, 2048) and parts["attention.wo"].size == Size(2048, 4096)


def test_the_tokens_of_a_product() -> None:
    batch = BatchPlan(micro_batch_size=4, seq_len=64)
    assert tokens(batch, MeshPlan(), PipelinePlan()) == 256
    assert tokens(batch, MeshPlan(tensor=2), PipelinePlan()) == 256, "gathered before the product"
    assert tokens(batch, MeshPlan(context=2, pipeline=2), PipelinePlan(microbatches=2)) == 2 * 32


# The plan


def test_the_plan_is_what_the_keys_say() -> None:
    assert checked_plans([], 1, training=True)[1].float8 == Float8Plan()
    flags = [ON, f"{F8}emulate", f"{F8}enable_fsdp_float8_all_gather", f"{F8}filter_fqns=wq,wk"]
    flags += [f"{F8}precompute_float8_dynamic_scale_for_fsdp", f"{F8}min_features=64", f"{F8}drift_check=5"]
    assert checked_plans(flags, 1, training=True)[1].float8 == Float8Plan(
        True, "tensorwise", True, True, ("wq", "wk"), True, 64, 5
    )
    assert checked_plans([ON, f"{F8}recipe_name=rowwise"], 1, training=True)[1].float8.recipe == "rowwise"


def test_keys_without_float8_have_no_effect_and_say_so() -> None:
    config = load([f"{F8}recipe_name=rowwise", f"{F8}emulate", f"{F8}drift_check=3"])
    assert without_effect(config) == ["float8.recipe_name", "float8.emulate", "float8.drift_check"]
    assert not checked_plans([f"{F8}emulate"], 1, training=True)[1].float8.enable


# What is refused

DEBUG = ["--model.overrides.dim=64", "--model.overrides.n_heads=4", "--training.seq_len=32", "--training.batch_size=2"]
GATHER, PRECOMPUTE = f"{F8}enable_fsdp_float8_all_gather", f"{F8}precompute_float8_dynamic_scale_for_fsdp"
TP2 = "--training.tensor_parallel_degree=2"


@pytest.mark.parametrize(
    ("flags", "ranks", "key", "message"),
    [
        ([f"{F8}recipe_name=rowwise", GATHER], 1, "enable_fsdp_float8_all_gather", "one scale for each weight"),
        ([f"{F8}recipe_name=rowwise_with_gw_hp", GATHER], 1, "enable_fsdp_float8_all_gather", "rowwise_with_gw_hp"),
        ([PRECOMPUTE], 1, "precompute_float8_dynamic_scale_for_fsdp", "needs float8.enable_fsdp_float8_all_gather"),
        (
            [GATHER, PRECOMPUTE, "--training.enable_cpu_offload"],
            1,
            "precompute_float8_dynamic_scale_for_fsdp",
            "enable_cpu_offload",
        ),
        ([f"{F8}recipe_name=rowwise", TP2], 2, "recipe_name", "tensor_parallel_degree = 2"),
        ([GATHER, "--training.reshard_after_forward=2"], 4, "enable_fsdp_float8_all_gather", "reshard_after_forward"),
        ([f"{F8}scaling_type_weight=delayed"], 1, "scaling_type_weight", "delayed scaling is gone from torchao"),
        ([f"{F8}filter_fqns=lm_head"], 1, "filter_fqns", '"lm_head" is part of no linear\'s name'),
        ([f"{F8}filter_fqns=wq,wz"], 1, "filter_fqns", '"wz" is part of no linear\'s name'),
        ([f"{F8}filter_fqns=attention,feed_forward"], 1, "enable_float8_linear", "leaves no product in float8"),
        ([f"{F8}min_features=65"], 1, "enable_float8_linear", "below float8.min_features = 65"),
        (
            [f"{F8}recipe_name=rowwise_with_gw_hp", f"{F8}filter_fqns=auto_filter_small_kn"],
            1,
            "filter_fqns",
            'does not work with float8.recipe_name = "rowwise_with_gw_hp": torchao has no sizes for it',
        ),
        ([f"{F8}filter_fqns=auto_filter_small_kn"], 1, "enable_float8_linear", "too small to gain by tensorwise"),
        ([f'{F8}filter_fqns=[""]'], 1, "filter_fqns", '"" is part of no linear'),
        (["--training.seq_len=20"], 1, "enable_float8_linear", "2 sequences x 20 tokens = 40"),
        (
            ["--training.seq_len=48", "--training.batch_size=1", "--experimental.context_parallel_degree=2"],
            2,
            "enable_float8_linear",
            "1 sequence x 24 tokens on each of 2 context-parallel ranks = 24",
        ),
        ([GATHER], 48, "enable_fsdp_float8_all_gather", "divide over the 48 ranks that share them"),
        (
            ["--experimental.pipeline_parallel_degree=2", "--experimental.pipeline_parallel_schedule=ZBVZeroBubble"],
            2,
            None,
            "float8 linear's gradients come from one function",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    flags: list[str], ranks: int, key: str | None, message: str
) -> None:
    problem = refusal([ON, *DEBUG, *flags], ranks)
    assert key is None or problem.key == f"float8.{key}"
    assert message in problem.message
    assert problem.hint or any(word in problem.message for word in ("needs", "training.", "take", "scaling is what"))
    without = [flag for flag in flags if not flag.startswith(F8)]
    checked_plans([*DEBUG, *without], ranks, training=True)


def test_settings_of_float8_that_is_off_are_a_warning_of_the_run() -> None:
    """A run in bf16 that was meant to be one in float8 looks like any other."""
    given = [GATHER, f"{F8}recipe_name=tensorwise"]
    (warning,) = load_plans("debug_model.toml", 1, given).warnings
    assert warning.startswith("products are not in float8 (float8.enable_float8_linear = false)")
    assert warning.endswith("no effect: float8.enable_fsdp_float8_all_gather")
    assert load_plans("debug_model.toml", 1, [ON, *given]).warnings == ()


def test_a_filter_that_names_nothing_tells_what_there_is() -> None:
    problem = refusal([ON, f"{F8}filter_fqns=output,outptu"])
    assert problem.where == "command line"
    assert problem.message == '"outptu" is part of no linear\'s name' and "nearest: output; " in problem.hint
    assert "wq" in problem.hint and "the head is output" in problem.hint
    assert "nearest: auto_filter_small_kn; " in refusal([ON, f"{F8}filter_fqns=auto_filter_small"]).hint


@pytest.mark.parametrize("batch", [4, 8])
def test_the_hint_for_tokens_holds(batch: int) -> None:
    flags = [ON, *DEBUG, "--training.seq_len=20"]
    with pytest.raises(ConfigError, match="these work: training.batch_size = 4 or a multiple of it"):
        checked_plans(flags, 1, training=True)
    checked_plans([*flags, f"--training.batch_size={batch}"], 1, training=True)


# The hardware


def test_a_cpu_has_no_float8_but_can_emulate_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="a CPU has no float8 products[^$]*float8.emulate = true"):
        check_float8(Float8Plan(enable=True))
    check_float8(Float8Plan(enable=True, emulate=True))
    check_float8(Float8Plan())


@pytest.mark.parametrize(("capability", "fine"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_needs_capability_8_9(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fine: bool) -> None:
    cuda = {"is_available": lambda: True, "get_device_capability": lambda: capability, "get_device_name": lambda: "A"}
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    if fine:
        check_float8(Float8Plan(enable=True))
        return
    with pytest.raises(ConfigError, match=rf"compute capability 8\.{capability[1]}, and float8 products need 8\.9"):
        check_float8(Float8Plan(enable=True))
    check_float8(Float8Plan(enable=True, emulate=True))
