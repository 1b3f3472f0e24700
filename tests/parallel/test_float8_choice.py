"""The float8 section: what is converted and why not, and what the machine lacks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from titanlite.assembly.preflight import check_machine
from titanlite.config.errors import ConfigError
from titanlite.config.sections import Config, Float8
from titanlite.dist import ParallelismError
from titanlite.features.float8.choice import Float8Choice, choose_linears, converted_names
from titanlite.features.mx import package
from titanlite.features.mx.convert import apply_mx
from titanlite.models import get_spec, resolve_args
from titanlite.models.linears import linears_of
from titanlite.models.spec import Size
from titanlite.resolve.load import load_config
from titanlite.run.config import RunConfig
from titanlite.run.features import features_of

ON = "--float8.enable_float8_linear"
KINDS = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
KINDS += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
ARGS = resolve_args("llama3", "8B")


def run(*flags: str, ranks: int = 1) -> RunConfig:
    return load_config("debug_model.toml", ranks, flags)


def choices(
    args: Any = ARGS, tp: int = 1, family: str = "llama3", **settings: Any
) -> dict[str, Float8Choice]:
    feature = features_of(Config(float8=Float8(enable_float8_linear=True, **settings))).float8
    assert feature is not None
    found = feature.choices(linears_of(get_spec(family), args, tp))
    return {choice.kind: choice for choice in found}


def reasons(*args: Any, **settings: Any) -> dict[str, str]:
    return {kind: one.reason for kind, one in choices(*args, **settings).items() if one.reason}


def test_all_but_the_head_is_converted():
    found = choices()
    assert list(found) == [*KINDS, "output"]
    assert reasons() == {"output": "the head"}
    assert found["attention.wk"].size == Size(4096, 1024)
    assert len(found["attention.wk"].names) == 32
    assert len(converted_names(found.values())) == 7 * 32


def test_what_is_filtered_or_small_or_odd_stays_and_says_why():
    found = reasons(filter_fqns=["wo", "w2"], min_features=2048)
    assert found["attention.wo"] == "filter_fqns: wo"
    assert found["attention.wk"] == "below min_features = 2048"
    assert "attention.wq" not in found
    one_layer = Float8(enable_float8_linear=True, filter_fqns=["layers.1"])
    both = choose_linears(linears_of(get_spec("llama3"), ARGS), one_layer)
    of_wq = {choice.reason for choice in both if choice.kind == "attention.wq"}
    assert of_wq == {"filter_fqns: layers.1", ""}


@pytest.mark.parametrize(("recipe", "block"), [("tensorwise", 16), ("mxfp8", 32)])
def test_sizes_count_as_tensor_parallelism_leaves_them(recipe, block):
    args = resolve_args("llama3", "8B", {"ffn_dim": 3 * block})
    assert reasons(args, recipe_name=recipe) == {"output": "the head"}
    size = f"{3 * block // 2} is not a multiple of {block}"
    assert reasons(args, tp=2, recipe_name=recipe) == {
        "feed_forward.w1": f"N = {size}",
        "feed_forward.w2": f"K = {size}",
        "feed_forward.w3": f"N = {size}",
        "output": "the head",
    }


def test_weights_that_tensor_parallelism_leaves_whole_stay_with_mx():
    """Their products sum over tokens of several ranks."""
    args = resolve_args("deepseek_v3", "16B")
    alone, parts = (choices(args, ranks, "deepseek_v3", recipe_name="mxfp8") for ranks in (1, 2))
    kept = {name for name, one in parts.items() if one.reason.startswith("tensor parallelism does")}
    assert "attention.wkv_a" in kept
    assert all(alone[name].converted for name in kept)
    assert parts["attention.wq"].converted and parts["attention.wo"].converted


NEW = {"torch": "2.13.0", "torchao": "0.18"}
MX = [ON, "--float8.recipe_name=mxfp8", "--training.mixed_precision_param=bfloat16"]


@pytest.mark.parametrize(
    ("flags", "capability", "versions", "refused"),
    [
        ([ON], None, NEW, "a CPU has no float8 products[^$]*float8.emulate = true"),
        ([ON], (8, 0), NEW, r"compute capability 8\.0, and float8 products need 8\.9"),
        ([ON], (8, 9), NEW, ""),
        # These two store float8 wrong.
        (
            [ON],
            (9, 0),
            {"torch": "2.14.0", "torchao": "0.17.0"},
            r"torch 2\.14\.0.*torchao 0\.17\.0.*'torchao>=0\.18'",
        ),
        (MX, None, NEW, "a CPU has no MXFP8 products[^$]*float8.emulate = true"),
        (MX, (9, 0), NEW, r"compute capability 9\.0, and torchao's kernels for MXFP8 need 10\.0"),
        (MX, (10, 3), NEW, ""),
        ([*MX, "no kernels"], (10, 0), NEW, "has no kernels for MXFP8 with this torch"),
    ],
    ids=str,
)
def test_machines_without_float8_are_refused_unless_they_emulate_it(
    monkeypatch, flags, capability, versions, refused
):
    words = [flag for flag in flags if flag != "no kernels"]
    off, on, emulated = run(), run(*words), run(*words, "--float8.emulate")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A")
    monkeypatch.setattr(package, "_has_kernels", lambda: words == flags)
    monkeypatch.setattr("importlib.metadata.version", versions.get)
    check_machine(off)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_machine(on)
    check_machine(emulated)


def test_a_plan_that_leaves_such_a_weight_whole_is_refused():
    model = nn.ModuleDict({"w": nn.Linear(32, 32)})
    apply_mx(model, ["w"], "mxfp8", emulate=True)
    with pytest.raises(ParallelismError, match="divided as colwise, gathered, rowwise, and not as"):
        model["w"].tensor_style("sequence", None, None)


def test_an_older_torchao_is_refused_also_where_it_is_emulated(monkeypatch):
    emulated = run(*MX, "--float8.emulate")
    other = run(ON, "--float8.emulate")
    monkeypatch.setattr("importlib.metadata.version", {"torchao": "0.17.0"}.get)
    with pytest.raises(ConfigError, match=r"torchao 0\.18 or later; this is torchao 0\.17\.0"):
        check_machine(emulated)
    check_machine(other)
