"""What a run can switch on: each feature is a folder with all that titanlite knows of it.

    for feature in features_of(run).on:          # where the order of features does not matter
        rows += feature.report_rows(setup, builder, model)

    float8 = float8_of(run.float8)               # where it does, or one feature alone has a say
    if float8 is not None:
        float8.convert(model, linears)

A feature that is off is None, and its folder is not imported. Rules that concern two features are
in `titanlite.run.interactions`. The keys are in `titanlite.config.sections`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.config.model_sections import Optimizer
    from titanlite.config.run_sections import Eval
    from titanlite.config.sections import (
        ActivationCheckpoint,
        Checkpoint,
        Config,
        Experimental,
        Float8,
        Lora,
        Mup,
        Training,
    )
    from titanlite.contrib.hub.feature import HubFeature
    from titanlite.features.activation_offload import ActivationOffload
    from titanlite.features.async_tp import AsyncTensorParallel
    from titanlite.features.context import ContextParallel
    from titanlite.features.ema import WeightAveraging
    from titanlite.features.experts import ExpertParallel, MoELayers
    from titanlite.features.feature import Feature
    from titanlite.features.float8 import Float8Feature
    from titanlite.features.local_saves import LocalSaves
    from titanlite.features.lora import LoraFeature
    from titanlite.features.loss_chunks import LossChunks
    from titanlite.features.mup import MupFeature
    from titanlite.features.pipeline import PipelineParallel
    from titanlite.features.tasks import TaskEvaluation
    from titanlite.models.spec import ModelSpec

#: A feature beside the core.
HUB = "titanlite.contrib.hub.feature:HubFeature"


@dataclass(frozen=True)
class Features:
    """The features of a run; None for one that is off."""

    context: ContextParallel | None
    experts: ExpertParallel | None
    pipeline: PipelineParallel | None
    async_tp: AsyncTensorParallel | None
    float8: Float8Feature | None
    lora: LoraFeature | None
    mup: MupFeature | None
    loss_chunks: LossChunks | None
    activation_offload: ActivationOffload | None
    ema: WeightAveraging | None
    tasks: TaskEvaluation | None
    hub: HubFeature | None
    local_saves: LocalSaves | None

    @property
    def on(self) -> list[Feature]:
        """Those that are on, in the order of their messages and of their rows in a report."""
        every: list[Feature | None] = [
            self.context,
            self.experts,
            self.pipeline,
            self.async_tp,
            self.float8,
            self.lora,
            self.mup,
            self.loss_chunks,
            self.activation_offload,
            self.ema,
            self.tasks,
            self.hub,
            self.local_saves,
        ]
        return [feature for feature in every if feature is not None]


def features_of(config: Config) -> Features:
    """Return the features that the sections of a config, or of a run, switch on."""
    experimental = config.experimental

    def ranks(degree: int) -> int:
        # One process makes a seed checkpoint for runs of any degrees.
        return 1 if config.checkpoint.create_seed_checkpoint else degree

    return Features(
        context=context_of(ranks(experimental.context_parallel_degree)),
        experts=experts_of(ranks(config.parallelism.expert_parallel_degree)),
        pipeline=pipeline_of(experimental, ranks(experimental.pipeline_parallel_degree)),
        async_tp=async_tp_of(config.experimental),
        float8=float8_of(config.float8),
        lora=lora_of(config.lora),
        mup=mup_of(config.mup),
        loss_chunks=loss_chunks_of(config.training),
        activation_offload=activation_offload_of(config.activation_checkpoint),
        ema=ema_of(config.optimizer),
        tasks=tasks_of(config.eval),
        hub=hub_of(config.checkpoint),
        local_saves=local_saves_of(config.checkpoint),
    )


def context_of(degree: int) -> ContextParallel | None:
    """Return context parallelism if ranks share sequences. degree: their number."""
    if degree == 1:
        return None
    from titanlite.features.context import ContextParallel

    return ContextParallel()


def experts_of(degree: int) -> ExpertParallel | None:
    """Return expert parallelism if ranks share experts. degree: their number."""
    if degree == 1:
        return None
    from titanlite.features.experts import ExpertParallel

    return ExpertParallel(degree)


def moe_layers_of(spec: ModelSpec, args: Any) -> MoELayers | None:
    """Return the MoE layers of a model, on any number of ranks; None: it has none."""
    layers = spec.moe_layers(args)
    if not layers:
        return None
    from titanlite.features.experts import MoELayers

    return MoELayers(layers)


def pipeline_of(section: Experimental, degree: int) -> PipelineParallel | None:
    """Return the pipeline if ranks share layers. degree: their number."""
    if degree == 1:
        return None
    from titanlite.features.pipeline import PipelineParallel

    return PipelineParallel(section, degree)


def async_tp_of(section: Experimental) -> AsyncTensorParallel | None:
    """Return asynchronous tensor parallelism if it is on."""
    if not section.enable_async_tensor_parallel:
        return None
    from titanlite.features.async_tp import AsyncTensorParallel

    return AsyncTensorParallel()


def float8_of(section: Float8) -> Float8Feature | None:
    """Return float8 if it is on."""
    if not section.enable_float8_linear:
        return None
    if section.is_mx:
        from titanlite.features.mx import MXFeature

        return MXFeature(section)
    from titanlite.features.float8 import Float8Feature

    return Float8Feature(section)


def lora_of(section: Lora) -> LoraFeature | None:
    """Return adapters beside frozen weights if there are some."""
    if not section.rank:
        return None
    from titanlite.features.lora import LoraFeature

    return LoraFeature(section)


def mup_of(section: Mup) -> MupFeature | None:
    """Return the maximal update parametrization if it is on."""
    if not section.base_dim:
        return None
    from titanlite.features.mup import MupFeature

    return MupFeature(section)


def loss_chunks_of(section: Training) -> LossChunks | None:
    """Return the loss in chunks if it is on."""
    if section.loss_chunks == 1:
        return None
    from titanlite.features.loss_chunks import LossChunks

    return LossChunks(section.loss_chunks)


def activation_offload_of(section: ActivationCheckpoint) -> ActivationOffload | None:
    """Return the offload of activations if it is on."""
    if not section.offload:
        return None
    from titanlite.features.activation_offload import ActivationOffload

    return ActivationOffload()


def ema_of(section: Optimizer) -> WeightAveraging | None:
    """Return the average of the weights if one is kept."""
    if not section.ema_decay:
        return None
    from titanlite.features.ema import WeightAveraging

    return WeightAveraging(section.ema_decay)


def tasks_of(section: Eval) -> TaskEvaluation | None:
    """Return the tasks that measure a model in training if there are some."""
    if not section.tasks:
        return None
    from titanlite.features.tasks import TaskEvaluation

    return TaskEvaluation(section)


def hub_of(section: Checkpoint) -> HubFeature | None:
    """Return uploads to the hub if a repository is named."""
    if not section.hub or not section.enable_checkpoint:
        return None
    from titanlite.config.resolve import resolve

    feature: HubFeature = resolve(HUB)(section)
    return feature


def local_saves_of(section: Checkpoint) -> LocalSaves | None:
    """Return saves to each node's own disk if they are on."""
    if section.local_folder is None or not section.enable_checkpoint:
        return None
    from titanlite.features.local_saves import LocalSaves

    return LocalSaves(section)
