"""Family qwen3_moe: equal to `transformers`, files there and back, published counts, blocks
without experts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_families import theirs_of
from tests.support.reference import in_memory
from titanlite.models import get_spec, resolve_args
from titanlite.models.counts import count_active_parameters
from titanlite.models.families import family_of
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
    "experts everywhere": ARGS,
    "every second block": replace(ARGS, sparse_step=2, norm_topk=False),
    "dense blocks by number": replace(ARGS, dense_blocks=Blocks((0, 2)), tied=True, top_k=8),
    "one expert of each token": replace(ARGS, norm_topk=False, top_k=1, n_kv_heads=None),
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


@pytest.mark.parametrize("variant", ["every second block", "dense blocks by number"])
def test_files_of_transformers_there_and_back(variant: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    args = VARIANTS[variant]
    ours, theirs = pair(args)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    family, read = family_of(config)
    assert (family, read) == ("qwen3_moe", replace(args, max_seq_len=read.max_seq_len))
    files = load_file(tmp_path / "model.safetensors")
    state = ours.state_dict()
    exported = SPEC.to_hf(state, args)
    assert files.keys() == exported.keys()
    assert all(torch.equal(files[name], exported[name]) for name in files)
    back = SPEC.from_hf(files, args)
    assert state.keys() == back.keys()
    assert all(torch.equal(state[name], back[name]) for name in state)


def test_published_shapes() -> None:
    """Parameters as the safetensors files of Qwen/Qwen3-30B-A3B and 235B-A22B hold."""
    small = resolve_args("qwen3_moe", "30B-A3B")
    large = resolve_args("qwen3_moe", "235B-A22B")
    assert SPEC.count_parameters(small) == 30_532_122_624
    assert SPEC.count_parameters(large) == 235_093_634_560
    assert count_active_parameters(small) == 3_353_032_704
    assert count_active_parameters(large) == 22_190_763_520
    for args in (small, large):
        assert SPEC.args_from_hf(SPEC.hf_config(args)) == replace(args, max_seq_len=40960)


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
        ({"dense_blocks": 1}, "expected a list of integers, got 1"),
        ({"sparse_step": 4}, "no block has experts: the family qwen3 has dense models"),
        ({"sparse_step": 0}, "sparse_step must be positive, got 0"),
        ({"expert_width": 12}, "expert_width = 12 is not a multiple of 8"),
        ({"top_k": 1}, "top_k must be between 2 and n_experts = 16, got 1"),
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


def test_a_config_json_without_entries_has_the_defaults_of_transformers() -> None:
    from transformers import Qwen3MoeConfig

    given = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 96,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
    }
    theirs = Qwen3MoeConfig(**given)
    args = SPEC.args_from_hf(given)
    assert (args.n_experts, args.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert (args.expert_width, args.head_dim) == (theirs.moe_intermediate_size, 8)
    assert (args.norm_topk, args.sparse_step) == (False, theirs.decoder_sparse_step)
    assert args.aux_loss == theirs.router_aux_loss_coef
