"""Every family against `transformers` with the same random weights: logits, gradients, generated
tokens, counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.llamas import SCALED, relative, tokens_of
from tests.support.llamas import VARIANTS as LLAMAS
from titanlite.models import SPECS, LlamaArgs
from titanlite.models.args import as_record, from_record
from titanlite.models.mistral import MistralArgs
from titanlite.models.qwen3 import Qwen3Args

SMALL: dict[str, Any] = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 2,
    "vocab_size": 96,
    "max_seq_len": 128,
}
MISTRAL = MistralArgs(**SMALL, window=24)
QWEN3 = Qwen3Args(**SMALL, head_dim=16)
#: Family and arguments: a window shorter than the sequence and one as long, heads wider than dim /
#: heads, each RoPE.
VARIANTS: dict[str, tuple[str, LlamaArgs]] = {
    **{f"llama, {name}": ("llama3", args) for name, args in LLAMAS.items()},
    "mistral, window": ("mistral", MISTRAL),
    "mistral, long window": ("mistral", replace(MISTRAL, window=128)),
    "mistral, no window, tied": (
        "mistral",
        replace(MISTRAL, window=None, tied=True, n_kv_heads=None, rope_theta=1e6),
    ),
    "mistral, window, scaled": ("mistral", replace(MISTRAL, rope_scaling=SCALED)),
    "qwen3": ("qwen3", QWEN3),
    "qwen3, tied, scaled": (
        "qwen3",
        replace(QWEN3, tied=True, rope_scaling=SCALED, n_kv_heads=8, head_dim=24),
    ),
}


def theirs_of(family: str, args: LlamaArgs) -> Any:
    """The class of `transformers` that config.json names, with the weights it makes."""
    import transformers

    config = dict(SPECS[family].hf_config(args))
    (name,) = config.pop("architectures")
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))


def pair(variant: str) -> tuple[nn.Module, Any, str, LlamaArgs]:
    """Ours and theirs, of the same weights: every parameter, norms too, is random and large enough
    to matter.
    """
    family, args = VARIANTS[variant]
    torch.manual_seed(0)
    ours = SPECS[family].build(args)
    theirs = theirs_of(family, args)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            p.copy_(
                1 + 0.2 * torch.randn_like(p)
                if "norm" in name
                else torch.randn_like(p) * p.size(-1) ** -0.5
            )
    theirs.load_state_dict(SPECS[family].to_hf(ours.state_dict(), args), strict=not args.tied)
    return ours, theirs, family, args


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_every_gradient_equal_those_of_transformers(variant: str) -> None:
    ours, theirs, family, args = pair(variant)
    tokens = tokens_of(args)
    logits = ours(tokens)
    expected = theirs(tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    for out in (logits, expected):
        nn.functional.cross_entropy(out.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    by_name = dict(theirs.named_parameters())
    names = SPECS[family].hf_names(args)
    for name, p in ours.named_parameters():
        q = by_name[names[name]]
        assert p.grad is not None and relative(p.grad, q.grad) < 1e-5, name
    assert len(names) == len(by_name) == len(list(ours.parameters()))


@torch.no_grad()
def greedy(model: Any, start: Tensor, count: int) -> list[int]:
    tokens = start
    for _ in range(count):
        out = model(tokens)
        logits = out if isinstance(out, Tensor) else out.logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens[0, start.size(1) :].tolist()


@pytest.mark.parametrize("variant", ["llama, gqa", "mistral, window", "qwen3"])
def test_greedy_generation_takes_the_same_64_tokens(variant: str) -> None:
    ours, theirs, _, args = pair(variant)
    start = tokens_of(args, batch=1, seq=20)
    found = greedy(ours, start, 64)
    assert found == greedy(theirs, start, 64)
    assert len(set(found)) > 5


@pytest.mark.parametrize(
    "family", [name for name, spec in SPECS.items() if issubclass(spec.args_class, LlamaArgs)]
)
def test_each_flavor_has_as_many_parameters_as_in_transformers_and_its_config_json_describes_it(
    family: str,
) -> None:
    spec = SPECS[family]
    for flavor, published in spec.flavors.items():
        # Further blocks are alike; PUBLISHED counts whole models.
        layers = 3 + getattr(published, "n_dense_layers", 0)
        args = replace(published, vocab_size=published.vocab_size or 512, n_layers=layers)
        with torch.device("meta"):
            model = spec.build(args)
            theirs = theirs_of(family, args)
        count = sum(p.numel() for p in model.parameters())
        assert (
            count == sum(p.numel() for p in theirs.parameters()) == spec.count_parameters(args)
        ), flavor
        back = spec.args_from_hf(spec.hf_config(args))
        same = {
            "max_seq_len": back.max_seq_len,
            "ffn_dim": args.ffn_width,
            "n_kv_heads": args.kv_heads,
        }
        wanted = replace(args, **same, ffn_dim_multiplier=1.0, multiple_of=256)
        assert back == wanted and spec.hf_config(back) == spec.hf_config(args), flavor
        assert from_record(as_record(family, args)) == (family, args)


PUBLISHED = {
    ("mistral", "7B-v0.1"): 7_241_732_096,
    ("mistral", "7B"): 7_248_023_552,
    ("mistral", "mathstral-7B"): 7_248_023_552,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
}


def test_published_counts() -> None:
    assert {
        name: SPECS[name[0]].count_parameters(SPECS[name[0]].flavors[name[1]]) for name in PUBLISHED
    } == PUBLISHED


def test_attention_outside_the_window_costs_nothing() -> None:
    flops = SPECS["mistral"].flops_per_token
    flavors = SPECS["mistral"].flavors
    windowed = flavors["mathstral-7B"]
    assert flops(windowed, 4096) == flops(flavors["7B"], 4096)
    assert flops(flavors["7B"], 8192) - flops(windowed, 8192) == 32 * 12 * 4096 * 4096


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mistral", {"model_type": "llama"}, "model_type is 'llama', and this family is 'mistral'"),
        ("mistral", {"head_dim": 32}, "head_dim is 32; here it is"),
        ("mistral", {"sliding_window": 0}, "window must be positive, got 0"),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "a Mistral here has layers of one kind",
        ),
        ("qwen3", {"use_sliding_window": True}, "attends to all tokens before"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "attends to all tokens before",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3", {"head_dim": 15}, "head_dim = 15 is no positive even number"),
    ],
)
def test_another_config_json_is_refused(family: str, changes: dict[str, Any], words: str) -> None:
    args = MISTRAL if family == "mistral" else QWEN3
    with pytest.raises(ValueError, match=words):
        SPECS[family].args_from_hf({**SPECS[family].hf_config(args), **changes})


@pytest.mark.parametrize("family", ["llama3", "mistral", "mixtral", "qwen3", "deepseek_v3"])
def test_a_config_json_without_a_theta_has_that_of_transformers(family: str) -> None:
    from transformers import CONFIG_MAPPING

    spec = SPECS[family]
    config = spec.hf_config(
        replace(next(iter(spec.flavors.values())), vocab_size=96, rope_theta=777.0)
    )
    without = {name: value for name, value in config.items() if not name.startswith("rope_")}
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(without)
    assert spec.args_from_hf(without).rope_theta == theirs.rope_parameters["rope_theta"]
