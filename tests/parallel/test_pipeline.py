"""A pipeline trains as one rank does: the layers are on other ranks, the numbers are the same."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.checkpoints import assert_equal
from tests.support.compare import LABELS, SEQ, TOKENS, WARM
from tests.support.harness import (
    TINY,
    Run,
    build_tiny,
    initial_weights,
    micro_batches,
    run_stages,
    stepper,
    train,
    weights_of,
)
from tests.support.llamas import assert_near
from tests.support.reference import Curve
from tests.support.watch import GATHER, REDUCE, Wire
from titanlite.dist import ParallelismError
from titanlite.dist.dist_env import DistEnv
from titanlite.features.pipeline.stage_layout import split_stages
from titanlite.features.pipeline.stages import PipelineModel, cut_stages
from titanlite.loss import cross_entropy_sum
from titanlite.models.counts import count_parameters, flops_per_token, pipeline_costs
from titanlite.models.llama import LLAMA3
from titanlite.models.spec import Cost

#: Grouped queries; a block for each of four stages; sequences of very unequal lengths.
ARGS = replace(TINY, n_layers=4)
RUN = Run(TOKENS, LABELS, WARM, args=ARGS, accumulation=2, pipeline=2)
COSTS = pipeline_costs(ARGS, SEQ)


def _placement(world: DistEnv, run: Run) -> tuple[dict[str, torch.Tensor], int, list[str]]:
    """This rank's initial weights, numbers of the optimizer after a step, and names of layers."""
    model, optimizer, take = stepper(world, run, layer_norms=True)
    own = weights_of(model)
    result = take(1, pipeline=run_stages(model, run, world, cross_entropy_sum))
    assert result.layer_norms is not None
    norms = torch.stack(list(result.layer_norms.values()))
    torch.testing.assert_close(norms.norm(), result.grad_norm)
    assert (norms > 0).all()
    held = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.dim())
    return own, held, list(result.layer_norms)


@pytest.mark.parametrize(
    ("schedule", "stages_of"),
    [("1F1B", [[0], [1]]), ("ZBVZeroBubble", [[0, 3], [1, 2]])],
    ids=["1F1B", "ZBV"],
)
def test_each_rank_holds_its_stages_alone_and_starts_as_one_rank_does(pool, schedule, stages_of):
    run = replace(RUN, schedule=schedule)
    whole = pool(1).run(initial_weights, run.alone())[0]
    stages = split_stages(COSTS, 2, schedule).stages
    for numbers, (own, held, layers) in zip(stages_of, pool(2).run(_placement, run), strict=True):
        names = tuple(f"{name}." for stage in numbers for name in stages[stage])
        assert_equal(own, {name: one for name, one in whole.items() if name.startswith(names)})
        assert held == 2 * sum(tensor.numel() for tensor in own.values())  # two moments of AdamW
        assert layers == ["tok_embeddings", *(f"layers.{i}" for i in range(4)), "norm", "output"]


def _communication(world: DistEnv, run: Run) -> Counter[str]:
    """The collectives of a second step, by name."""
    model, optimizer, rank = build_tiny(world, run)
    pipeline = run_stages(model, run, world, cross_entropy_sum)
    assert pipeline is not None
    data = micro_batches(run, 0, rank, run.mesh(world.size).dp_degree)
    seen: Counter[str] = Counter()
    for _ in range(2):  # the first sets FSDP up
        seen.clear()
        with Wire(lambda sent: seen.update([sent.name])):
            pipeline.forward_backward(data, torch.tensor(100))
        optimizer.zero_grad()
    return seen


@pytest.mark.slow
def test_weights_are_gathered_and_gradients_reduced_once_for_all_micro_batches(pool):
    """Groups: two blocks and the embedding, or norm with head. Four micro-batches."""
    seen = pool(4).run(_communication, RUN)
    assert [(rank[GATHER], rank[REDUCE]) for rank in seen] == [(3, 3)] * 4
    assert [(rank["send"], rank["recv"]) for rank in seen] == [(4, 4)] * 4


def _train_without_views(world: DistEnv, run: Run) -> Curve:
    """FSDP warns of stages that return a view: the next operation in place would bypass its
    hooks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*returned a view tensor")
        return train(world, run)


@pytest.mark.slow
def test_a_stage_may_end_with_the_norm_where_ranks_share_products(pool):
    run = replace(RUN, rates=WARM[:2], split_points=("output",), tensor=2, loss_chunks=3)
    plain = pool(1).run(train, replace(run.alone(), loss_chunks=1))[0]
    ours = pool(4).run(_train_without_views, run)[0]
    assert ours.losses == pytest.approx(plain.losses, abs=5e-6)
    assert_near(ours.gradients, plain.gradients, 1e-6)


@pytest.mark.parametrize(
    ("args", "stages", "blocks"),
    [
        (LLAMA3.flavors["8B"], 4, [7, 9, 9, 7]),
        (LLAMA3.flavors["3.1-405B"], 16, [7, *[8] * 14, 7]),
        (ARGS, 4, [1, 1, 1, 1]),
    ],
    ids=["8B on 4", "405B on 16", "a block each"],
)
def test_stages_cost_as_evenly_as_blocks_allow(args, stages, blocks):
    """The head of Llama 3 8B costs 1.8 blocks of FLOPs, that of 405B 0.7; the embedding costs
    memory alone.
    """
    costs = pipeline_costs(args, 8192)
    layout = split_stages(costs, stages, "1F1B")
    assert [name for stage in layout.stages for name in stage] == list(costs)
    assert [sum(name.startswith("layers.") for name in stage) for stage in layout.stages] == blocks


def test_costs_are_those_of_the_whole_model():
    args = LLAMA3.flavors["3.1-70B"]
    costs = pipeline_costs(args, 8192).values()
    assert sum(cost.parameters for cost in costs) == count_parameters(args) == 70_553_706_496
    assert sum(cost.flops for cost in costs) == flops_per_token(args, 8192)


def test_stages_lie_on_ranks_as_the_schedule_runs_them():
    points = ("layers.1", "layers.2", "layers.3")
    assert split_stages(COSTS, 2, "LoopedBFS", points).ranks == (0, 1, 0, 1)
    layout = split_stages(COSTS, 2, "ZBVZeroBubble", points)
    assert layout.ranks == (0, 1, 1, 0)
    assert layout.on(0) == [0, 3]
    assert layout.stages[3] == ("layers.3", "norm", "output")
    assert split_stages(COSTS, 3, "1F1B", ("norm", "output")).stages[1:] == (("norm",), ("output",))


class Nested(nn.Module):
    """Not made for a pipeline: a list of blocks, and a scale that is no piece of its own."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.scale = nn.Parameter(torch.ones(4)) if scaled else None
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)


def _cut(world: DistEnv, scaled: bool) -> str:
    names = ["table", *(f"blocks.{i}" for i in range(4)), "norm", "head"]
    layout = split_stages({name: Cost(1, 1) for name in names}, 2, "Interleaved1F1B")
    mesh = world.build_mesh(pp=2)
    try:
        PipelineModel(cut_stages(lambda: Nested(scaled), layout, world.rank), layout, mesh)
    except ParallelismError as error:
        return str(error)
    return ""


def test_a_stage_whose_weights_would_not_be_trained_is_refused(pool):
    for message in pool(2).run(_cut, True):
        assert message == "no stage of the pipeline has scale: pipeline_costs must name its module"
    for rank, message in enumerate(pool(2).run(_cut, False)):
        assert message == (
            f"two stages of a rank share the module around blocks.{2 + rank}.weight, "
            f"blocks.{2 + rank}.bias: make it an nn.ModuleDict"
        )


def test_a_model_that_cannot_be_cut_is_refused():
    with pytest.raises(ParallelismError, match="a stage of norm alone has no parameters"):
        split_stages({**COSTS, "norm": Cost(0, 0)}, 3, "1F1B", ("norm", "output"))
    with pytest.raises(ParallelismError, match="4 blocks cannot be divided into 8 stages"):
        split_stages(COSTS, 4, "Interleaved1F1B")
