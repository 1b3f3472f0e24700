"""Family qwen3_moe: equal to `transformers`, files there and back, published counts, blocks
without experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_families import theirs_of
from tests.support.hf import check_files
from tests.support.reference import in_memory
from titanlite.models import get_spec, resolve_args
from titanlite.models.counts import count_active_parameters
from titanlite.models.qwen3_moe import Blocks, Qwen3MoeArgs
from titanlite.models.spec import ShapeError

SPEC = get_spec("qwen3_moe")
ARGS = Qwen3MoeArgs(
    dim=64,
    n_layers=3,
    n_heads=8,
    n_kv_heads=2,
    ffn_dim=96,
    vocab_size=96,
    max_seq_len=64,
    head_dim=16,
    n_experts=8,
    top_k=3,
    expert_width=40,
    aux_loss=0.0,
)
VARIANTS = {
    "every second block": replace(ARGS, sparse_step=2, norm_topk=False),
    "dense blocks by number": replace(ARGS, dense_blocks=Blocks((0, 2)), tied=True, top_k=8),
    "balanced": replace(ARGS, n_layers=1, aux_loss=0.5),
}


def pair(args: Qwen3MoeArgs) -> tuple[Any, Any]:
    """Ours and theirs, of the same weights, all of which are large enough to matter."""
    generator = torch.Generator().manual_seed(3)
    ours = SPEC.build(args)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise * parameter.size(-1) ** -0.5)
    theirs = theirs_of("qwen3_moe", args)
    state = in_memory(SPEC.to_hf(ours.state_dict(), args))
    theirs.load_state_dict(state, strict=not args.tied)
    return ours, theirs


def tokens_with_padding(args: Qwen3MoeArgs) -> Tensor:
    """Rows that end in the same token again and again, as padding does."""
    tokens = torch.randint(args.n_vocab, (3, 24), generator=torch.Generator().manual_seed(5))
    tokens[1, 10:] = 7
    tokens[2, 3:] = 7
    return tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_every_gradient_equal_those_of_transformers(variant: str) -> None:
    args = VARIANTS[variant]
    ours, theirs = pair(args)
    tokens = tokens_with_padding(args)
    expected = theirs(tokens, output_router_logits=True)
    logits = ours(tokens)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
    labels = tokens.roll(-1, 1).flatten()
    F.cross_entropy(logits.flatten(0, 1), labels).backward()
    loss = F.cross_entropy(expected.logits.flatten(0, 1), labels)
    if args.aux_loss:
        loss = loss + args.aux_loss * expected.aux_loss
    loss.backward()
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    found = in_memory(SPEC.to_hf(gradients, args))
    by_name = dict(theirs.named_parameters())
    assert found.keys() == by_name.keys()
    for name, gradient in found.items():
        other = by_name[name].grad
        assert (gradient - other).norm() / other.norm() < 2e-6, name


def test_files_of_transformers_there_and_back(tmp_path: Path) -> None:
    args = VARIANTS["every second block"]
    ours, theirs = pair(args)
    check_files(theirs, ours.state_dict(), SPEC, args, tmp_path)


def test_published_shapes() -> None:
    """Parameters as the safetensors files of Qwen/Qwen3-30B-A3B and 235B-A22B hold."""
    small = resolve_args("qwen3_moe", "30B-A3B")
    large = resolve_args("qwen3_moe", "235B-A22B")
    assert SPEC.count_parameters(small) == 30_532_122_624
    assert SPEC.count_parameters(large) == 235_093_634_560
    assert count_active_parameters(small) == 3_353_032_704
    assert count_active_parameters(large) == 22_190_763_520


def test_blocks_without_experts_are_counted_as_they_are() -> None:
    args = replace(ARGS, n_layers=4, dense_blocks=Blocks((2,)), sparse_step=2)
    with_experts = [bool(args.of_block(index).n_experts) for index in range(4)]
    assert with_experts == [False, True, False, True]
    assert SPEC.experts(args) == {  # type: ignore[misc]
        "layers.1.feed_forward": 8,
        "layers.3.feed_forward": 8,
    }
    linears = SPEC.linears(args)  # type: ignore[misc]
    assert linears["layers.2.feed_forward.w1"].out_features == 96
    assert "layers.3.feed_forward.w1" not in linears
    flops = SPEC.flops_per_token(args, 64)
    attention = 4 * 12 * 8 * 16 * 64
    assert flops == 6 * (count_active_parameters(args) - 96 * 64) + attention


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"dense_blocks": [3]}, "dense_blocks has 3, and blocks are 0 to 2"),
        ({"dense_blocks": ["0"]}, "overrides.dense_blocks: expected a list of integers"),
        ({"sparse_step": 4}, "no block has experts: the family qwen3 has dense models"),
    ],
)
def test_misfits(overrides: dict[str, Any], words: str) -> None:
    given = {"n_layers": 3, **overrides}
    with pytest.raises(ShapeError, match=words):
        resolve_args("qwen3_moe", "debugmodel", given, tokenizer_size=96)


def test_biases_of_experts_are_not_lost_in_silence() -> None:
    args = replace(ARGS, bias_update=0.001)
    assert "layers.0.feed_forward.expert_bias" in SPEC.build(args).state_dict()
    for convert in (SPEC.hf_config, SPEC.hf_names):
        with pytest.raises(ValueError, match="has no biases of experts"):
            convert(args)
