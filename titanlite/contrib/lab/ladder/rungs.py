"""The runs of a ladder: a trunk for each model and seed, and short branches from it. No torch.

A trunk warms up, holds its learning rate, and falls in its last `ladder.decay_ratio`: it is the run
of the longest horizon. It saves a checkpoint where the fall of each shorter horizon begins. A
branch continues there with all that the checkpoint holds and its own schedule. A rate is a
function of the step alone. So a branch is the run that was trained for its horizon from the start,
to the last bit. Hägele et al. 2024 (arXiv:2405.18392) compare such runs with cosine schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.decays import DECAYS
from titanlite.config.toml import quote
from titanlite.contrib.lab.ladder.law import LadderError
from titanlite.contrib.lab.ladder.sizes import Shape, shapes
from titanlite.contrib.lab.ladder.target import Target
from titanlite.contrib.lab.members import Member

#: A warm-up is at most this share of the shortest horizon.
_LONGEST_WARMUP = 0.1
#: A trunk saves this often, besides the starts of its branches: a killed one resumes.
_SAVES = 5
#: Most validations of a trunk.
_VALIDATIONS = 20

#: Flags of the models, over the file but under the command line: a small model needs no
#: parallelism but that of data.
DEFAULTS = (
    "--training.data_parallel_type=fsdp",
    "--training.data_parallel_replicate_degree=1",
    "--training.data_parallel_shard_degree=-1",
    "--training.tensor_parallel_degree=1",
    "--experimental.pipeline_parallel_degree=1",
    "--experimental.context_parallel_degree=1",
    "--experimental.enable_async_tensor_parallel=false",
    "--parallelism.expert_parallel_degree=1",
    "--eval.tasks=[]",
    # The run that is predicted goes there.
    "--checkpoint.hub=",
    "--checkpoint.local_folder=none",
)
#: Flags of the runs themselves.
_COMMON = (
    "--lr_scheduler.unit=steps",
    "--lr_scheduler.style=titan",
    "--validation.first=false",
    "--checkpoint.enable_checkpoint=true",
    "--checkpoint.folder=checkpoint",
    "--checkpoint.interval_type=steps",
    "--checkpoint.load_step=-1",
    "--checkpoint.keep_latest_k=1",
    "--checkpoint.keep_every=0",
    "--checkpoint.model_weights_only=false",
    "--checkpoint.last_save_in_hf=false",
    # A branch loads all that its trunk saved.
    "--checkpoint.exclude_from_loading=[]",
)
_IN_A_FILE = "write it into the file: the runs of a ladder have lengths of their own"
#: Keys that a command line cannot have beside the flags of a run → what to do instead.
OWN = dict.fromkeys(
    (
        "training.tokens",
        "training.epochs",
        "lr_scheduler.warmup_ratio",
        "lr_scheduler.decay_ratio",
        "lr_scheduler.plateau_ratio",
    ),
    _IN_A_FILE,
)


@dataclass(frozen=True)
class Rung:
    """One run of the ladder."""

    name: str
    shape: Shape
    #: Tokens per parameter that were asked for.
    horizon: float
    steps: int
    tokens: int
    #: Sequences of a step, and the peak learning rate.
    sequences: int
    rate: float
    flags: tuple[str, ...]
    #: Name of the run that it branches from; None: it is a trunk.
    trunk: str | None
    #: Step of the trunk's checkpoint that it continues.
    begins: int

    @property
    def parameters(self) -> int:
        return self.shape.parameters

    def member(self, folder: Path) -> Member:
        if self.trunk is None:
            return Member(self.name, self.flags)
        begin = folder / self.trunk / "checkpoint" / f"step-{self.begins}"
        return Member(self.name, (*self.flags, f"--checkpoint.initial_load_path={begin}"))


def rungs(target: Target) -> list[Rung]:
    """Return all runs, each trunk before its branches. Raises LadderError."""
    first = target.run.training.seed
    found: list[Rung] = []
    for shape in shapes(target.args, target.ladder.sizes):
        for seed in range(first, first + target.ladder.seeds):
            found += _of_model(target, shape, seed)
    return found


def computed(found: Sequence[Rung]) -> float:
    """Return the FLOPs of all runs by the rule 6 N D; a branch trains only its own steps."""
    total = 0.0
    for rung in found:
        share = (rung.steps - rung.begins) / rung.steps
        total += 6.0 * rung.parameters * rung.tokens * share
    return total


def _of_model(target: Target, shape: Shape, seed: int) -> Iterator[Rung]:
    """Yield the trunk of a model, and its branches."""
    horizons = sorted(set(target.ladder.tokens_per_parameter))
    schedule = target.run.schedule
    sequences, micro = batch_of(target, shape)
    tokens_per_step = sequences * target.run.batch.seq_len
    steps = [round(horizon * shape.parameters / tokens_per_step) for horizon in horizons]
    falls = [round(target.ladder.decay_ratio * number) for number in steps]
    begins = [number - fall for number, fall in zip(steps, falls, strict=True)]
    # The target's share, of the longest horizon.
    share = schedule.warmup_steps / max(schedule.total_steps or 1, 1)
    warmup = round(min(share * steps[-1], _LONGEST_WARMUP * steps[0])) or 1
    if falls[0] < 1 or warmup < 1 or len(set(begins)) < len(begins):
        raise LadderError(
            f"{shape.name}: {horizons[0]:g} tokens per parameter are {steps[0]} steps of "
            f"{tokens_per_step:,} tokens. They are too few for a warm-up and a decay, or two "
            "horizons have the same steps: raise ladder.tokens_per_parameter or ladder.sizes, or "
            "give a smaller batch"
        )
    common = (
        *_model_flags(target, shape),
        *_COMMON,
        f"--training.warmup_steps={warmup}",
        f"--training.seed={seed}",
        f"--training.global_batch_size={sequences}",
        f"--training.batch_size={micro}",
    )
    suffix = f"-s{seed}" if target.ladder.seeds > 1 else ""
    names = [f"{shape.name}-t{horizon:g}{suffix}" for horizon in horizons]
    for place in reversed(range(len(horizons))):
        is_trunk = place == len(horizons) - 1
        end = steps[place]
        flags = _length_flags(end, falls[place], begins[:-1] if is_trunk else None)
        yield Rung(
            name=names[place],
            shape=shape,
            horizon=horizons[place],
            steps=end,
            tokens=end * tokens_per_step,
            sequences=sequences,
            rate=rate_of(target, shape),
            flags=(*common, *flags),
            trunk=None if is_trunk else names[-1],
            begins=0 if is_trunk else begins[place],
        )


def batch_of(target: Target, shape: Shape) -> tuple[int, int]:
    """Return the sequences of a step and of a micro-batch, by `ladder.batch_exponent`."""
    share = (shape.parameters / target.parameters) ** target.ladder.batch_exponent
    each = max(round(target.run.batch.global_batch_size * share / target.ranks), 1)
    most = target.run.batch.micro_batch_size
    accumulation = -(-each // most)
    micro = round(each / accumulation)
    return micro * accumulation * target.ranks, micro


def rate_of(target: Target, shape: Shape) -> float:
    """Return the peak learning rate of a model, by `ladder.lr_exponent`; under muP that of the
    file.
    """
    if target.run.mup.base_dim:
        return target.run.optimizer.lr
    share = target.parameters / shape.parameters
    return float(f"{target.run.optimizer.lr * share**target.ladder.lr_exponent:.6g}")


def _model_flags(target: Target, shape: Shape) -> tuple[str, ...]:
    shape_flags = [f"--model.overrides.{name}={size}" for name, size in shape.overrides.items()]
    decay = target.run.lr_scheduler.decay_type
    if not DECAYS[decay].reaches_floor:
        decay = "linear"
    rate = rate_of(target, shape)
    floor = target.run.lr_scheduler.min_lr
    # A model with a higher rate has a higher lowest rate, too.
    share = rate / target.run.optimizer.lr
    floor_flags = () if not floor else (f"--lr_scheduler.min_lr={floor * share:.6g}",)
    return (
        *shape_flags,
        *floor_flags,
        f"--optimizer.lr={rate}",
        f"--lr_scheduler.decay_type={decay}",
    )


def _length_flags(steps: int, fall: int, milestones: list[int] | None) -> list[str]:
    """milestones: of a trunk; None: it is a branch."""
    flags = [
        f"--training.steps={steps}",
        f"--lr_scheduler.total_steps={steps}",
        f"--lr_scheduler.decay_steps={fall}",
    ]
    if milestones is None:
        return [
            *flags,
            f"--validation.freq={steps}",
            "--checkpoint.start=from",
            f"--checkpoint.interval={steps}",
            "--checkpoint.milestones=[]",
            "--checkpoint.initial_load_model_only=false",
        ]
    freq = max(min([*milestones, steps]) // 2, steps // _VALIDATIONS, 1)
    return [
        *flags,
        f"--validation.freq={freq}",
        "--checkpoint.start=resume-or-fresh",
        f"--checkpoint.interval={max(steps // _SAVES, 1)}",
        f"--checkpoint.milestones={quote(milestones)}",
    ]
