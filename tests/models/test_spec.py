"""Initial weights by name, sharding units, and weights under other names."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.hf import unpermute
from titanlite.assembly.fingerprints import weights_fingerprints
from titanlite.models import Init, LlamaArgs, ShapeError, get_spec, resolve_args
from titanlite.models import llama_hf as hf
from titanlite.models.args import as_record, from_record
from titanlite.models.argument_fields import argument, deciding
from titanlite.models.layers import Llama
from titanlite.models.llama import decoder_spec

ARGS = LlamaArgs(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=96)
TIED = LlamaArgs(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=96, tied=True)


def test_initial_distribution_of_every_kind_of_parameter() -> None:
    rule = get_spec("llama3").init_rule
    assert rule("tok_embeddings.weight", ARGS) == Init("normal", std=1.0)
    assert rule("output.weight", ARGS) == Init("trunc_normal", std=0.125, bound=0.375)
    assert (
        rule("tok_embeddings.weight", TIED)
        == rule("output.weight", TIED)
        == rule("output.weight", ARGS)
    )
    for name in ("norm", "layers.2.attention_norm", "layers.0.ffn_norm"):
        assert rule(f"{name}.weight", ARGS) == Init("ones")
    for linear in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1"):
        assert rule(f"layers.2.{linear}.weight", ARGS) == Init("trunc_normal", std=0.02, bound=0.06)
    for linear in ("attention.wo", "feed_forward.w2", "feed_forward.w3"):
        for layer in range(3):
            init = rule(f"layers.{layer}.{linear}.weight", ARGS)
            assert init.kind == "trunc_normal"
            assert init.std == pytest.approx(0.02 / math.sqrt(2 * (layer + 1)), rel=1e-12)
            assert init.bound == pytest.approx(3 * init.std, rel=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "layers.3.attention.wq.weight",
        "layers.0.attention.wq.bias",
        "layers.0.attention.w1x.weight",
    ],
)
def test_a_name_without_a_rule_raises(name: str) -> None:
    with pytest.raises(KeyError, match="no initialisation is known"):
        get_spec("llama3").init_rule(name, ARGS)


def meta_rotation(x: Tensor, theta: float = 1e4) -> Tensor:
    """RoPE as Meta's code writes it: neighbouring pairs as complex numbers.

    x: [heads, seq, head_dim].
    """
    half = torch.arange(0, x.size(-1), 2).float() / x.size(-1)
    angles = torch.outer(torch.arange(x.size(1)).float(), theta**-half)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def test_metas_layout_gives_the_same_attention_scores_after_permutation() -> None:
    torch.manual_seed(0)
    n_heads = 4
    head_dim = 16
    dim = 64
    seq = 10
    x = torch.randn(seq, dim)
    wq = torch.randn(dim, dim)
    wk = torch.randn(dim, dim)
    rotation = Llama(ARGS).rope(seq)

    def ours(weight: Tensor) -> Tensor:
        return rotation((x @ weight.T).view(1, seq, n_heads, head_dim))[0].transpose(0, 1)

    def metas(weight: Tensor) -> Tensor:
        return meta_rotation((x @ weight.T).view(seq, n_heads, head_dim).transpose(0, 1))

    expected = metas(wq) @ metas(wk).transpose(1, 2)
    scores = ours(hf.permute(wq, n_heads)) @ ours(hf.permute(wk, n_heads)).transpose(1, 2)
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-5)
    assert (ours(wq) @ ours(wk).transpose(1, 2) - expected).abs().max() > 1
    assert torch.equal(unpermute(hf.permute(wq, n_heads), n_heads), wq)
    assert not torch.equal(hf.permute(wq, n_heads), wq)


@dataclass(frozen=True)
class TunedArgs(LlamaArgs):
    """Arguments that no code but this names."""

    gain: float = 2.0
    shift: float = -0.5
    penalty: float = argument(0.5, of_training=True, may_be_zero=True)
    narrow: int | None = argument(None, decides="narrow_width")

    @property
    def narrow_width(self) -> int:
        return self.narrow or self.dim // 2


TUNED = decoder_spec("tuned", {"debugmodel": TunedArgs(64, 2, 4, vocab_size=96)})
TUNED_NAME = f"{__name__}:TUNED"


def test_a_new_argument_is_declared_in_one_place() -> None:
    tokenizer: Any = SimpleNamespace(fingerprint="")

    def changed(**changes: Any) -> Any:
        return resolve_args(TUNED_NAME, "debugmodel", changes)

    def told(args: Any) -> tuple[bool, bool]:
        """Whether checkpoints are of another model, and whether weights of others are."""
        both = changed(), args
        resumed = [weights_fingerprints(TUNED_NAME, one, tokenizer)["model"] for one in both]
        compared = [deciding(one) for one in both]
        return resumed[0] != resumed[1], compared[0] != compared[1]

    assert told(changed(gain=3.0)) == (True, True)
    assert told(changed(penalty=0.0)) == (False, False)
    assert told(changed(narrow=32)) == (True, False)
    assert told(changed(narrow=16)) == (True, True)
    assert told(changed(max_seq_len=64)) == (False, False)
    assert told(changed(shift=0.5)) == (True, True)
    wanted = "gain must be positive, got 0.0; .*penalty must not be negative, got -1.0"
    with pytest.raises(ShapeError, match=wanted):
        changed(gain=0.0, penalty=-1.0)
    kept = changed(gain=3.0, penalty=0.25)
    assert from_record(as_record(TUNED_NAME, kept)) == (TUNED_NAME, kept)


@dataclass(frozen=True)
class RoutedArgs:
    """Arguments of a model of a user, as 0.2.0 knew them: nothing is declared."""

    dim: int = 8
    max_seq_len: int = 16
    aux_loss: float = 0.01


def test_checkpoints_of_0_2_0_with_arguments_of_a_user_are_resumed() -> None:
    tokenizer: Any = SimpleNamespace(fingerprint="")
    found = weights_fingerprints("mine.py:SPEC", RoutedArgs(), tokenizer)
    shape = b'{"dim": 8, "model": "mine.py:SPEC"}'
    assert found["model"] == hashlib.sha256(shape).hexdigest()[:16]
