"""Family qwen3_moe: equal to `transformers`, files there and back, published counts, blocks
without experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_families import QWEN3_MOE as ARGS
from tests.models.test_families import pair
from tests.support.hf import check_files
from titanlite.models import get_spec, resolve_args
from titanlite.models.counts import count_active_parameters
from titanlite.models.qwen3_moe import Blocks
from titanlite.models.spec import ShapeError

SPEC = get_spec("qwen3_moe")


def test_files_of_transformers_there_and_back(tmp_path: Path) -> None:
    ours, theirs, _, args = pair("qwen3_moe, every second block")
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
