"""Which modules become FSDP groups, for our models and for a user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.harness import TINY
from titanlite.dist import ParallelismError
from titanlite.models import LlamaArgs, get_spec
from titanlite.parallel.wrapping import FSDPGroup, choose_groups, groups_by_class, groups_by_size

SPEC = get_spec("llama3")


def on_meta(args: LlamaArgs = TINY) -> nn.Module:
    return SPEC.build_on_meta(args)


def numbers(model: nn.Module, groups: list[FSDPGroup]) -> list[int]:
    """Parameters of each group without those of groups inside it, and last the root's."""
    claimed: set[nn.Parameter] = set()
    found = []
    for group in [*groups, ("",)]:
        held = {p for name in group for p in model.get_submodule(name).parameters()} - claimed
        claimed |= held
        found.append(sum(p.numel() for p in held))
    return found


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Stack(nn.Module):
    """Layers in a list, a parameter of its own, and attention that never calls the module inside
    it.
    """

    def __init__(self, layers: int = 5, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.attention = nn.MultiheadAttention(width, 2)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, width)


LAYER = 280  # 16 * 8 + 16 + 8 * 16 + 8


@pytest.mark.parametrize(
    ("policy", "groups"),
    [
        ("block", SPEC.fsdp_units(TINY)),
        ("root", []),
        (["Block"], [("layers.0",), ("layers.1",)]),
        ("size", [("layers.0",), ("layers.1",)]),
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
    assert choose_groups(on_meta(), policy, 30_000, SPEC.fsdp_units(TINY)) == groups


@pytest.mark.parametrize("name", ["DecoderLayer", "SdpaAttention", "ModuleDict", "Llama", "block"])
def test_a_class_that_makes_no_group_is_refused_with_those_that_do(name: str) -> None:
    """Also modules without parameters, lists that are never called, and the root itself."""
    there = "Attention (2), Block (2), Embedding (1), FeedForward (2), Linear (15), RMSNorm (5)"
    with pytest.raises(ParallelismError) as error:
        groups_by_class(on_meta(), ["Block", name])
    assert f"of {name};" in str(error.value)
    assert str(error.value).endswith(there)


@pytest.mark.parametrize("least", [1, 281, 1200])
def test_groups_by_size_hold_enough_and_every_parameter_once(least: int) -> None:
    model = Stack()
    groups = groups_by_size(model, least)
    *sizes, root = numbers(model, groups)
    assert sum(sizes) + root == sum(p.numel() for p in model.parameters())
    assert min(sizes) >= least
    assert not any(
        "attention.out_proj" in name or name == "layers" for group in groups for name in group
    )


def test_groups_by_size_join_small_neighbours() -> None:
    model = Stack()
    assert groups_by_size(model, LAYER)[1:] == [(f"layers.{i}",) for i in range(5)]
    # The fifth layer and the head are too small and join the group before them.
    pairs = [("attention", "layers.0"), ("layers.1", "layers.2"), ("layers.3", "layers.4", "head")]
    assert groups_by_size(model, 2 * LAYER) == pairs
    # Of a layer, `up` alone is large enough and `down` is not: the layer is a group as a whole.
    assert groups_by_size(model, 144)[1:6] == [(f"layers.{i}",) for i in range(5)]


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
    by_size = groups_by_size(model, 140)
    assert by_size == layers
    assert sum(numbers(model, by_size)) == 128 + 3 * LAYER
