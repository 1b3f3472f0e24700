"""Tensor parallelism: it trains as one process does, and weights, activations and collectives are
divided.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.support.compare import LABELS, TOKENS, WARM
from tests.support.harness import Run, build_tiny, micro_batches, stepper
from titanlite.config.sections import Compile
from titanlite.dist import ParallelismError
from titanlite.dist.dist_env import DistEnv
from titanlite.features.async_tp.memory import check_async
from titanlite.models.norms import WholeNorm
from titanlite.parallel.tensor_norm import DividedNorm
from titanlite.step import PlainRunner, ReplicationFactors
from titanlite.validation import validate

RUN = Run(TOKENS, LABELS, WARM, accumulation=2, tensor=2)
EAGER = Compile(components=["model"], backend="aot_eager")
#: All blocks share one graph; before torch 2.13, whose gradients of whole blocks are right, one of
#: each half.
BLOCK_GRAPHS = 1 if torch.__version__ >= "2.13" else 2


def _places(world: DistEnv, run: Run) -> dict[str, tuple[int, ...]]:
    parameters: Any = build_tiny(world, run)[0].named_parameters()
    return {name: tuple(parameter.to_local().shape) for name, parameter in parameters}


def test_every_weight_is_where_it_should_be(pool):
    """Rows or columns by tensor parallelism, then rows by FSDP, on 2 x 2 ranks."""
    block = {
        "attention.wq": (16, 64),
        "attention.wk": (8, 64),
        "attention.wv": (8, 64),
        "attention.wo": (32, 32),
        "feed_forward.w1": (48, 64),
        "feed_forward.w3": (48, 64),
        "feed_forward.w2": (32, 96),
        "attention_norm": (32,),
        "ffn_norm": (32,),
    }
    expected: dict[str, tuple[int, ...]] = {
        f"layers.{i}.{name}.weight": place for i in range(2) for name, place in block.items()
    }
    expected |= {"tok_embeddings.weight": (48, 64), "output.weight": (48, 64)}
    expected |= {"norm.weight": (32,)}
    assert pool(4).run(_places, RUN) == [expected] * 4


def _profile(world: DistEnv, run: Run) -> Counter[str]:
    """Operators of three forward and backward passes: the last one's, and the graphs of all."""
    torch._dynamo.utils.counters.clear()
    model, _, _ = build_tiny(world, run)
    loss = run.builder(world).loss()
    for step in range(3):
        with torch.profiler.profile() as profile:
            loss(model(run.tokens[step]), run.labels[step]).backward()
    counts = Counter(event.name.removeprefix("_c10d_functional::") for event in profile.events())
    counts["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return counts


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("changes", "gathers", "reductions", "graphs"),
    [
        ({}, 0, 2, 0),
        ({"loss_parallel": False}, 1, 0, 0),
        ({"compile": EAGER}, 0, 2, BLOCK_GRAPHS),
    ],
    ids=["plain", "gathered logits", "compiled"],
)
def test_activations_are_gathered_and_scattered_and_not_reduced_as_a_whole(
    pool, changes, gathers, reductions, graphs
):
    """Four of each a block, one each for embedding and head; all-reduces for norms' weights and for
    the loss alone.
    """
    blocks = 2
    norms = 5
    for counts in pool(2).run(_profile, replace(RUN, **changes)):
        assert counts["reduce_scatter_tensor"] == 4 * blocks + 2
        assert counts["all_gather_into_tensor"] == 4 * blocks + 2 + gathers
        # Three numbers for each token: the largest logit, then the sum of exponentials and the
        # label's logit, which a compiled loss sends apart.
        assert counts["c10d::allreduce_"] == norms + reductions
        assert counts["graphs"] == graphs


def _figures(world: DistEnv, run: Run) -> dict[str, Any]:
    mesh = run.mesh(world.size)
    loss = run.builder(world).loss()
    model, _, take = stepper(world, run, max_norm=1e9, layer_norms=True, loss_function=loss)
    data = micro_batches(run, 0, world.rank // mesh.tensor, mesh.dp_degree)
    duplicates = ReplicationFactors(mesh.tensor, mesh.tensor)
    held_out, tokens = validate(model, data, world.device, PlainRunner(model, loss), duplicates)
    assert all(p.grad is None for p in model.parameters())
    result = take(1, lr=0.0)
    assert result.layer_norms is not None
    padding = loss(model(run.tokens[0]), torch.full_like(run.labels[0], -100))
    padding.backward()
    head: Any = model.get_parameter("output.weight").grad
    return {
        "validation": held_out.item(),
        "tokens": tokens.item(),
        "loss": result.loss.item(),
        "norms": {name: norm.item() for name, norm in result.layer_norms.items()},
        "padding": (padding.item(), head.to_local().abs().max().item()),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "loss_parallel"),
    [(2, True), (4, False)],
    ids=["tp 2", "tp 2, fsdp 2, whole logits"],
)
def test_validation_and_norms_by_layer_are_those_of_one_rank(pool, ranks, loss_parallel):
    run = replace(RUN, loss_parallel=loss_parallel)
    alone = pool(1).run(_figures, run.alone())[0]
    assert alone["tokens"] == (LABELS[0] != -100).sum()
    for ours in pool(ranks).run(_figures, run):
        assert ours["tokens"] == alone["tokens"]
        assert ours["validation"] == pytest.approx(alone["validation"], abs=5e-6)
        assert ours["validation"] == pytest.approx(ours["loss"], abs=5e-6)  # the same batches
        assert ours["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert ours["padding"] == (0.0, 0.0)


def test_overlap_needs_gpus_of_one_node_that_reach_each_other(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a // 2 == b // 2)
    check_async(2, "cuda", 4)
    for arguments, message in [
        ((2, "cpu", 2), "needs GPUs that reach each other's memory"),
        ((4, "cuda", 2), "4 ranks of tensor parallelism on one node, and there are 2 on each"),
        ((4, "cuda", 4), "GPU 0 does not reach GPU 2"),
    ]:
        with pytest.raises(ParallelismError, match=message):
            check_async(*arguments)


def divided(world: DistEnv, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    """Output and gradients of a norm over the heads of two ranks, and the same on one."""
    torch.manual_seed(0)
    whole = WholeNorm(32, eps=1e-6)
    nn.init.normal_(whole.weight)
    x = torch.randn(2, 6, 4, 8, dtype=dtype)
    gradient = torch.randn(2, 6, 4, 8, dtype=dtype)
    mine = slice(2 * world.rank, 2 * world.rank + 2)
    part = x[:, :, mine].clone().requires_grad_()
    x.requires_grad_()
    other = deepcopy(whole.to(dtype))
    expected = whole(x)
    expected.backward(gradient)
    parallelize_module(other, world.build_mesh(tp=world.size)["tp"], DividedNorm())
    found = other(part)
    found.backward(gradient[:, :, mine])
    assert isinstance(other.weight.grad, DTensor)
    assert whole.weight.grad is not None and x.grad is not None
    return (
        [found.detach(), part.grad, other.weight.grad.full_tensor()],
        [expected[:, :, mine].detach(), x.grad[:, :, mine], whole.weight.grad],
    )


def test_ranks_that_divide_the_heads_have_one_mean(pool):
    for dtype, within in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        for ours, expected in pool(2).run(divided, dtype):
            torch.testing.assert_close(ours, expected, rtol=within, atol=within)
