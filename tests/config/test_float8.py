"""The float8 section: what is converted and why not, what is refused, and what the start-up report says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from titanlite.config.plans import BatchPlan, Float8Plan, MeshPlan, PipelinePlan, Plans
from titanlite.observe.report import start_report
from torch import nn

from titanlite.config.errors import ConfigError
from titanlite.config.fit import load_config
from titanlite.models import SHAPES, get_spec, resolve_args
from titanlite.models.spec import Size
from titanlite.parallel.float8 import check_float8
from titanlite.parallel.float8_choice import Choice, choose, converted_names, matches, tokens

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
    plan = load_config("debug_model.toml", 1, flags).float8
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


# The report


def _report(plans: Plans, device: str = "CPU (some model)", peak: float | None = None) -> list[str]:
    return start_report(
        plans,
        parameters={"all": 1},
        flops_per_token=1,
        device=device,
        world_size=1,
        versions={},
        tokenizer="",
        documents=1,
        tokens_per_epoch=1,
        memory_bytes=0,
        peak_flops=peak,
        folders={},
        float8=list(choices(plans.float8).values()) if plans.float8.enable else [],
    )


EMULATED = Plans(float8=Float8Plan(enable=True, emulate=True, keep=("wo",)), batch=BatchPlan(2, seq_len=64))


def test_the_report_has_a_row_for_each_kind_of_linear() -> None:
    lines = _report(EMULATED)
    start = next(i for i, line in enumerate(lines) if line.startswith("float8 "))
    said = [" ".join(line.split()) for line in lines[start : start + 9]]
    assert said == [
        "float8 tensorwise, emulated in float32 (slow, for tests); 192 of 225 linears; M = 128 tokens in a product of "
        "one rank",
        "attention.wq K x N = 4,096 x 4,096, 32 in float8",
        "attention.wk K x N = 4,096 x 1,024, 32 in float8",
        "attention.wv K x N = 4,096 x 1,024, 32 in float8",
        "attention.wo K x N = 4,096 x 4,096, 32 kept: float8.filter_fqns: wo",
        "feed_forward.w1 K x N = 4,096 x 14,336, 32 in float8",
        "feed_forward.w2 K x N = 14,336 x 4,096, 32 in float8",
        "feed_forward.w3 K x N = 4,096 x 14,336, 32 in float8",
        "output K x N = 4,096 x 128,256, 1 kept: the head",
    ]


def test_the_report_says_how_weights_travel() -> None:
    def line(**changes: Any) -> str:
        plans = replace(EMULATED, float8=replace(EMULATED.float8, emulate=False, **changes))
        return next(line for line in _report(plans) if line.startswith("float8 "))

    assert "gathered" not in line()
    assert "weights gathered in float8, each scale found as it is;" in line(all_gather=True)
    assert "weights gathered in float8, all scales by one all-reduce after the update;" in line(
        all_gather=True, precompute=True
    )
    assert "drift measured every 5 steps" in line(drift_check=5)


def test_float8_without_compile_on_a_gpu_is_a_warning() -> None:
    def warnings(plans: Plans, device: str) -> list[str]:
        return [line for line in _report(plans, device) if line.startswith("warning: ") and "float8" in line]

    real = replace(EMULATED, float8=Float8Plan(enable=True))
    (warning,) = warnings(real, "NVIDIA H100")
    assert "training.compile" in warning and "slower than bf16" in warning
    compiled = replace(real, compile=replace(real.compile, model=True))
    assert warnings(compiled, "NVIDIA H100") == warnings(real, "CPU (some model)") == []
    assert warnings(replace(real, float8=Float8Plan()), "NVIDIA H100") == []


def test_the_peak_of_the_mfu_is_named() -> None:
    def compute(plans: Plans) -> str:
        return next(line for line in _report(plans, "NVIDIA H200", 989e12) if line.startswith("compute "))

    assert "MFU against 989 TFLOPS per device" in compute(Plans())
    assert "MFU against 989 TFLOPS per device, its peak in bf16" in compute(EMULATED)
    given = replace(EMULATED, observe=replace(EMULATED.observe, peak_flops=989e12))
    assert "989 TFLOPS per device (metrics.peak_tflops)" in compute(given)
