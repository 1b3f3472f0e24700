"""The recipe from a model's arguments to this rank's part of it: the features, their order and
their settings.

    run = load_config("debug_model.toml", world.size)
    builder = ModelBuilder(run, run.model_args(), world.build_mesh(), world.device)
    model = builder.build(seed=0)
    loss = builder.loss()

Order: model on the meta device → pipeline stages → loss in chunks → float8 → adapters → tensor,
context and expert parallelism → activation checkpointing → `torch.compile` → `fully_shard` → memory
→ initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.dist.local import parts_of
from titanlite.loss import LossFunction, cross_entropy_sum, of_tokens
from titanlite.models.spec import Init, ModelSpec
from titanlite.parallel import needs_torch, offered
from titanlite.parallel.fsdp import DTYPES, apply_fsdp, offloads
from titanlite.parallel.init import init_weights, materialize
from titanlite.run.interactions import compiles_halves

if TYPE_CHECKING:
    from titanlite.features.pipeline.runner import Pipeline
    from titanlite.features.pipeline.split import StageLayout
    from titanlite.models.linears import Linears
    from titanlite.parallel.wrapping import FSDPGroup
    from titanlite.run.config import RunConfig


@dataclass(frozen=True)
class ModelBuilder:
    """Builds this rank's part of a model, as the config sections say."""

    run: RunConfig
    #: The model's arguments.
    args: Any
    #: From `DistEnv.build_mesh`.
    mesh: DeviceMesh
    #: Where the model will run.
    device: torch.device
    #: (logits [tokens, vocab], labels [tokens]) → the summed loss. None: cross-entropy.
    own_loss: LossFunction | None = None
    #: Settings of inductor for the blocks; features add theirs.
    compile_options: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int) -> nn.Module:
        """Build the sharded model on the device with its initial weights; no rank ever holds a full
        copy.

        With pipeline ranks: this rank's stages, in a `PipelineModel`.
        """
        model = self.build_on_meta()
        rule = self._init_rule()

        def initialize(part: nn.Module) -> None:
            init_weights(part, rule, seed, self.device)
            if hasattr(part, "init_buffers"):
                part.init_buffers()  # type: ignore[operator]

        memory = self.device
        if offloads(self.run.training.enable_cpu_offload, self.device.type):
            memory = torch.device("cpu")
        for part in parts_of(model):
            materialize(part, self.device, initialize, memory)
        return model

    def _init_rule(self) -> Callable[[str], Init]:
        """Return full parameter name → how to draw it."""

        def of_model(name: str) -> Init:
            return self.spec.init_rule(name, self.args)

        rule: Callable[[str], Init] = of_model
        for feature in self.run.features.on:
            rule = feature.init_rule(rule, self.spec, self.args)
        return rule

    def build_on_meta(self) -> nn.Module:
        """Build the model as `build` does, divided and sharded, but on the meta device: without
        memory or weights.
        """

        def whole() -> nn.Module:
            return self.spec.build_on_meta(self.args)

        # Groups of the whole model, so that they do not depend on where it is cut.
        model = whole()
        groups = self._groups(model)
        pipeline = self.run.features.pipeline
        if pipeline is None:
            return self.parallelize(model, groups)

        def divide(stage: nn.Module) -> nn.Module:
            return self.parallelize(stage, groups)

        return pipeline.build(whole, divide, self.stage_layout, self.mesh)

    def _groups(self, whole: nn.Module) -> Sequence[FSDPGroup]:
        """Return the FSDP groups of the whole model."""
        blocks = self.spec.fsdp_groups(self.args)
        policy = self.run.training.fsdp_units
        if policy == "block":
            return blocks
        from titanlite.parallel.wrapping import choose_groups

        return choose_groups(whole, policy, self.run.training.fsdp_min_params, blocks)

    def parallelize(self, model: nn.Module, groups: Sequence[FSDPGroup]) -> nn.Module:
        """Apply every feature to a model or pipeline stage on the meta device, in place, in the
        order that works.
        """
        self._set_dtype(model)
        for feature in self.run.features.on:
            feature.convert(self, model)
        if self.tp > 1:
            needs_torch("2.12", "tensor parallelism")
            if self.run.activation_checkpoint.mode == "budget":
                needs_torch("2.13", "tensor parallelism with a budget of activations")
            self._apply_tp(model)
        for feature in self.run.features.on:
            feature.distribute(self, model)
        self._apply_ac(model)
        self._apply_compile(model)
        self._apply_fsdp(model, groups)
        for feature in self.run.features.on:
            feature.after_sharding(self, model)
        return model

    def _set_dtype(self, model: nn.Module) -> None:
        """Give the parameters the dtype of the run; buffers keep theirs: RoPE tables need
        float32.
        """
        dtype = DTYPES[self.run.training.dtype]
        if dtype != torch.float32:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)

    def _apply_tp(self, model: nn.Module) -> None:
        from titanlite.parallel.tensor import apply_tp

        # torch divides cross-entropy over ranks, and no other loss.
        shard_logits = self.run.training.enable_loss_parallel and self.own_loss is None
        plan = offered(self.spec, "tensor_plan")(self.args)
        apply_tp(model, plan, self.mesh["tp"], shard_logits)

    def _apply_ac(self, model: nn.Module) -> None:
        settings = self.run.activation_checkpoint
        if settings.mode == "none" and not settings.offload:
            return
        from titanlite.parallel.activation_checkpoint import apply_ac

        names = self.spec.block_names(self.args)
        # Graphs hide their operators from a policy by operator, so that one is applied inside of
        # them.
        if settings.by_op:
            names = self.compiled_names or names
        apply_ac(model, names, settings, self.device)

    def _apply_compile(self, model: nn.Module) -> None:
        self._separate_cache()
        if self.compiles("model"):
            from titanlite.parallel.compile import apply_compile

            modules = self.compiled_modules(model)
            apply_compile(modules, self.run.compile.backend, self.compile_options)

    def _separate_cache(self) -> None:
        """Keep graphs of tensor-parallel ranks apart, also those that code of the user compiles."""
        if self.run.training.compile or self.tp > 1:
            from titanlite.parallel.compile import separate_cache

            separate_cache(self.mesh, self.device)

    def _apply_fsdp(self, model: nn.Module, groups: Sequence[FSDPGroup]) -> None:
        experts = self.run.features.experts
        present = [tuple(select(model, group)) for group in groups]
        apply_fsdp(
            model,
            [group for group in present if group],
            self.mesh,
            param_dtype=self.param_dtype,
            reduce_dtype=DTYPES[self.run.training.mixed_precision_reduce],
            reshard_after_forward=self.reshard_after_forward,
            prefetch=self.run.training.prefetch,
            cpu_offload=self.run.training.enable_cpu_offload,
            placement=None if experts is None else experts.placement(self.mesh),
        )

    def loss(self) -> LossFunction:
        """Return the loss function for the logits of the model, compiled if asked."""
        self._separate_cache()
        loss = self.plain_loss
        if self.compiles("loss"):
            from titanlite.parallel.compile import compile_loss

            loss = compile_loss(loss, self.run.compile.backend)
        if self.tp > 1:
            from titanlite.parallel.tensor import tensor_loss

            loss = tensor_loss(loss)
        return loss

    @cached_property
    def plain_loss(self) -> LossFunction:
        if self.own_loss is not None:
            return of_tokens(self.own_loss)
        z_loss, smoothing = self.run.training.z_loss, self.run.training.label_smoothing
        if not z_loss and not smoothing:
            return cross_entropy_sum
        from titanlite.regularized_loss import regularized

        return regularized(z_loss, smoothing)

    def pipeline(
        self,
        model: nn.Module,
        loss: LossFunction,
        *,
        batch_size: int,
        seq_len: int,
        accumulation: int,
    ) -> Pipeline:
        """Build the runner of a `PipelineModel`.

        batch_size: sequences per micro-batch and data-parallel rank. accumulation: micro-batches
        per step.
        """
        assert self.run.features.pipeline is not None
        sizes = {"batch_size": batch_size, "seq_len": seq_len, "accumulation": accumulation}
        return self.run.features.pipeline.runner(self, model, loss, **sizes)

    def positions(self, rank_len: int) -> torch.Tensor:
        """Return the places in the sequence of this rank's `rank_len` tokens, int64."""
        everywhere = torch.arange(rank_len * self.cp, device=self.device)
        context = self.run.features.context
        return everywhere if context is None else context.part(everywhere, self.mesh)

    # What was applied

    @property
    def linears(self) -> Linears:
        """Those of the whole model. Raises ParallelismError for a model that names none."""
        from titanlite.models.linears import linears_of

        offered(self.spec, "linears")
        return linears_of(self.spec, self.args, self.tp)

    def compiles(self, component: str) -> bool:
        """Whether `torch.compile` is applied to "model" or to "loss"."""
        return self.run.training.compile and component in self.run.compile.components

    @property
    def compiled_names(self) -> list[str]:
        """The modules of the whole model that `torch.compile` makes one graph each."""
        if not self.compiles("model"):
            return []
        field = "sublayer_names" if compiles_halves(self.run) else "block_names"
        names: list[str] = offered(self.spec, field)(self.args)
        return names

    def compiled_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return those of `compiled_names` in this model or pipeline stage, without the experts
        that ranks share.
        """
        modules = select(model, self.compiled_names)
        experts = self.run.features.experts
        return modules if experts is None else experts.compiled(modules)

    # Values that follow from the run and the mesh

    @property
    def spec(self) -> ModelSpec:
        return self.run.spec

    def has_blocks(self, model: nn.Module) -> bool:
        """Return whether this model or pipeline stage has decoder blocks."""
        return bool(select(model, self.spec.block_names(self.args)))

    @cached_property
    def stage_layout(self) -> StageLayout:
        """Where the model is cut into the stages of a pipeline."""
        assert self.run.features.pipeline is not None
        return self.run.features.pipeline.layout(self.spec, self.args, self.args.max_seq_len)

    @property
    def tp(self) -> int:
        return self.mesh["tp"].size()

    @property
    def cp(self) -> int:
        return self.mesh["cp"].size()

    @property
    def pp(self) -> int:
        return self.mesh["pp"].size()

    @property
    def frozen_dtype(self) -> torch.dtype:
        """Of weights that are not trained: products take them in no other."""
        dtypes = (DTYPES[self.run.training.dtype], self.param_dtype)
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    @property
    def param_dtype(self) -> torch.dtype:
        """Of gathered weights and of activations."""
        return DTYPES[self.run.training.mixed_precision_param]

    @property
    def reshard_after_forward(self) -> bool | int | None:
        """The argument of `apply_fsdp`.

        Raises ParallelismError where the schedule of a pipeline does not allow it.
        """
        named: dict[Any, bool | None] = {"default": None, "always": True, "never": False}
        given = self.run.training.reshard_after_forward
        reshard: bool | int | None = named.get(given, given)  # type: ignore[arg-type]
        pipeline = self.run.features.pipeline
        return reshard if pipeline is None else pipeline.resharding(reshard)


def select(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return those of the named modules that this model or pipeline stage has."""
    modules = dict(model.named_modules())
    return {name: modules[name] for name in names if name in modules}
