"""The schedules of a pipeline, and what each needs of the config. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from titanlite.config.advice import divisors
from titanlite.config.errors import Problem, nearest
from titanlite.config.loaded import LoadedConfig
from titanlite.config.plans import MeshPlan, PipelinePlan
from titanlite.config.sections import Config
from titanlite.config.toml import quote

_KEY = "experimental.pipeline_parallel_"


@dataclass(frozen=True)
class Schedule:
    """One schedule of `torch.distributed.pipelining`."""

    #: "one": a stage per rank. "loop": several, stage i on rank i modulo their number. "v": two, the second half of the
    #: stages in reverse order of ranks.
    stages: Literal["one", "loop", "v"]
    #: Splits each backward into one for inputs and one for weights, which fills the time that ranks would wait.
    splits_backward: bool = False


SCHEDULES = {
    "GPipe": Schedule("one"),
    "1F1B": Schedule("one"),
    "LoopedBFS": Schedule("loop"),
    "Interleaved1F1B": Schedule("loop"),
    "InterleavedZeroBubble": Schedule("loop", splits_backward=True),
    "ZBVZeroBubble": Schedule("v", splits_backward=True),
}


def find_schedule(name: str) -> str | None:
    """The schedule of that name, in any case of letters."""
    return next((known for known in SCHEDULES if known.lower() == name.lower()), None)


def stage_count(schedule: str, degree: int, split_points: Sequence[str]) -> int:
    """Stages of the whole pipeline: as many as the split points make, else one per rank, or two."""
    if split_points:
        return len(split_points) + 1
    return degree * (1 if SCHEDULES[schedule].stages == "one" else 2)


def pipeline_plan(config: LoadedConfig, mesh: MeshPlan) -> PipelinePlan:
    """The plan of a config that has no `pipeline_problems`; of one that has some, a guess."""
    e = config.sections.experimental
    schedule = find_schedule(e.pipeline_parallel_schedule) or "1F1B"
    return PipelinePlan(
        schedule=schedule,
        stages=stage_count(schedule, mesh.pipeline, e.pipeline_parallel_split_points),
        split_points=tuple(e.pipeline_parallel_split_points),
        microbatches=e.pipeline_parallel_microbatches or mesh.pipeline,
    )


def pipeline_problems(config: LoadedConfig, mesh: MeshPlan, accumulation: int) -> list[Problem]:
    """What stops a pipeline, as far as that does not depend on the model's modules.

    accumulation: micro-batches of `training.batch_size` sequences per step and rank.
    """
    d, degree = config.sections, mesh.pipeline
    found: list[Problem] = []

    def problem(key: str, message: str, hint: str, *others: str) -> None:
        found.append(Problem(config.place(key), key, message, hint, (key, f"{_KEY}degree", *others)))

    schedule = find_schedule(d.experimental.pipeline_parallel_schedule)
    if schedule is None:
        name = d.experimental.pipeline_parallel_schedule
        close = f"nearest: {', '.join(names)}; " if (names := nearest(name, SCHEDULES, 3)) else ""
        problem(f"{_KEY}schedule", f"no schedule {quote(name)}", f"{close}there are {', '.join(SCHEDULES)}")
    if degree == 1:
        return found
    if schedule is not None:
        _stages(d, schedule, degree, problem)
        _microbatches(d, schedule, degree, accumulation, problem)
        if SCHEDULES[schedule].splits_backward:
            _split_backward(d, schedule, problem)
    if d.training.gradient_sync == "every":
        problem(
            "training.gradient_sync",
            'is "every", but a pipeline reduces gradients once, after the last micro-batch',
            'set it to "last"',
        )
    return found


def _split_backward(d: Config, schedule: str, problem: Callable[..., None]) -> None:
    """What cannot run a backward for inputs and one for weights, one after the other."""
    key = f"{_KEY}schedule"
    why = f"{quote(schedule)} splits each backward into one for inputs and one for weights, and "
    whole = '"1F1B" and "Interleaved1F1B" do not split it'
    if d.training.compile and "model" in d.compile.components:
        problem(
            key,
            f"{why}what training.compile makes of a block has one backward, which would run twice or fail",
            f'{whole}; or set training.compile = false, or compile.components = ["loss"]',
            "training.compile",
            "compile.components",
        )
    if d.activation_checkpoint.mode == "selective" and d.activation_checkpoint.selective_ac_option == "op":
        problem(
            key,
            f'{why}activation_checkpoint.selective_ac_option = "op" lets a block be run again only once',
            f'{whole}; or set activation_checkpoint.mode = "full" or "none"',
            "activation_checkpoint.mode",
            "activation_checkpoint.selective_ac_option",
        )
    if d.float8.enable_float8_linear:
        problem(
            key,
            f"{why}a float8 linear's gradients come from one function, which would run twice",
            f"{whole}; or set float8.enable_float8_linear = false",
            "float8.enable_float8_linear",
        )
    if d.training.reshard_after_forward not in ("default", "never"):
        problem(
            key,
            f"{why}weights that are gathered anew in between (training.reshard_after_forward = "
            f"{quote(d.training.reshard_after_forward)}) would get no gradient",
            f'{whole}; or set training.reshard_after_forward = "default"',
            "training.reshard_after_forward",
        )


def _stages(d: Config, schedule: str, degree: int, problem: Callable[..., None]) -> None:
    points = d.experimental.pipeline_parallel_split_points
    if not points:
        return
    kind, stages = SCHEDULES[schedule].stages, len(points) + 1
    fits = {"one": stages == degree, "loop": stages % degree == 0 and stages > degree, "v": stages == 2 * degree}[kind]
    if fits:
        return
    wanted = {
        "one": f"one stage per rank: {degree} stages, {degree - 1} split points",
        "loop": f"two or more stages per rank, as {2 * degree} stages by {2 * degree - 1} split points",
        "v": f"two stages per rank: {2 * degree} stages, {2 * degree - 1} split points",
    }[kind]
    problem(
        f"{_KEY}split_points",
        f"{len(points)} split points make {stages} stages, but {quote(schedule)} on {degree} pipeline ranks needs "
        f"{wanted}",
        "give as many, or none: then titanlite divides the model evenly",
        f"{_KEY}schedule",
    )


def _microbatches(d: Config, schedule: str, degree: int, accumulation: int, problem: Callable[..., None]) -> None:
    given = d.experimental.pipeline_parallel_microbatches
    pieces, size = given or degree, d.training.batch_size
    others = ("training.batch_size", "training.global_batch_size", f"{_KEY}schedule")
    key = f"{_KEY}microbatches"
    said = f"is {pieces}" if given else f"is {pieces}, the pipeline degree,"
    if size % pieces:
        fitting = ", ".join(map(str, divisors(size)))
        problem(
            key,
            f"{said} which does not divide training.batch_size = {size}",
            f"these divide it: {fitting}; or set training.batch_size to a multiple of {pieces}",
            *others,
        )
        return
    total = pieces * accumulation
    number = f"{total} micro-batches per step ({pieces} * accumulation {accumulation})"
    if schedule == "1F1B" and total < degree:
        problem(
            key,
            f"{said} which makes {number}, and 1F1B needs one for each of the {degree} stages at least",
            f'give {degree} or more, or take the schedule "GPipe"',
            *others,
        )
    rounds = max(1, total // degree)
    if schedule.startswith("Interleaved") and total % rounds:
        problem(
            key,
            f"{said} which makes {number}; {schedule} runs them in {rounds} rounds of equal size over {degree} ranks",
            f"give a multiple of {degree}",
            *others,
        )
