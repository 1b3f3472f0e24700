"""MXFP8 products: numbers as the OCP specification gives them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.harness import full
from tests.support.llamas import assert_near, relative
from titanlite.dist import ParallelismError
from titanlite.dist.dist_env import DistEnv
from titanlite.features.mx.convert import apply_mx

RECIPES = ("mxfp8", "mxfp8_floor")
BLOCK = 32


# The specification: OCP Microscaling Formats 1.0, sections 5.2 and 6.3, in float64


def e4m3(numbers: Tensor) -> Tensor:
    """The nearest numbers of E4M3, ties to even: 3 bits of fraction, exponents from -6, 448 at
    most.
    """
    exponents = torch.floor(torch.log2(numbers.abs().clamp(min=2.0**-20))).clamp(min=-6)
    unit = 2 ** (exponents - 3)
    return (torch.round(numbers / unit) * unit).clamp(-448, 448)


def mx(numbers: Tensor, recipe: str) -> Tensor:
    """The numbers [rows, columns] after rounding: blocks of 32 of a row share a power of two."""
    rows, columns = numbers.shape
    blocks = numbers.double().reshape(rows, columns // BLOCK, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    if recipe == "mxfp8_floor":
        # By the specification: 2^8 is the largest power of two of E4M3.
        exponents = torch.floor(torch.log2(largest)) - 8
    else:
        exponents = torch.ceil(torch.log2(largest / 448))
    scales = 2 ** exponents.clamp(-127, 127)
    return (e4m3(blocks / scales) * scales).reshape(rows, columns)


def by_the_specification(x: Tensor, weight: Tensor, gradient: Tensor, recipe: str) -> list[Tensor]:
    """The output, and the gradients of input and weight: both factors of each product are rounded
    along the dimension that it sums over.
    """

    def rows(numbers: Tensor) -> Tensor:
        return mx(numbers, recipe)

    def columns(numbers: Tensor) -> Tensor:
        return mx(numbers.T, recipe).T

    return [
        rows(x) @ rows(weight).T,
        rows(gradient) @ columns(weight),
        columns(gradient).T @ columns(x),
    ]


def products(linear: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output = linear(x)
    output.backward(gradient)
    return [output.detach(), x.grad, linear.weight.grad]


def converted(inputs: int, outputs: int, recipe: str, bias: bool = True) -> nn.Module:
    model = nn.ModuleDict({"w": nn.Linear(inputs, outputs, bias)})
    assert apply_mx(model, ["w", "of.another.stage"], recipe, emulate=True) == ["w"]
    return model["w"]


def wide(rows: int, columns: int, seed: int) -> Tensor:
    """Normal numbers; each block of 32 x 32 has a size of its own, from 2^-10 to 2^10."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-10, 11, (rows // BLOCK, columns // BLOCK), generator=generator)
    sizes = sizes.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return torch.randn(rows, columns, generator=generator) * 2.0**sizes


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products_are_those_of_the_specification(recipe):
    """But for sums in float32; other blocks, other scales or E5M2 would be percents away."""
    linear = converted(96, 64, recipe)
    linear.weight.data = wide(64, 96, 1)
    nn.init.zeros_(linear.bias)
    x = wide(128, 96, 2)
    gradient = wide(128, 64, 3)
    found = products(linear, x, gradient)
    wanted = by_the_specification(x, linear.weight.detach(), gradient, recipe)
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative(ours.double(), theirs) < 1e-6
    other = by_the_specification(x, linear.weight.detach(), gradient, RECIPES[recipe == "mxfp8"])
    assert all(relative(one.double(), two) > 1e-3 for one, two in zip(found, other, strict=True))
    assert torch.equal(linear.bias.grad, gradient.sum(0))
    nn.init.normal_(linear.bias)
    assert torch.equal(linear(x), found[0] + linear.bias)


def test_numbers_that_are_not_finite_stay_so():
    """The guard must see them."""
    linear = converted(64, 32, "mxfp8", bias=False)
    x = torch.randn(32, 64)
    x[3, 5] = float("inf")
    output, gradient, of_weight = products(linear, x, torch.ones(32, 32))
    assert not output[3].isfinite().any()
    assert output[4].isfinite().all()
    assert not of_weight.isfinite().all()
    assert gradient.isfinite().all()


def test_only_plain_linears_are_converted():
    class Own(nn.Linear):
        pass

    with pytest.raises(ParallelismError, match="w is no plain linear: it is a Own"):
        apply_mx(nn.ModuleDict({"w": Own(32, 32)}), ["w"], "mxfp8", emulate=True)


class _Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def _two_products(world: DistEnv, ranks: int) -> dict[str, Tensor]:
    """Output and gradients of two products, which the ranks divide if there are several."""
    torch.manual_seed(3)
    model = _Divided()
    apply_mx(model, ["up", "down"], "mxfp8", emulate=True)
    if ranks > 1:
        mesh = world.build_mesh(tp=ranks)["tp"]
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(2, 32, 64).requires_grad_()
    output = model(x)
    output.backward(torch.randn(2, 32, 64))
    found = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
    return {**found, "output": output.detach(), "input": x.grad}


def test_ranks_that_divide_a_product_round_as_one_rank_does(pool):
    """Blocks lie in one rank's part, so all but the order of sums is equal."""
    alone = pool(1).run(_two_products, 1)[0]
    for ours in pool(2).run(_two_products, 2):
        assert_near(ours, alone, 1e-6)
        for name in ("down.weight", "up.weight", "up.bias"):
            assert torch.equal(ours[name], alone[name]), name
