"""Models of a ladder have the proportions of the target, and N is what is counted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from titanlite.contrib.lab.ladder.law import LadderError
from titanlite.contrib.lab.ladder.sizes import shapes
from titanlite.models.counts import count_multiplied_parameters
from titanlite.models.families import get_spec


def test_sizes_of_an_8b_keep_heads_and_proportions():
    target = get_spec("llama3").flavors["8B"]
    found = shapes(target, [])
    # Without the head.
    whole = count_multiplied_parameters(target) - 128256 * 4096
    for step, shape in enumerate(found):
        args = shape.args
        wanted = whole / 8 / 2 ** (4 - step)
        in_blocks = shape.parameters - 128256 * args.dim
        assert abs(math.log(in_blocks / wanted)) < math.log(1.25)
        assert args.head_dim == 128
        assert args.dim == 128 * args.n_heads
        # 128 wide for each block, 3.5 times as wide inside.
        assert 128 / 1.5 <= args.dim / args.n_layers <= 128 * 1.5
        assert args.ffn_width == pytest.approx(3.5 * args.dim, rel=0.03)
        assert args.n_heads / args.kv_heads == pytest.approx(4, rel=0.5)
        assert (args.vocab_size, args.rope_theta) == (target.vocab_size, target.rope_theta)
    assert [shape.parameters for shape in found] == sorted(shape.parameters for shape in found)
    assert found[-1].name == "d2048-l16"


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("family", "flavor"),
    [
        ("mixtral", "8x7B"),
        ("qwen3_moe", "30B-A3B"),
        ("gemma3", "4B"),
        ("deepseek_v3", "16B"),
        ("gpt_oss", "20B"),
    ],
)
def test_n_of_smaller_models_is_the_count_of_their_modules(family, flavor):
    """Without a table that is looked up alone, and experts that rest."""
    spec = get_spec(family)
    target = spec.flavors[flavor]
    found = shapes(target, [])
    assert len({shape.name for shape in found}) == 5
    for shape in found:
        args = shape.args
        counted = 0.0
        for name, parameter in spec.build_on_meta(args).named_parameters():
            if args.tied or not name.startswith("tok_embeddings"):
                share = args.top_k / args.n_experts if ".experts." in name else 1.0
                counted += share * parameter.numel()
        assert shape.parameters == counted
    head = target.n_vocab * found[-1].args.dim
    assert found[-1].parameters - head == pytest.approx(
        (count_multiplied_parameters(target) - target.n_vocab * target.dim) / 8, rel=0.3
    )


def test_wanted_sizes_give_the_nearest_models():
    target = get_spec("llama3").flavors["8B"]
    small, middle, large = shapes(target, [900_000_000, 110_000_000, 300_000_000])
    assert small.parameters == pytest.approx(1.1e8, rel=0.25)
    assert middle.parameters == pytest.approx(3e8, rel=0.25)
    assert large.parameters == pytest.approx(9e8, rel=0.25)


def test_default_sizes_of_a_narrow_target_are_different_models():
    small = {"dim": 64, "n_heads": 4, "n_layers": 6, "vocab_size": 2304}
    target = replace(get_spec("llama3").flavors["debugmodel"], **small)
    assert [shape.name for shape in shapes(target, [])] == ["d16-l2", "d16-l3", "d32-l2", "d32-l3"]
    with pytest.raises(LadderError, match="needs 3 sizes, and .* 1 smaller one of its"):
        shapes(replace(target, n_heads=1), [])
