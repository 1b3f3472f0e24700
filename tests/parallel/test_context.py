"""Ranks that share sequences train the same model, each on its part of the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.harness import TINY
from tests.support.llamas import relative
from tests.support.watch import Watch
from titanlite.data.loader import Batch
from titanlite.dist import ParallelismError
from titanlite.dist.dist_env import DistEnv
from titanlite.features.context.balanced_chunks import CPRank
from titanlite.features.context.gathered_attention import apply_cp
from titanlite.features.context.loader import split_batch
from titanlite.models import get_spec

SPEC = get_spec("llama3")


def _ranks(degree: int) -> list[CPRank]:
    """Every rank, without a group to communicate in."""
    return [CPRank(rank, degree, None) for rank in range(degree)]  # type: ignore[arg-type]


def test_each_rank_takes_one_chunk_from_the_front_and_one_from_the_back():
    sequence = torch.arange(16).unsqueeze(0)
    parts = [rank.part(sequence)[0].tolist() for rank in _ranks(4)]
    assert parts == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    for length in (18, 0):
        with pytest.raises(
            ParallelismError,
            match=rf"{length} tokens .* 2 equal chunks for each of 4 .* multiple of 8",
        ):
            _ranks(4)[0].part(torch.zeros(1, length))


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _model(world: DistEnv) -> tuple[float, dict[str, list[tuple[int, ...]]], int]:
    """Forward and backward of a model without FSDP, against the plain model on the whole batch.

    Return the largest error of a gradient, shapes by collective, and pairs of tokens in attention.
    """
    mesh = world.build_mesh(cp=world.size)
    torch.manual_seed(0)
    plain, shared = SPEC.build(TINY), SPEC.build(TINY)
    shared.load_state_dict(plain.state_dict())
    apply_cp(shared, mesh)
    tokens, labels = torch.randint(0, 192, (2, 3, 32))
    labels[1, :20] = -100
    _loss(plain(tokens), labels).backward()
    batch = split_batch(Batch(tokens, labels), mesh)
    moved: dict[str, list[tuple[int, ...]]] = {}
    area = 0

    def note(func: Any, args: Any, output: Any) -> None:
        nonlocal area
        name = func.overloadpacket.__name__
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            moved.setdefault(name, []).append(tuple(output.shape))
        elif name == "_scaled_dot_product_flash_attention_for_cpu":
            area += args[0].size(2) * args[1].size(2)

    with Watch(note):
        _loss(shared(batch.tokens), batch.labels).backward()
    worst = 0.0
    for expected, ours in zip(plain.parameters(), shared.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        worst = max(worst, relative(ours.grad, expected.grad))  # type: ignore[arg-type]
    return worst, moved, area


def test_gradients_equal_the_plain_models_and_work_is_shared(pool):
    for worst, moved, area in pool(2).run(_model):
        assert worst < 1e-6
        # Keys and values of two heads, not of the four queries' heads; once per block, and back
        # once.
        assert moved["all_gather_into_tensor"] == [(2, 2, 3, 2, 16, 16)] * 2
        assert len(moved["reduce_scatter_tensor"]) == 2
        # 2 blocks, chunks of 8: 5 of the 4 x 4 squares of 8 x 8 for each rank.
        assert area == 2 * 5 * 64


def _refusals(world: DistEnv) -> None:
    mesh = world.build_mesh(cp=world.size)
    model = SPEC.build(TINY)
    apply_cp(model, mesh)
    with pytest.raises(
        ParallelismError,
        match="a sequence of 128, but the model's RoPE tables have 64.*split_batch",
    ):
        model(torch.zeros(1, 64, dtype=torch.int64))
    with pytest.raises(ParallelismError, match="finds no 'inner_attention' in Linear"):
        apply_cp(nn.Linear(2, 2), mesh)


def test_whole_sequences_and_models_without_such_attention_are_refused(pool):
    pool(2).run(_refusals)
