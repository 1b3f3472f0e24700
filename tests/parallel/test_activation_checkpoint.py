"""Activation checkpointing: the same numbers in every mode, what runs again, and activations that
wait in host memory.

tests/plan has what stays in memory.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.block_trace import ActivationStats, trace_block
from tests.support.checkpoints import assert_equal
from tests.support.harness import (
    EVERY_2,
    FULL,
    MODES,
    NONE,
    OP,
    TINY,
    Run,
    batches,
    build_tiny,
    full_precision,
    micro_batches,
    train,
)
from tests.support.watch import GATHER, Operators, count_collectives
from titanlite.config.sections import ActivationCheckpoint, Training
from titanlite.dist.dist_env import DistEnv
from titanlite.models import get_spec
from titanlite.parallel.activation_checkpoint import ATTENTION, MATMULS, OTHERS, apply_ac, kind_of
from titanlite.parallel.host_memory import HostMemory
from titanlite.parallel.offload_blocks import offload

CPU = torch.device("cpu")
SPEC = get_spec("llama3")
FOUR = replace(TINY, n_layers=4)
BLOCKS = SPEC.block_names(FOUR)
TOKENS, LABELS = batches(2, 8, 32, 192)
RUN = Run(TOKENS, LABELS, [1e-3, 1e-3], args=FOUR)


def build(settings: ActivationCheckpoint) -> nn.Module:
    torch.manual_seed(3)
    model = SPEC.build(FOUR)
    apply_ac(model, BLOCKS, settings, CPU)
    return model


def traced(settings: ActivationCheckpoint) -> ActivationStats:
    return trace_block(SPEC.build_on_meta(FOUR), BLOCKS, settings, (4, 32), CPU, torch.float32)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Any]:
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("settings", "ranks", "accumulation", "training"),
    [
        (FULL, 2, 2, full_precision()),
        (OP, 2, 1, Training()),
        (EVERY_2, 1, 2, full_precision()),
        # Hooks of groups smaller than a block lie inside of the recomputation.
        (
            OP,
            2,
            1,
            full_precision(fsdp_units=["Attention", "FeedForward"], reshard_after_forward="always"),
        ),
    ],
)
def test_training_is_bit_for_bit_that_of_mode_none(pool, settings, ranks, accumulation, training):
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


def test_a_block_draws_the_same_numbers_again():
    found = []
    for settings in (NONE, FULL):
        torch.manual_seed(0)
        model = Noisy()
        apply_ac(model, ["block"], settings, CPU)
        found.append(gradients(model, model(torch.ones(8, 16)).sum()))
    assert_equal(*found)


@pytest.mark.parametrize(
    ("settings", "matmuls_again", "attention_again"),
    [(NONE, 0, 0), (EVERY_2, 2 * 6, 2), (OP, 4 * 3, 0), (FULL, 4 * 6, 4)],
    ids=MODES,
)
def test_operators_run_again_in_backward(settings, matmuls_again, attention_again):
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


def test_every_nth_block_is_the_nth_the_2nth_and_so_on_also_in_a_part_of_the_model():
    stage = build(NONE)
    del stage.layers["0"], stage.layers["1"]  # type: ignore[operator]
    assert apply_ac(stage, BLOCKS, EVERY_2, CPU) == ["layers.3"]
    for option, expected in {"1": BLOCKS, "2": BLOCKS[1::2], "3": ["layers.2"], "5": []}.items():
        settings = ActivationCheckpoint(selective_ac_option=option)
        assert apply_ac(build(NONE), BLOCKS, settings, CPU) == expected


@pytest.mark.slow
def test_weights_are_gathered_no_more_often(pool):
    """A block is gathered once for the backward, in which its recomputation lies."""
    run = replace(RUN, training=full_precision(reshard_after_forward="always"))
    plain = pool(2).run(count_collectives, run)[0]
    assert plain[GATHER, torch.float32] == 2 * (FOUR.n_layers + 2)
    for activations in (FULL, OP):
        assert pool(2).run(count_collectives, replace(run, activations=activations))[0] == plain


def test_the_policy_names_operators_that_exist():
    import torch.nn.attention.varlen

    import titanlite.features.experts.exchange
    import titanlite.models.experts.layer  # noqa: F401  all register operators

    for name in (*MATMULS, *ATTENTION, *OTHERS):
        space, operator, *overload = name.split(".")
        if name != "aten._scaled_mm_v2.default":  # of a later torch
            found = getattr(getattr(torch.ops, space), operator)
            assert kind_of(getattr(found, overload[0]) if overload else found), name
    assert kind_of(torch.ops.aten.bmm.default) == kind_of(torch.ops.aten.abs.default) == ""


class Shelf:
    """Stands for host memory: keeps the tensors that it is sent."""

    device = CPU

    def __init__(self) -> None:
        self.kept: list[Kept] = []

    def send(self, tensor: Tensor) -> Kept:
        self.kept.append(Kept(tensor.clone()))
        return self.kept[-1]

    @property
    def nbytes(self) -> int:
        return sum(kept.tensor.nbytes for kept in self.kept)


class Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.fetched = 0

    def fetch(self) -> Tensor:
        self.fetched += 1
        return self.tensor


def on_shelf(model: nn.Module, blocks: Any = None, least_bytes: int = 0) -> Shelf:
    """Offload the blocks of a model (or the given modules) to a new shelf."""
    shelf = Shelf()
    for block in model.layers.values() if blocks is None else blocks:  # type: ignore[operator,union-attr]
        offload(block, cast(HostMemory, shelf), model, least_bytes=least_bytes)
    return shelf


@pytest.fixture(scope="module")
def plain_gradients() -> dict[str, Tensor]:
    model = build(NONE)
    return gradients(model, model(TOKENS[0]).logsumexp(-1).sum())


@pytest.mark.parametrize("settings", [NONE, EVERY_2, FULL], ids=["none", "every", "full"])
def test_tensors_that_blocks_keep_are_sent_and_nothing_else(settings, plain_gradients):
    model = build(settings)
    inputs = []
    shelf = on_shelf(model)
    for block in model.layers.values():  # type: ignore[operator,union-attr]
        block.register_forward_pre_hook(
            lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
        )
    output = model(TOKENS[0])
    if settings != EVERY_2:
        gc.collect()
        assert [ref.expired() for ref in inputs] == [True] * 4, (
            "the input of a block that is away is free"
        )
    assert_equal(gradients(model, output.logsumexp(-1).sum()), plain_gradients)
    # 8 sequences, where the trace has 4. A tensor is sent once and fetched by each operator that
    # saved it.
    assert shelf.nbytes == 2 * traced(settings).total_bytes
    assert all(kept.fetched for kept in shelf.kept)
    weights = {p.detach().sum().item() for p in model.parameters()}
    assert not [kept.tensor.shape for kept in shelf.kept if kept.tensor.sum().item() in weights], (
        "a weight was sent"
    )
    assert list(model.state_dict()) == list(build(NONE).state_dict())


def test_small_tensors_and_a_cpus_model_stay():
    model = build(FULL)
    shelf = on_shelf(model, least_bytes=8 * 32 * FOUR.dim * 4 + 1)
    model(TOKENS[0]).sum().backward()
    assert shelf.kept == []
    kinds, plain = (
        {type(module) for module in build(settings).modules()}
        for settings in (ActivationCheckpoint(mode="none", offload=True), NONE)
    )
    assert kinds == plain


class Views(nn.Module):
    """Saves parts of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        a, b = y.chunk(2, -1)
        # As many elements as its memory, but it only repeats one column.
        part = y[:, 1:2].expand(8, 32)
        return (a * b).sum() + (part * part).sum()


def test_views_come_back_as_they_were():
    found = []
    for away in (False, True):
        torch.manual_seed(0)
        block = Views()
        shelf = on_shelf(block, [block] if away else [])
        x = torch.randn(8, 16, requires_grad=True)
        found.append({**gradients(block, block(x)), "x": x.grad})
        assert bool(shelf.kept) is away
    assert_equal(*found)


def _sent(world: DistEnv, run: Run) -> tuple[int, int]:
    model, _, rank = build_tiny(world, run)
    shelf = on_shelf(model)
    for batch in micro_batches(run, 0, rank, world.size):
        model(batch.tokens).sum().backward()
    return shelf.nbytes, [p.grad for p in model.parameters()].count(None)


def test_gathered_weights_of_a_sharded_block_stay(pool):
    run = replace(RUN, training=full_precision(reshard_after_forward="always"))
    assert pool(2).run(_sent, run) == [(traced(NONE).total_bytes, 0)] * 2
