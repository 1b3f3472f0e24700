"""Pipeline parallelism (PP): ranks that hold some of the layers each.

    checks.py   other keys, ranks, model
    split.py    where a model is cut                    stages.py   the stages of a rank as a model
    runner.py   … run by a schedule                     order.py    the order of a rank's work
    plan_memory.py   … as events, for the plan of memory

The keys are `experimental.pipeline_parallel_*`. Files that need torch are imported where they are
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace as replace_fields

from titanlite.config.errors import Problem
from titanlite.config.notes import Note, Weight
from titanlite.config.toml import quote
from titanlite.dist import ParallelismError
from titanlite.features.pipeline import checks
from titanlite.features.pipeline.stage_layout import StageLayout, split_stages, stage_count
from titanlite.parallel import needs_torch, offered
from titanlite.parallel.schedules import SCHEDULES, find_schedule
from titanlite.run.config import PipelineSizes
from titanlite.run.features import Feature, Row

if TYPE_CHECKING:
    from torch import nn

    from titanlite.config.sections import Config
    from titanlite.features.pipeline.runner import Pipeline
    from titanlite.features.pipeline.stages import PipelineModel
    from titanlite.loss import LossFunction
    from titanlite.models.spec import ModelSpec
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.plan.rank_sizes import RankSizes
    from titanlite.plan.step_sizes import StepSizes
    from titanlite.run.config import MeshSizes, RunConfig


class PipelineParallel(Feature):
    """A pipeline of more than one rank."""

    key = checks.DEGREE
    model_field = "pipeline_costs"

    def __init__(self, config: Config) -> None:
        self.section = config.experimental
        self.degree = self.section.pipeline_parallel_degree

    @property
    def schedule(self) -> str:
        """A name of `SCHEDULES`. Raises ParallelismError for any other."""
        given = self.section.pipeline_parallel_schedule
        schedule = find_schedule(given)
        if schedule is None:
            known = ", ".join(SCHEDULES)
            raise ParallelismError(f"no pipeline schedule {given!r}; there are {known}")
        return schedule

    @property
    def microbatches(self) -> int:
        """Pieces of each micro-batch that go through the pipeline one by one."""
        return self.section.pipeline_parallel_microbatches or self.degree

    def layout(self, spec: ModelSpec, args: Any, seq_len: int) -> StageLayout:
        """Return where a model is cut; costs depend on `seq_len`. Raises ParallelismError."""
        costs = offered(spec, "pipeline_costs")(args, seq_len)
        points = self.section.pipeline_parallel_split_points
        return split_stages(costs, self.degree, self.schedule, points)

    # Before the ranks start

    def cut(self, d: Config, mesh: MeshSizes) -> tuple[Config, PipelineSizes, list[Note]]:
        """Return the sections of a run, how it is cut, and what a user should know.

        The sections have the schedule's exact name, the number of pieces, and the default of
        training.reshard_after_forward. Nothing is checked here.
        """
        schedule = find_schedule(self.section.pipeline_parallel_schedule) or "1F1B"
        points = self.section.pipeline_parallel_split_points
        experimental = replace_fields(
            self.section,
            pipeline_parallel_schedule=schedule,
            pipeline_parallel_microbatches=self.microbatches,
        )
        training = d.training
        reshard = training.reshard_after_forward
        if reshard == "default":
            training = replace_fields(training, reshard_after_forward="never")
        notes = []
        if mesh.weight_shards > 1 and reshard == "default":
            text = (
                "weights stay gathered for the whole step: each pipeline micro-batch would gather "
                "them again"
            )
            notes.append(Note(Weight.SPEED, text))
        elif mesh.weight_shards > 1 and reshard != "never":
            text = (
                f"training.reshard_after_forward = {quote(reshard)} gathers the weights again for "
                "each pipeline micro-batch"
            )
            notes.append(Note(Weight.SPEED, text, warns=True))
        sections = replace_fields(d, experimental=experimental, training=training)
        sizes = PipelineSizes(stage_count(schedule, mesh.pipeline, points), self.microbatches)
        return sections, sizes, notes

    def problems(self, d: Config, run: RunConfig) -> Iterable[Problem]:
        return checks.rank_problems(d, run)

    def microbatch_problems(self, run: RunConfig) -> Iterable[Problem]:
        return checks.microbatch_problems(run)

    def model_problems(self, run: RunConfig, args: Any) -> Iterable[Problem]:
        return checks.model_problems(run, args)

    # The model: `titanlite.parallel.parallelize` calls these

    def build(
        self, builder: ModelBuilder, divide: Callable[[nn.Module], nn.Module]
    ) -> PipelineModel:
        """Return this rank's stages as one model. divide: applies all other features to a stage."""
        from titanlite.features.pipeline.stages import PipelineModel, cut_stages

        if SCHEDULES[self.schedule].splits_backward:
            needs_torch("2.13", f"the schedule {self.schedule}")
        layout = self.layout(builder.spec, builder.args, builder.args.max_seq_len)
        stages = cut_stages(builder.whole, layout, builder.mesh.get_local_rank("pp"))
        parts = {number: divide(stage) for number, stage in stages.items()}
        return PipelineModel(parts, layout, builder.mesh)

    def runner(self, builder: ModelBuilder, model: nn.Module, loss: LossFunction) -> Pipeline:
        from titanlite.features.pipeline.runner import Pipeline
        from titanlite.features.pipeline.stages import PipelineModel

        stages = cast(PipelineModel, model)
        return Pipeline(builder, stages, self.schedule, self.microbatches, loss)

    # The start report

    def report_rows(self, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        layout = cast("PipelineModel", model).layout
        parts = []
        for names, rank in zip(layout.stages, layout.ranks, strict=True):
            shown = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
            parts.append(f"{shown} on {rank}")
        schedule = self.section.pipeline_parallel_schedule
        text = f"{schedule}, {len(parts)} stages, by pipeline rank: {', '.join(parts)}"
        yield "pipeline", text

    # The plan

    def plan_memory(self, sizes: RankSizes) -> None:
        from titanlite.features.pipeline.plan_memory import pipeline_events

        layout = self.layout(sizes.run.spec, sizes.args, sizes.args.max_seq_len)
        sizes.stages = [list(layout.stages[index]) for index in layout.on(sizes.pipeline_rank)]
        sizes.work = pipeline_events

    def plan_speed(self, step: StepSizes) -> None:
        rounds = max(step.run.pipeline.stages // self.degree, 1)
        halves = 3 if SCHEDULES[self.schedule].splits_backward else 1
        step.idle = (self.degree - 1) / rounds / halves
        layout = self.layout(step.spec, step.args, step.run.batch.seq_len)
        costs = dict(layout.costs)
        stages = [sum(costs[name].flops for name in stage) for stage in layout.stages]
        flops = []
        for rank in range(self.degree):
            flops.append(sum(stages[stage] for stage in layout.on(rank)))
        step.stage_share = max(flops) / sum(flops)
