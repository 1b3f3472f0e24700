"""MXFP8 in the float8 section: what is converted and why not, and what the machine lacks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.support.float8_runs import MX
from titanlite.assembly.preflight import check_machine
from titanlite.config.errors import ConfigError
from titanlite.config.sections import Config, Float8
from titanlite.dist import ParallelismError
from titanlite.features.float8.choice import Float8Choice
from titanlite.features.mx.convert import apply_mx
from titanlite.models import get_spec, resolve_args
from titanlite.models.linears import linears_of
from titanlite.resolve.load import load_config
from titanlite.run.config import RunConfig
from titanlite.run.features import features_of

LLAMA = get_spec("llama3")
ON = ["--float8.enable_float8_linear", "--float8.recipe_name=mxfp8"]
EMULATED = [*ON, "--float8.emulate"]
BF16 = "--training.mixed_precision_param=bfloat16"


def run(*flags: str, ranks: int = 1) -> RunConfig:
    return load_config("debug_model.toml", ranks, flags)


def choices(args: Any, tp: int = 1, **settings: Any) -> dict[str, Float8Choice]:
    feature = features_of(
        Config(float8=Float8(enable_float8_linear=True, recipe_name="mxfp8", **settings))
    ).float8
    assert feature is not None
    found = feature.choices(linears_of(LLAMA, args, tp))
    return {choice.kind: choice for choice in found}


def test_sizes_on_a_rank_are_multiples_of_32() -> None:
    args = resolve_args("llama3", "8B", {"ffn_dim": 96})
    found = {kind: one.reason for kind, one in choices(args, tp=2).items() if one.reason}
    assert found == {
        "feed_forward.w1": "N = 48 is not a multiple of 32",
        "feed_forward.w2": "K = 48 is not a multiple of 32",
        "feed_forward.w3": "N = 48 is not a multiple of 32",
        "output": "the head",
    }
    assert choices(args)["feed_forward.w1"].converted


def test_weights_that_tensor_parallelism_leaves_whole_stay() -> None:
    """Their products sum over tokens of several ranks."""
    spec = get_spec("deepseek_v3")
    args = resolve_args("deepseek_v3", "16B")
    feature = features_of(Config(float8=MX)).float8
    assert feature is not None
    alone, parts = (feature.choices(linears_of(spec, args, ranks)) for ranks in (1, 2))
    kept = {choice.kind for choice in parts if choice.reason.startswith("tensor parallelism does")}
    assert "attention.wkv_a" in kept
    assert all(choice.converted for choice in alone if choice.kind in kept)
    assert {choice.kind for choice in parts if choice.converted} >= {"attention.wq", "attention.wo"}


def test_a_plan_that_leaves_such_a_weight_whole_is_refused() -> None:
    model = nn.ModuleDict({"w": nn.Linear(32, 32)})
    apply_mx(model, ["w"], "mxfp8", emulate=True)
    with pytest.raises(ParallelismError, match="divided as colwise, gathered, rowwise, and not as"):
        model["w"].tensor_style("sequence", None, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--float8.enable_fsdp_float8_all_gather"],
            "excludes float8.enable_fsdp_float8_all_gather = true[^$]*FSDP gathers MX weights in",
        ),
        (
            ["--float8.precompute_float8_dynamic_scale_for_fsdp"],
            "excludes float8.precompute_float8[^$]*each block of 32 numbers gets its scale",
        ),
        (["--float8.filter_fqns=auto_filter_small_kn"], "torchao has no sizes"),
        (["--training.seq_len=24", "--training.batch_size=1"], "needs a multiple of 32 tokens"),
        (["--float8.filter_fqns=attention,feed_forward"], "leaves no product in mxfp8: "),
    ],
)
def test_keys_that_make_no_sense_with_it_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*EMULATED, *flags, ranks=2)


def test_products_of_a_gpu_are_bfloat16() -> None:
    dtype = "--training.mixed_precision_param=float32"
    with pytest.raises(ConfigError, match='excludes training.mixed_precision_param = "float32"'):
        run(*ON, dtype)
    assert run(*ON, BF16).float8.is_mx
    assert run(*EMULATED, dtype).float8.emulate


def test_an_older_torchao_is_refused_also_where_it_is_emulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulated = run(*EMULATED)
    other = run("--float8.enable_float8_linear", "--float8.emulate")
    monkeypatch.setattr("importlib.metadata.version", {"torchao": "0.17.0"}.get)
    with pytest.raises(ConfigError, match=r"torchao 0\.18 or later; this is torchao 0\.17\.0"):
        check_machine(emulated)
    check_machine(other)
