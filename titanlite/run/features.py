"""Features that a run switches on: one table of them, and the hooks by which they take part.

    for feature in run.features.on:              # a hook that several features have
        feature.convert(builder, model)

    if run.features.pipeline:                    # what one feature alone does
        run.features.pipeline.runner(...)

Each feature is a folder of `titanlite.features` with all that titanlite knows of it. It is imported
when a config switches it on: features are resolved once, when the run's config is. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlite import doors
from titanlite.config.errors import Problem

if TYPE_CHECKING:
    from torch import nn

    from titanlite.assembly.build import TrainingComponents
    from titanlite.callbacks import Callback
    from titanlite.config.loaded import LoadedConfig
    from titanlite.config.sections import Config
    from titanlite.config.value_types import Section
    from titanlite.contrib.hub.feature import HubFeature
    from titanlite.contrib.resilience.feature import LocalSaves
    from titanlite.features.activation_offload import ActivationOffload
    from titanlite.features.async_tp import AsyncTensorParallel
    from titanlite.features.context import ContextParallel
    from titanlite.features.ema import WeightAveraging
    from titanlite.features.experts import ExpertParallel, MoELayers
    from titanlite.features.float8 import Float8Feature
    from titanlite.features.lora import LoraFeature
    from titanlite.features.loss_chunks import LossChunks
    from titanlite.features.mup import MupFeature
    from titanlite.features.pipeline import PipelineParallel
    from titanlite.features.sdc import CorruptionChecks
    from titanlite.features.tasks import TaskEvaluation
    from titanlite.models.spec import Init, ModelSpec
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.plan.rank_sizes import RankSizes
    from titanlite.plan.step_sizes import StepSizes
    from titanlite.run.config import RunConfig

    InitRule = Callable[[str], Init]
    Write = Callable[[int, Mapping[str, float]], object]

#: Name and text of a line of the start report.
Row = tuple[str, str]


class Feature:
    """Base of all features, as `Callback` is of callbacks: every hook is optional.

    Hooks are called for each feature that is on, in the order of `FEATURES`. What one feature alone
    does is its own method.
    """

    #: The key that switches it on, for messages. That of another package is on where its value is
    #: true.
    key: str
    #: The keys of a feature of another package: a section named as its entry point.
    section_class: type[Section] | None = None
    #: The field of `ModelSpec` without which a model does not offer it; "": any model does.
    model_field = ""

    def __init__(self, config: Config) -> None:
        """config: the sections that switch it on."""

    # Before the ranks start. Nothing here imports torch.

    def contradictions(self, config: LoadedConfig) -> Iterable[Problem]:
        """Find keys that exclude each other on any ranks and with any model."""
        return ()

    def model_problems(self, run: RunConfig, args: Any) -> Iterable[Problem]:
        """Find what does not fit these ranks and the model on them.

        args: the model's. `vocab_size` is None where the tokenizer decides it.
        """
        return ()

    # On the machine of a rank

    def machine_problems(self, run: RunConfig, args: Any | None) -> Iterable[Problem]:
        """Find what this machine or its torch cannot do, without a process group.

        args: the model's; None before the text is read, for the machine alone.
        """
        return ()

    # The model: `titanlite.parallel.parallelize` calls these on each rank

    def convert(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Change the modules of a model or pipeline stage on the meta device, in place.

        Settings of inductor and arguments of `apply_fsdp` go to the builder.
        """

    def distribute(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Divide the model over ranks, in place: after tensor parallelism, before FSDP."""

    def after_sharding(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Finish the model, in place: its parameters are those that will be trained."""

    def init_rule(self, rule: InitRule, spec: ModelSpec, args: Any) -> InitRule:
        """Return full parameter name → how to draw it. rule: that of the features before."""
        return rule

    # The plan. Nothing here imports torch.

    def plan_memory(self, sizes: RankSizes) -> None:
        """Change what a rank's memory follows from, in place: the fields that `RankSizes` lists."""

    def plan_speed(self, step: StepSizes) -> None:
        """Change what a step's time follows from, in place: the fields that `StepSizes` lists."""

    # The loop, and the start report

    def callbacks(self, parts: TrainingComponents, write: Write) -> Iterable[Callback]:
        """Return what accompanies the run, after other callbacks.

        write: takes a step and figures for metrics.jsonl.
        """
        return ()

    def report_rows(self, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        """Return rows of the start report."""
        return ()


class Entry(NamedTuple):
    """A feature in the table: its field of `Features`, its class, and when it is on."""

    name: str
    place: str
    is_on: Callable[[Config], bool]
    #: The key to blame where the feature, which stands beside the core, is not installed.
    key: str = ""


def _shared(config: Config, degree: int) -> bool:
    """Whether several ranks share something; one process makes a seed checkpoint for any."""
    return degree != 1 and not config.checkpoint.create_seed_checkpoint


def _saves(config: Config, key: object) -> bool:
    return bool(key) and config.checkpoint.enable_checkpoint


#: Each feature once, in the order of its messages, of its rows in a report, and of its hooks.
FEATURES = (
    Entry(
        "context",
        "titanlite.features.context:ContextParallel",
        lambda c: _shared(c, c.experimental.context_parallel_degree),
    ),
    Entry(
        "experts",
        "titanlite.features.experts:ExpertParallel",
        lambda c: _shared(c, c.parallelism.expert_parallel_degree),
    ),
    Entry(
        "pipeline",
        "titanlite.features.pipeline:PipelineParallel",
        lambda c: _shared(c, c.experimental.pipeline_parallel_degree),
    ),
    Entry(
        "async_tp",
        "titanlite.features.async_tp:AsyncTensorParallel",
        lambda c: c.experimental.enable_async_tensor_parallel,
    ),
    Entry(
        "loss_chunks",
        "titanlite.features.loss_chunks:LossChunks",
        lambda c: c.training.loss_chunks != 1,
    ),
    Entry(
        "float8",
        "titanlite.features.float8:Float8Feature",
        lambda c: c.float8.enable_float8_linear and not c.float8.is_mx,
    ),
    Entry(
        "float8",
        "titanlite.features.mx:MXFeature",
        lambda c: c.float8.enable_float8_linear and c.float8.is_mx,
    ),
    Entry("lora", "titanlite.features.lora:LoraFeature", lambda c: c.lora.rank > 0),
    Entry("mup", "titanlite.features.mup:MupFeature", lambda c: c.mup.base_dim > 0),
    Entry(
        "activation_offload",
        "titanlite.features.activation_offload:ActivationOffload",
        lambda c: c.activation_checkpoint.offload,
    ),
    Entry("ema", "titanlite.features.ema:WeightAveraging", lambda c: bool(c.optimizer.ema_decay)),
    Entry("sdc", "titanlite.features.sdc:CorruptionChecks", lambda c: c.sdc.freq > 0),
    Entry("tasks", "titanlite.features.tasks:TaskEvaluation", lambda c: bool(c.eval.tasks)),
    Entry(
        "hub",
        doors.OURS["features"]["hub"],
        lambda c: _saves(c, c.checkpoint.hub),
        "checkpoint.hub",
    ),
    Entry(
        "local_saves",
        doors.OURS["features"]["local_saves"],
        lambda c: _saves(c, c.checkpoint.local_folder),
        "checkpoint.local_folder",
    ),
)


@dataclass(frozen=True)
class Features:
    """The features of a run; None for one that is off."""

    context: ContextParallel | None = None
    experts: ExpertParallel | None = None
    pipeline: PipelineParallel | None = None
    async_tp: AsyncTensorParallel | None = None
    loss_chunks: LossChunks | None = None
    float8: Float8Feature | None = None
    lora: LoraFeature | None = None
    mup: MupFeature | None = None
    activation_offload: ActivationOffload | None = None
    ema: WeightAveraging | None = None
    sdc: CorruptionChecks | None = None
    tasks: TaskEvaluation | None = None
    hub: HubFeature | None = None
    local_saves: LocalSaves | None = None
    #: Features of other packages.
    others: tuple[Feature, ...] = ()

    @property
    def on(self) -> list[Feature]:
        """The features that are on, in the order of `FEATURES`; then those of packages."""
        names = dict.fromkeys(entry.name for entry in FEATURES)
        every = (getattr(self, name) for name in names)
        return [*(feature for feature in every if feature is not None), *self.others]

    def build(self, builder: ModelBuilder, divide: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Build this rank's model on the meta device: divided, or a pipeline's divided stages.

        divide: divides a model or a stage over the other ranks.
        """
        if self.pipeline is None:
            return divide(builder.whole())
        return self.pipeline.build(builder, divide)


def features_of(config: Config) -> Features:
    """Return the features that a config switches on."""
    on = [entry for entry in FEATURES if entry.is_on(config)]
    others = []
    for name, section in config.others.items():
        kind: type[Feature] = doors.load(doors.of_packages("features")[name])
        if getattr(section, kind.key.rpartition(".")[2]):
            others.append(kind(config))
    ours = {entry.name: doors.load(entry.place)(config) for entry in on}
    return Features(**ours, others=tuple(others))


def not_installed(config: LoadedConfig) -> Iterator[Problem]:
    """Find keys whose features are not installed."""
    for entry in FEATURES:
        lack = entry.key and entry.is_on(config.sections) and doors.lack(entry.place)
        if lack:
            yield Problem("missing-package", entry.key, lack, "leave the key out")


def moe_layers_of(spec: ModelSpec, args: Any) -> MoELayers | None:
    """Return a model's MoE layers, on any number of ranks."""
    layers = spec.moe_layers(args)
    return doors.load("titanlite.features.experts:MoELayers")(layers) if layers else None
