"""Which modules become FSDP groups, for our models and for a user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.harness import TINY
from titanlite.dist import ParallelismError
from titanlite.models import LlamaArgs, get_spec
from titanlite.parallel.fsdp_groups import FSDPGroup, choose_groups, groups_by_class

SPEC = get_spec("llama3")


def on_meta(args: LlamaArgs = TINY) -> nn.Module:
    return SPEC.build_on_meta(args)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


@pytest.mark.parametrize(
    ("policy", "groups"),
    [
        ("block", SPEC.fsdp_units(TINY)),
        ("root", []),
        (["Block"], [("layers.0",), ("layers.1",)]),
        (
            ["Block", "Attention"],
            [
                ("layers.0.attention",),
                ("layers.0",),
                ("layers.1.attention",),
                ("layers.1",),
            ],  # in the order they end
        ),
    ],
    ids=str,
)
def test_the_policy_decides(policy: Any, groups: list[FSDPGroup]) -> None:
    assert choose_groups(on_meta(), policy, SPEC.fsdp_units(TINY)) == groups


@pytest.mark.parametrize("name", ["DecoderLayer", "SdpaAttention", "ModuleDict", "Llama", "block"])
def test_a_class_that_makes_no_group_is_refused_with_those_that_do(name: str) -> None:
    """Also modules without parameters, lists that are never called, and the root itself."""
    there = "Attention (2), Block (2), Embedding (1), FeedForward (2), Linear (15), RMSNorm (5)"
    with pytest.raises(ParallelismError) as error:
        groups_by_class(on_meta(), ["Block", name])
    assert f"of {name};" in str(error.value)
    assert str(error.value).endswith(there)


class Tied(nn.Module):
    """Embedding and head share a weight; the middle layer runs twice; the first and last are in
    different lists.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.early = nn.ModuleList([Layer(8), Layer(8)])
        self.late = nn.ModuleList([self.early[1], Layer(8)])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight


def test_shared_parameters_stay_in_one_group() -> None:
    model = Tied()
    layers = [("early.0",), ("early.1",), ("late.1",)]
    assert groups_by_class(model, ["Layer"]) == layers, (
        "a module that runs twice is one group; tied weights: the root"
    )
    assert groups_by_class(model, ["Layer", "Embedding"]) == layers, (
        "the embedding's weight is the head's too"
    )
