"""Which modules become units, for models of titanlite's and of one's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.training.harness import TINY
from titanlite.config.plans import ShardPlan
from titanlite.models import SHAPES, LlamaArgs, get_spec
from titanlite.parallel.units import Unit, UnitError, choose_units, units_by_class, units_by_size


def on_meta(args: LlamaArgs) -> nn.Module:
    with torch.device("meta"):
        return get_spec("llama3").build(args)


def numbers(model: nn.Module, units: list[Unit]) -> list[int]:
    """Parameters that each unit holds, those of units inside it left out, and last the root's."""
    claimed: set[nn.Parameter] = set()
    found = []
    for unit in [*units, ("",)]:
        held = {p for name in unit for p in model.get_submodule(name).parameters()} - claimed
        claimed |= held
        found.append(sum(p.numel() for p in held))
    return found


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Stack(nn.Module):
    """Layers in a list, a parameter of its own, and attention that never calls the module inside it."""

    def __init__(self, layers: int = 5, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.attention = nn.MultiheadAttention(width, 2)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, width)


LAYER = sum(p.numel() for p in Layer(8).parameters())  # 16 * 8 + 16 + 8 * 16 + 8 = 280


def test_the_plan_chooses_the_kind() -> None:
    model, blocks = on_meta(TINY), get_spec("llama3").fsdp_units(TINY)
    assert choose_units(model, ShardPlan(), blocks) == blocks
    assert choose_units(model, ShardPlan(units="root"), blocks) == []
    assert choose_units(model, ShardPlan(units=("Block",)), blocks) == [("layers.0",), ("layers.1",)]
    assert choose_units(model, ShardPlan(units="size", min_params=30_000), blocks) == [("layers.0",), ("layers.1",)]


def test_classes_nest_in_the_order_in_which_they_end() -> None:
    assert units_by_class(on_meta(TINY), ["Block", "Attention"]) == [
        ("layers.0.attention",),
        ("layers.0",),
        ("layers.1.attention",),
        ("layers.1",),
    ]


@pytest.mark.parametrize("name", ["DecoderLayer", "SdpaAttention", "ModuleDict", "Llama", "block"])
def test_a_class_that_makes_no_unit_is_refused_with_those_that_do(name: str) -> None:
    """Also modules without parameters, lists that are never called, and the root itself."""
    with pytest.raises(UnitError) as caught:
        units_by_class(on_meta(TINY), ["Block", name])
    assert str(caught.value) == (
        f"no unit can be made of {name}; classes of Llama with parameters: Attention (2), Block (2), Embedding (1), "
        "FeedForward (2), Linear (15), RMSNorm (5)"
    )


@pytest.mark.parametrize("least", [1, 41, 100, 280, 281, 700, 1200])
def test_units_by_size_hold_enough_and_every_parameter_once(least: int) -> None:
    model = Stack()
    units = units_by_size(model, least)
    *sizes, root = numbers(model, units)
    assert sum(sizes) + root == sum(p.numel() for p in model.parameters())
    assert min(sizes) >= least
    assert not any("attention.out_proj" in name or name == "layers" for unit in units for name in unit)


def test_units_by_size_put_small_neighbours_together() -> None:
    model = Stack()
    assert units_by_size(model, LAYER)[1:] == [(f"layers.{i}",) for i in range(5)]
    # The fifth layer is too small alone and joins the group before it.
    assert units_by_size(model, 2 * LAYER) == [("layers.0", "layers.1"), ("layers.2", "layers.3", "layers.4")]
    # Of a layer, `up` alone is large enough and `down` is not: the layer is a unit as a whole.
    assert units_by_size(model, 144)[1:6] == [(f"layers.{i}",) for i in range(5)]


def test_units_by_size_of_published_models() -> None:
    def units(flavor: str, least: int) -> tuple[nn.Module, list[Unit]]:
        model = on_meta(SHAPES["llama3"][flavor])
        return model, units_by_size(model, least)

    model, found = units("8B", 100_000_000)
    assert found == [("tok_embeddings",), *((f"layers.{i}",) for i in range(32)), ("output",)]
    assert numbers(model, found)[-1] == 4096  # the final norm
    _, found = units("8B", 400_000_000)
    assert found[1:3] == [("layers.0", "layers.1"), ("layers.2", "layers.3")] and len(found) == 18


def test_a_size_that_nothing_reaches_is_refused() -> None:
    with pytest.raises(UnitError, match="no unit has 1,000,000 parameters or more: Llama has 123,200 in all"):
        units_by_size(on_meta(TINY), 1_000_000)


class Tied(nn.Module):
    """Embedding and head share a weight; the middle layer runs twice; the first and last are in different lists."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.early = nn.ModuleList([Layer(8), Layer(8)])
        self.late = nn.ModuleList([self.early[1], Layer(8)])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight


def test_shared_parameters_stay_in_one_unit() -> None:
    model = Tied()
    layers = [("early.0",), ("early.1",), ("late.1",)]
    assert units_by_class(model, ["Layer"]) == layers, "a module that runs twice is one unit; tied weights in the root"
    # The head has no unit of its own, but its weight's unit runs last.
    assert units_by_class(model, ["Layer", "Embedding"]) == [*layers, ("embedding", "head")]
    by_size = units_by_size(model, 128)
    assert by_size[-1] == ("embedding", "head") and sum(numbers(model, by_size)) == 128 + 3 * LAYER


def test_a_unit_around_shared_parameters_is_merged_with_them() -> None:
    model = Stack(layers=2)
    model.head.weight = nn.Parameter(torch.ones(16, 8))
    model.layers[1].up.weight = model.head.weight  # type: ignore[union-attr,assignment]
    assert units_by_class(model, ["Layer", "Linear"]) == [
        ("layers.0.up",),
        ("layers.0.down",),
        ("layers.0",),
        ("layers.1.down",),
        ("layers.1", "head"),
    ]


def test_what_the_root_shares_stays_in_the_root() -> None:
    model = Stack(layers=1)
    model.scale = model.layers[0].down.bias  # type: ignore[union-attr,assignment]
    with pytest.raises(UnitError):
        units_by_size(model, 2000)
    assert units_by_class(model, ["Layer", "MultiheadAttention"]) == [("attention",)]
