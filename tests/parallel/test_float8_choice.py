"""The float8 section: what is converted and why not, and what the machine lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from titanlite.config.errors import ConfigError
from titanlite.config.sections import Compile, Float8, Training
from titanlite.models import SHAPES, get_spec, resolve_args
from titanlite.models.spec import Size
from titanlite.parallel.float8_choice import Float8Choice, choose_linears, converted_names
from titanlite.preflight import check_machine

F8, ON = "--float8.", "--float8.enable_float8_linear"
KINDS = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
KINDS += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
LLAMA = get_spec("llama3")
ARGS = resolve_args("llama3", "8B")


def choices(args: Any = ARGS, tp: int = 1, **settings: Any) -> dict[str, Float8Choice]:
    float8 = Float8(enable_float8_linear=True, **settings)
    found = choose_linears(LLAMA.linears(args), float8, LLAMA.tensor_plan(args), tp)
    return {choice.kind: choice for choice in found}


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


def test_what_is_filtered_or_small_or_odd_stays_and_says_why() -> None:
    found = choices(filter_fqns=["wo", "w2"], min_features=2048)
    assert found["attention.wo"].reason == "filter_fqns: wo"
    assert found["attention.wk"].reason == "below min_features = 2048" and found["attention.wq"].converted
    one_layer = Float8(enable_float8_linear=True, filter_fqns=["layers.1"])
    reasons = {(c.kind, c.reason) for c in choose_linears(LLAMA.linears(ARGS), one_layer)}
    assert {("attention.wq", "filter_fqns: layers.1"), ("attention.wq", "")} < reasons
    odd = choices(args=resolve_args("llama3", "8B", {"ffn_dim": 1000}))
    assert odd["feed_forward.w1"].reason == "N = 1000 is not a multiple of 16"
    assert odd["feed_forward.w2"].reason == "K = 1000 is not a multiple of 16"


def test_sizes_count_as_tensor_parallelism_leaves_them() -> None:
    args = resolve_args("llama3", "8B", {"ffn_dim": 48})
    whole, parts = choices(args=args), choices(args=args, tp=2)
    assert whole["feed_forward.w1"].converted and whole["feed_forward.w2"].converted
    assert parts["feed_forward.w1"].reason == "N = 24 is not a multiple of 16"
    assert parts["feed_forward.w2"].reason == "K = 24 is not a multiple of 16"
    assert parts["attention.wq"].size == Size(4096, 2048) and parts["attention.wo"].size == Size(2048, 4096)


def check(**settings: Any) -> None:
    check_machine(Training(), Compile(), Float8(enable_float8_linear=True, **settings))


def test_a_cpu_has_no_float8_but_can_emulate_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="a CPU has no float8 products[^$]*float8.emulate = true"):
        check()
    check(emulate=True)
    check_machine(Training(), Compile(), Float8())


@pytest.mark.parametrize(("capability", "fine"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_needs_capability_8_9(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fine: bool) -> None:
    cuda = {"is_available": lambda: True, "get_device_capability": lambda: capability, "get_device_name": lambda: "A"}
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    if fine:
        check()
        return
    with pytest.raises(ConfigError, match=rf"compute capability 8\.{capability[1]}, and float8 products need 8\.9"):
        check()
    check(emulate=True)


@pytest.mark.parametrize(
    ("torch_version", "ao_version", "fine"), [("2.14.0", "0.17.0", False), ("2.13.0", "0.17", True)]
)
def test_packages_that_store_float8_wrong_are_refused(
    monkeypatch: pytest.MonkeyPatch, torch_version: str, ao_version: str, fine: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("importlib.metadata.version", {"torch": torch_version, "torchao": ao_version}.get)
    if fine:
        check()
        return
    with pytest.raises(ConfigError, match=r"torch 2\.14\.0.*torchao 0\.17\.0.*pip install 'torchao>=0\.18'"):
        check()
