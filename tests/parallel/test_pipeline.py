"""A pipeline trains as one rank does: the layers are on other ranks, the numbers are the same."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import Pools, RankFailure
from tests.refusals import refusal
from tests.steps import train_step
from tests.training.compare import LABELS, SEQ, TOKENS, WARM, relative
from tests.training.harness import (
    TINY,
    Run,
    build_tiny,
    full,
    initial_weights,
    micro_batches,
    run_stages,
    train,
)
from tests.training.reference import Curve
from tests.training.test_run import _run
from titanlite.guard import FiniteGuard
from titanlite.loss import cross_entropy_sum
from titanlite.models import SHAPES, LlamaArgs, count_parameters, flops_per_token
from titanlite.models.llama.plan import pipeline_costs
from titanlite.parallel.dist_env import DistEnv
from titanlite.step import ReplicationFactors

#: Grouped queries; a block for each of four stages; sequences of very unequal lengths.
ARGS = replace(TINY, n_layers=4)
#: Weights stay gathered, as the config has it for a pipeline.
FULL = ShardPlan("float32", reshard_after_forward=False)
RUN = Run(TOKENS, LABELS, WARM, args=ARGS, shard=FULL, accumulation=2, pipeline=2)


soak = pytest.mark.soak


def _placement(world: DistEnv, run: Run) -> tuple[dict[str, torch.Tensor], int, int, list[str]]:
    """This rank's initial weights, their bytes, those of the optimizer after a step, and what it names layers."""
    model, optimizer, rank = build_tiny(world, run)
    own = {name: full(parameter) for name, parameter in model.named_parameters()}
    pipeline = run_stages(model, run, world, cross_entropy_sum)
    data = micro_batches(run, 0, rank, run.mesh(world.size).dp_degree)
    guard = FiniteGuard(world.device)
    result = train_step(
        model,
        optimizer,
        data,
        step=1,
        lr=1e-3,
        max_norm=1.0,
        guard=guard,
        factors=ReplicationFactors(run.pipeline, 1),
        pipeline=pipeline,
        layer_norms=True,
    )
    assert result.layer_norms is not None
    torch.testing.assert_close(torch.stack(list(result.layer_norms.values())).norm(), result.grad_norm)
    assert all(norm > 0 for norm in result.layer_norms.values())
    held = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.dim())
    return own, sum(t.numel() for t in own.values()), held, list(result.layer_norms)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_each_rank_holds_its_stages_alone_and_starts_as_one_rank_does(pool: Pools, schedule: str) -> None:
    run = replace(RUN, schedule=schedule)
    whole = pool(1).run(initial_weights, run.alone())[0]
    costs = pipeline_costs(ARGS, SEQ)
    stages = divide(costs, run.pipeline_plan(), 2).stages
    stages_of = {0: [0], 1: [1]} if schedule == "1F1B" else {0: [0, 3], 1: [1, 2]}
    ranks = pool(2).run(_placement, run)
    for rank, (own, size, held, layers) in enumerate(ranks):
        names = [name for stage in stages_of[rank] for name in stages[stage]]
        assert own.keys() == {n for n in whole if any(n.startswith(f"{name}.") for name in names)}
        assert all(torch.equal(tensor, whole[name]) for name, tensor in own.items())
        assert size == sum(costs[name].parameters for name in names)
        assert held == 2 * size  # two moments of AdamW
        assert layers == ["tok_embeddings", *(f"layers.{i}" for i in range(4)), "norm", "output"]
    assert ranks[0][0].keys() | ranks[1][0].keys() == whole.keys()


class _Wire(TorchDispatchMode):
    """Counts what c10d sends, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def _communication(world: DistEnv, run: Run) -> Counter[str]:
    """What a second step sends, by name."""
    model, optimizer, rank = build_tiny(world, run)
    pipeline = run_stages(model, run, world, cross_entropy_sum)
    assert pipeline is not None
    data = micro_batches(run, 0, rank, run.mesh(world.size).dp_degree)
    pipeline.forward_backward(data, torch.tensor(100))
    optimizer.zero_grad()
    with _Wire() as wire:
        pipeline.forward_backward(data, torch.tensor(100))
    return wire.seen


@pytest.mark.parametrize(
    "schedule", [pytest.param("1F1B", marks=pytest.mark.slow), pytest.param("ZBVZeroBubble", marks=soak)]
)
def test_weights_are_gathered_and_gradients_reduced_once_for_all_micro_batches(pool: Pools, schedule: str) -> None:
    """Units: four blocks, the embedding, norm with head. Four micro-batches; in a V ranks meet twice on the way."""
    run = replace(RUN, schedule=schedule)
    seen = pool(4).run(_communication, run)
    units, meetings = ([3, 3, 3, 3], 1) if schedule == "1F1B" else ([4, 4, 2, 2], 2)
    assert [(rank["_allgather_base_"], rank["_reduce_scatter_base_"]) for rank in seen] == [(n, n) for n in units]
    assert [(rank["send"], rank["recv_"]) for rank in seen] == [(4 * meetings, 4 * meetings)] * 4
    if schedule == "1F1B":
        again = replace(run, shard=ShardPlan("float32", reshard_after_forward=True))
        gathers = [rank["_allgather_base_"] for rank in pool(4).run(_communication, again)]
        assert min(gathers) > 4 * 3


def _train_without_views(world: DistEnv, run: Run) -> Curve:
    """FSDP warns of stages that give a view, which the next operation in place would take from under its hooks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*returned a view tensor")
        return train(world, run)


@pytest.mark.parametrize(
    ("schedule", "points", "chunks"),
    [
        ("1F1B", ("output",), 1),
        pytest.param("1F1B", ("output",), 3, marks=pytest.mark.slow),
        pytest.param("Interleaved1F1B", ("layers.2", "norm", "output"), 1, marks=pytest.mark.slow),
    ],
    ids=["norm before the cut", "loss in chunks", "norm by itself"],
)
def test_a_stage_may_end_with_the_norm_where_ranks_share_products(
    pool: Pools, schedule: str, points: tuple[str, ...], chunks: int
) -> None:
    run = replace(RUN, rates=WARM[:2], schedule=schedule, split_points=points, tensor=2, loss_chunks=chunks)
    plain = pool(1).run(train, replace(run.alone(), loss_chunks=1))[0]
    ours = pool(4).run(_train_without_views, run)[0]
    assert ours.losses == pytest.approx(plain.losses, abs=5e-6)
    assert ours.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert relative(ours.gradients[name], gradient) < 1e-6, name


def test_sharding_that_loses_gradients_is_refused() -> None:
    plan = PipelinePlan("ZBVZeroBubble", 4)
    assert keep_gathered(ShardPlan(), plan).reshard_after_forward is False
    with pytest.raises(ValueError, match="ZBVZeroBubble needs"):
        keep_gathered(ShardPlan(reshard_after_forward=True), plan)
    assert keep_gathered(ShardPlan(reshard_after_forward=True), PipelinePlan("1F1B", 2)).reshard_after_forward is True


@soak
def test_what_the_config_refuses_for_zero_bubble_does_fail() -> None:
    """The day that one of them works the refusal can go."""
    own = Pools()  # its ranks are of no use afterwards
    split = replace(RUN, schedule="InterleavedZeroBubble", rates=WARM[:1])
    try:
        by_operation = replace(split, activations=ActivationCheckpointPlan("op"))
        with pytest.raises(RankFailure, match="backward an extra time"):
            own(2).run(train, by_operation, timeout=60)
        compiled = replace(split, compile=CompilePlan(True, False, "aot_eager"))
        own(2).run(train, replace(compiled, schedule="Interleaved1F1B"))
        # A graph whose backward may reuse what the forward left, since it ran once.
        with pytest.raises(RankFailure, match="retain_graph=False"):
            own(2).run(train, compiled, timeout=60)
    finally:
        own.close()


# Where the model is cut

COSTS = pipeline_costs(ARGS, SEQ)


def _blocks(args: LlamaArgs, stages: int, seq_len: int = 8192) -> list[int]:
    layout = divide(pipeline_costs(args, seq_len), PipelinePlan("1F1B", stages), stages)
    assert [name for stage in layout.stages for name in stage] == list(pipeline_costs(args, seq_len))
    return [sum(name.startswith("layers.") for name in stage) for stage in layout.stages]


def test_stages_cost_as_evenly_as_blocks_allow() -> None:
    """The head of Llama 3 8B costs 1.8 blocks of FLOPs, that of 405B 0.7; the embedding costs memory alone."""
    assert _blocks(SHAPES["llama3"]["8B"], 2) == [17, 15]
    assert _blocks(SHAPES["llama3"]["8B"], 4) == [7, 9, 9, 7]
    assert _blocks(SHAPES["llama3"]["3.1-405B"], 16) == [7, *[8] * 14, 7]
    assert _blocks(ARGS, 4) == [1, 1, 1, 1]


def test_costs_are_those_of_the_whole_model() -> None:
    args = SHAPES["llama3"]["3.1-70B"]
    costs = pipeline_costs(args, 8192).values()
    assert sum(cost.parameters for cost in costs) == count_parameters(args) == 70_553_706_496
    assert sum(cost.flops for cost in costs) == flops_per_token(args, 8192)


def test_a_stage_without_parameters_is_refused() -> None:
    costs = pipeline_costs(replace(ARGS, norm_type="np_layernorm"), SEQ)
    with pytest.raises(SplitError, match="a stage of norm alone has no parameters"):
        divide(costs, PipelinePlan("1F1B", 3, ("norm", "output")), 3)
    assert divide(COSTS, PipelinePlan("1F1B", 3, ("norm", "output")), 3).stages[1:] == (("norm",), ("output",))


def test_stages_lie_on_ranks_as_the_schedule_runs_them() -> None:
    points = ("layers.1", "layers.2", "layers.3")
    assert divide(COSTS, PipelinePlan("LoopedBFS", 4, points), 2).ranks == (0, 1, 0, 1)
    layout = divide(COSTS, PipelinePlan("ZBVZeroBubble", 4, points), 2)
    assert layout.ranks == (0, 1, 1, 0) and layout.on(0) == [0, 3]
    assert layout.stages[3] == ("layers.3", "norm", "output")


# What the config refuses

KEY = "experimental.pipeline_parallel_"
PP = f"--{KEY}degree"
#: flags, ranks, the key to blame, and what is said of it
REFUSED = {
    "unknown": ([f"{PP}=2", f"--{KEY}schedule=F1B"], 2, "schedule", 'no schedule "F1B"', "there are GPipe, 1F1B, Lo"),
    "unknown and unused": ([f"--{KEY}schedule=F1B"], 2, "schedule", 'no schedule "F1B"', "nearest: 1F1B"),
    "too many stages": (
        [f"{PP}=4", f"--{KEY}schedule=Interleaved1F1B"],
        4,
        "degree",
        "6 blocks cannot be divided into 8 stages",
        "take a smaller degree, or a schedule with one stage per rank",
    ),
    "more stages than blocks": (
        [f"{PP}=8", "--training.batch_size=8"],
        8,
        "degree",
        "6 blocks cannot",
        "smaller degree",
    ),
    "no module": ([f"{PP}=2", f'--{KEY}split_points=["layers.9"]'], 2, "split_points", "'layers.9'", "layers.0 to "),
    "order": (
        [f"{PP}=4", f'--{KEY}split_points=["layers.3","layers.2","norm"]'],
        4,
        "split_points",
        "layers.2 comes after layers.3",
        "in order",
    ),
    "first": ([f"{PP}=2", f'--{KEY}split_points=["tok_embeddings"]'], 2, "split_points", "by itself", "the others"),
    "count": (
        [f"{PP}=2", f'--{KEY}split_points=["layers.1","layers.2"]'],
        2,
        "split_points",
        '2 split points make 3 stages, but "1F1B" on 2 pipeline ranks needs one stage per rank: 2 stages, 1 '
        "split points",
        "give as many",
    ),
    "count of v": (
        [f"{PP}=2", f'--{KEY}split_points=["layers.1"]', f"--{KEY}schedule=ZBVZeroBubble"],
        2,
        "split_points",
        "needs two stages per rank: 4 stages",
        "give as many",
    ),
    "indivisible": (
        [f"{PP}=2", f"--{KEY}microbatches=3"],
        2,
        "microbatches",
        "is 3 which does not divide training.batch_size = 4",
        "these divide it: 1, 2, 4",
    ),
    "indivisible default": (
        [f"{PP}=3"],
        3,
        "microbatches",
        "is 3, the pipeline degree, which does not divide",
        "multiple of 3",
    ),
    "too few": ([f"{PP}=2", f"--{KEY}microbatches=1"], 2, "microbatches", "needs one for each of the 2", '"GPipe"'),
    "rounds": (
        [f"{PP}=2", f"--{KEY}microbatches=5", "--training.batch_size=5", f"--{KEY}schedule=Interleaved1F1B"],
        2,
        "microbatches",
        "in 2 rounds of equal size",
        "multiple of 2",
    ),
    "tied": ([f"{PP}=2", "--model.overrides.tied=true"], 2, "degree", "share one weight", "tied = false"),
    "compiled": (
        [f"{PP}=2", f"--{KEY}schedule=ZBVZeroBubble", "--training.compile"],
        2,
        "schedule",
        "would run twice or fail",
        "training.compile = false",
    ),
    "recomputed": (
        [
            f"{PP}=2",
            f"--{KEY}schedule=InterleavedZeroBubble",
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ],
        2,
        "schedule",
        "run again only once",
        '"full"',
    ),
    "gathered again": (
        [f"{PP}=2", f"--{KEY}schedule=ZBVZeroBubble", "--training.reshard_after_forward=always"],
        2,
        "schedule",
        "would get no gradient",
        '"default"',
    ),
    "every": ([f"{PP}=2", "--training.gradient_sync=every"], 2, "", "reduces gradients once", '"last"'),
}


@pytest.mark.parametrize(("flags", "ranks", "key", "said", "advice"), REFUSED.values(), ids=REFUSED)
def test_a_pipeline_that_cannot_be_is_one_error(flags: list[str], ranks: int, key: str, said: str, advice: str) -> None:
    problem = refusal(["--job.config_file=debug_model.toml", *flags], ranks)
    assert problem.key == (f"{KEY}{key}" if key else "training.gradient_sync")
    assert said in problem.message
    assert advice in problem.message + problem.hint


def test_a_config_says_what_follows_from_the_degree() -> None:
    plans = load_plans("debug_model.toml", 4, [f"{PP}=2", f"--{KEY}schedule=zbvzerobubble"])
    assert plans.pipeline == PipelinePlan("ZBVZeroBubble", 4, (), 2)
    assert plans.shard.reshard_after_forward is False and not plans.warnings
    assert any("pipeline micro-batches per step = 2: 2 of each batch of 4" in note for note in plans.notes)
    again = load_plans("debug_model.toml", 4, [f"{PP}=2", "--training.reshard_after_forward=always"])
    assert again.shard.reshard_after_forward is True
    assert "gathers the weights again for each pipeline micro-batch" in again.warnings[0]
    parts = '[["tok_embeddings","layers.0"],["layers.1","layers.2","layers.3","layers.4","layers.5","norm","output"]]'
    named = load_plans("debug_model.toml", 2, [f"{PP}=2", f"--parallelism.module_fqns_per_model_part={parts}"])
    assert named.pipeline.split_points == ("layers.1",)


# Whole runs

FLAGS = [
    "--model.overrides.n_layers=4",
    "--training.batch_size=2",
    "--training.steps=6",
    "--validation.enable",
    "--validation.freq=3",
    "--validation.batch_size=3",
    "--validation.seq_len=24",
    "--checkpoint.interval=2",
]


def _numbers(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Every loss that a run told, of training and of validation."""
    return [(row["step"], value) for row in rows for key, value in row.items() if key in ("loss", "validation_loss")]


@soak
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_run_goes_from_two_ranks_to_one_and_back(pool: Pools, tmp_path: Path, schedule: str) -> None:
    """Losses, validation and optimizer state: step 3 to 6 depend on the moments that a checkpoint holds."""
    flags = [*FLAGS, f"{PP}=2", f"--{KEY}schedule={schedule}"]
    alone = pool(1).run(_run, str(tmp_path / "alone"), *FLAGS)[0]
    moving = str(tmp_path / "moving")
    first = pool(2).run(_run, moving, *flags, "--training.steps=2")[0]
    pool(1).run(_run, moving, *FLAGS, "--training.steps=4")
    last = pool(2).run(_run, moving, *flags)[0]
    straight = pool(2).run(_run, str(tmp_path / "straight"), *flags)[0]
    expected = _numbers(alone["rows"])
    assert [step for step, _ in expected] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert len({value for _, value in expected}) == 8
    assert _numbers(straight["rows"]) == [(step, pytest.approx(value, abs=5e-6)) for step, value in expected]
    trained = [(r["step"], r["loss"]) for r in last["rows"] if "loss" in r]
    assert trained == [(r["step"], pytest.approx(r["loss"], abs=5e-6)) for r in alone["rows"] if "loss" in r]
    for rows in (alone["rows"], straight["rows"]):
        assert [r["validation_tokens"] for r in rows if "validation_tokens" in r] == [2 * 3 * 24] * 2
    shown = next(line for line in first["said"] if line.startswith("parameters"))
    assert shown in alone["said"], "the report counts the whole model"
    (stages,) = [line for line in first["said"] if line.startswith("pipeline ")]
    assert f"{schedule}, {2 if schedule == '1F1B' else 4} stages" in stages and "tok_embeddings to layers." in stages


def test_a_non_finite_loss_is_told_with_where_to_look(pool: Pools, tmp_path: Path) -> None:
    flags = [*FLAGS, f"{PP}=2", "--optimizer.lr=1e30", "--training.max_norm=1e30", "--training.warmup_steps=0"]
    told = {said["error"] for said in pool(2).run(_run, str(tmp_path), *flags)}
    (message,) = told
    assert message.startswith("step 2: ") and "resume with experimental.pipeline_parallel_degree = 1" in message
