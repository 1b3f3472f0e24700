"""The float8 section: what is converted and why not, and what the machine lacks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from titanlite.assembly.preflight import check_machine
from titanlite.config.errors import ConfigError
from titanlite.config.sections import Float8
from titanlite.features.float8.choice import Float8Choice, choose_linears, converted_names
from titanlite.features.mx import package
from titanlite.models import get_spec, resolve_args
from titanlite.models.linears import linears_of
from titanlite.models.spec import Size
from titanlite.resolve.load import load_config
from titanlite.run.config import RunConfig

ON = "--float8.enable_float8_linear"
KINDS = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
KINDS += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
LLAMA = get_spec("llama3")
ARGS = resolve_args("llama3", "8B")


def _run(*flags: str) -> RunConfig:
    return load_config("debug_model.toml", 1, flags)


def choices(args: Any = ARGS, tp: int = 1, **settings: Any) -> dict[str, Float8Choice]:
    float8 = Float8(enable_float8_linear=True, **settings)
    found = choose_linears(linears_of(LLAMA, args, tp), float8)
    return {choice.kind: choice for choice in found}


@pytest.mark.parametrize("family", ["llama2", "llama3"])
def test_sizes_are_those_of_the_model(family: str) -> None:
    """The config knows them without torch."""
    spec = get_spec(family)
    for flavor in get_spec(family).flavors:
        args = resolve_args(family, flavor, {"n_layers": 2}, tokenizer_size=512)
        model = spec.build_on_meta(args)
        real = {
            n: Size(m.in_features, m.out_features)
            for n, m in model.named_modules()
            if isinstance(m, nn.Linear)
        }
        assert spec.linears(args) == real, flavor


def test_all_but_the_head_is_converted() -> None:
    found = choices()
    assert list(found) == [*KINDS, "output"]
    assert [kind for kind, choice in found.items() if choice.converted] == KINDS
    assert found["output"].reason == "the head"
    assert found["attention.wk"].size == Size(4096, 1024)
    assert len(found["attention.wk"].names) == 32
    assert len(converted_names(found.values())) == 7 * 32


def test_what_is_filtered_or_small_or_odd_stays_and_says_why() -> None:
    found = choices(filter_fqns=["wo", "w2"], min_features=2048)
    assert found["attention.wo"].reason == "filter_fqns: wo"
    assert found["attention.wk"].reason == "below min_features = 2048"
    assert found["attention.wq"].converted
    one_layer = Float8(enable_float8_linear=True, filter_fqns=["layers.1"])
    reasons = {(c.kind, c.reason) for c in choose_linears(linears_of(LLAMA, ARGS), one_layer)}
    assert {("attention.wq", "filter_fqns: layers.1"), ("attention.wq", "")} < reasons
    odd = choices(args=resolve_args("llama3", "8B", {"ffn_dim": 1000}))
    assert odd["feed_forward.w1"].reason == "N = 1000 is not a multiple of 16"
    assert odd["feed_forward.w2"].reason == "K = 1000 is not a multiple of 16"


def test_sizes_count_as_tensor_parallelism_leaves_them() -> None:
    args = resolve_args("llama3", "8B", {"ffn_dim": 48})
    whole = choices(args=args)
    parts = choices(args=args, tp=2)
    assert whole["feed_forward.w1"].converted
    assert whole["feed_forward.w2"].converted
    assert parts["feed_forward.w1"].reason == "N = 24 is not a multiple of 16"
    assert parts["feed_forward.w2"].reason == "K = 24 is not a multiple of 16"
    assert parts["attention.wq"].size == Size(4096, 2048)
    assert parts["attention.wo"].size == Size(2048, 4096)


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
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    capability: tuple[int, int] | None,
    versions: dict[str, str],
    refused: str,
) -> None:
    words = [flag for flag in flags if flag != "no kernels"]
    runs = [_run(), _run(*words), _run(*words, "--float8.emulate")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A")
    monkeypatch.setattr(package, "_has_kernels", lambda: words == flags)
    monkeypatch.setattr("importlib.metadata.version", versions.get)
    off, on, emulated = runs
    check_machine(off)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_machine(on)
    check_machine(emulated)
