"""Activation checkpointing: the same numbers in every mode, and what runs again.

tests/plan has what stays in memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.support.checkpoints import assert_equal
from tests.support.harness import EVERY_2, FULL, MODES, NONE, OP, full_precision, train
from tests.support.pool import Pools
from tests.support.recompute import BLOCKS, CPU, FOUR, RUN, TOKENS, build
from tests.support.watch import GATHER, Operators, count_collectives
from titanlite.config.sections import ActivationCheckpoint, Training
from titanlite.parallel.activation_checkpoint import ATTENTION, MATMULS, OTHERS, apply_ac, kind_of

SMALL = {"fsdp_units": ["Attention", "FeedForward"]}  # groups within a block


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("settings", "ranks", "accumulation", "training"),
    [
        (FULL, 2, 2, full_precision()),
        (OP, 2, 1, Training()),
        *(
            pytest.param(settings, *rest, marks=pytest.mark.slow)
            for settings, *rest in [
                (EVERY_2, 1, 2, full_precision()),
                # Hooks of groups smaller than a block lie inside of the recomputation.
                (OP, 2, 1, full_precision(**SMALL, reshard_after_forward="always")),
            ]
        ),
    ],
)
def test_training_is_bit_for_bit_that_of_mode_none(
    pool: Pools, settings: ActivationCheckpoint, ranks: int, accumulation: int, training: Training
) -> None:
    run = replace(RUN, accumulation=accumulation, training=training)
    expected = pool(ranks).run(train, run)[0]
    curve = pool(ranks).run(train, replace(run, activations=settings))[0]
    assert (curve.losses, curve.norms) == (expected.losses, expected.norms)
    assert_equal(curve.gradients, expected.gradients)
    assert_equal(curve.weights, expected.weights)


class Noisy(nn.Module):
    """One block that draws by itself."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * torch.rand_like(x)).relu()

    def __init__(self) -> None:
        super().__init__()
        self.block = self.Block(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def test_a_block_draws_the_same_numbers_again() -> None:
    found = []
    for settings in (NONE, FULL):
        torch.manual_seed(0)
        model = Noisy()
        apply_ac(model, ["block"], settings, CPU)
        model(torch.ones(8, 16)).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(*found)


@pytest.mark.parametrize(
    ("settings", "matmuls_again", "attention_again"),
    [(NONE, 0, 0), (EVERY_2, 2 * 6, 2), (OP, 4 * 3, 0), (FULL, 4 * 6, 4)],
    ids=MODES,
)
def test_operators_run_again_in_backward(
    settings: ActivationCheckpoint, matmuls_again: int, attention_again: int
) -> None:
    """Of a block's seven products w2 runs once in every mode: the backward does not need its
    output.
    """
    model = build(settings)
    with Operators() as forward:
        loss = model(TOKENS[0]).sum()
    with Operators() as backward:
        loss.backward()
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    products = 4 * 7 + 1
    assert (forward.seen["aten.mm.default"], forward.seen[attention]) == (products, 4)
    assert backward.seen["aten.mm.default"] == 2 * products + matmuls_again
    assert backward.seen[attention] == attention_again


def test_every_nth_block_is_the_nth_the_2nth_and_so_on_also_in_a_part_of_the_model() -> None:
    stage = build(NONE)
    del stage.layers["0"], stage.layers["1"]  # type: ignore[operator]
    assert apply_ac(stage, BLOCKS, EVERY_2, CPU) == ["layers.3"]
    for option, expected in {"1": BLOCKS, "2": BLOCKS[1::2], "3": ["layers.2"], "5": []}.items():
        assert (
            apply_ac(build(NONE), BLOCKS, ActivationCheckpoint(selective_ac_option=option), CPU)
            == expected
        )


@pytest.mark.slow
def test_weights_are_gathered_no_more_often(pool: Pools) -> None:
    """A block is gathered once for the backward, in which its recomputation lies."""
    run = replace(RUN, training=full_precision(reshard_after_forward="always"))
    plain = pool(2).run(count_collectives, run)[0]
    assert plain[GATHER, torch.float32] == 2 * (FOUR.n_layers + 2)
    for activations in (FULL, OP):
        assert pool(2).run(count_collectives, replace(run, activations=activations))[0] == plain


def test_the_policy_names_operators_that_exist() -> None:
    import torch.nn.attention.varlen

    import titanlite.features.experts.exchange
    import titanlite.models.experts.layer  # noqa: F401  all register operators

    later = {"aten._scaled_mm_v2.default"}
    for name in (*MATMULS, *ATTENTION, *OTHERS):
        space, operator, *overload = name.split(".")
        if name not in later:
            found = getattr(getattr(torch.ops, space), operator)
            assert kind_of(getattr(found, overload[0]) if overload else found), name
    assert kind_of(torch.ops.aten.bmm.default) == kind_of(torch.ops.aten.abs.default) == ""
