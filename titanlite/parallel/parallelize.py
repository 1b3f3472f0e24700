"""The recipe from a model's arguments to this rank's part of it: the features, their order and
their settings.

    builder = ModelBuilder(spec, args, mesh, device, training=Training(compile=True))
    model = builder.build(seed=0)
    loss = builder.loss()

Order: model on the meta device → pipeline stages → loss in chunks → float8 → adapters → tensor,
context and expert parallelism → activation checkpointing → `torch.compile` → `fully_shard` → memory
→ initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.sections import (
    ActivationCheckpoint,
    Compile,
    Experimental,
    Float8,
    Lora,
    Mup,
    Training,
)
from titanlite.dist.local import parts_of
from titanlite.features import (
    async_tp_of,
    context_of,
    experts_of,
    float8_of,
    lora_of,
    loss_chunks_of,
    mup_of,
    pipeline_of,
)
from titanlite.loss import LossFunction, cross_entropy_sum, of_tokens
from titanlite.models.spec import Init, ModelSpec
from titanlite.parallel import needs_torch, offered
from titanlite.parallel.fsdp import DTYPES, apply_fsdp, offloads
from titanlite.parallel.init import init_weights, materialize
from titanlite.run.interactions import compiles_halves

if TYPE_CHECKING:
    from titanlite.features.experts import ExpertParallel
    from titanlite.features.pipeline import PipelineParallel
    from titanlite.features.pipeline.runner import Pipeline
    from titanlite.features.pipeline.split import StageLayout
    from titanlite.models.linears import Linears
    from titanlite.parallel.wrapping import FSDPGroup


@dataclass(frozen=True)
class ModelBuilder:
    """Builds this rank's part of a model, as the config sections say."""

    spec: ModelSpec
    #: The model's arguments.
    args: Any
    #: From `DistEnv.build_mesh`.
    mesh: DeviceMesh
    #: Where the model will run.
    device: torch.device
    training: Training = Training()
    experimental: Experimental = Experimental()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint(mode="none")
    compile: Compile = Compile()
    float8: Float8 = Float8()
    #: (logits [tokens, vocab], labels [tokens]) → the summed loss. None: cross-entropy.
    own_loss: LossFunction | None = None
    #: Ranks that share the experts of an MoE layer.
    ep: int = 1
    lora: Lora = Lora()
    mup: Mup = Mup()

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
        if offloads(self.training.enable_cpu_offload, self.device.type):
            memory = torch.device("cpu")
        for part in parts_of(model):
            materialize(part, self.device, initialize, memory)
        return model

    def _init_rule(self) -> Callable[[str], Init]:
        """Return full parameter name → how to draw it."""

        mup = mup_of(self.mup)
        if mup is not None:
            return mup.rules(self.spec, self.args).init

        def of_model(name: str) -> Init:
            return self.spec.init_rule(name, self.args)

        lora = lora_of(self.lora)
        return of_model if lora is None else lora.init_rule(of_model, self.spec, self.args)

    def build_on_meta(self) -> nn.Module:
        """Build the model as `build` does, divided and sharded, but on the meta device: without
        memory or weights.
        """

        def whole() -> nn.Module:
            return self.spec.build_on_meta(self.args)

        # Groups of the whole model, so that they do not depend on where it is cut.
        model = whole()
        groups = self._groups(model)
        pipeline = self.pipelined
        if pipeline is None:
            return self.parallelize(model, groups)

        def divide(stage: nn.Module) -> nn.Module:
            return self.parallelize(stage, groups)

        return pipeline.build(whole, divide, self.stage_layout, self.mesh)

    def _groups(self, whole: nn.Module) -> Sequence[FSDPGroup]:
        """Return the FSDP groups of the whole model."""
        blocks = self.spec.fsdp_groups(self.args)
        policy = self.training.fsdp_units
        if policy == "block":
            return blocks
        from titanlite.parallel.wrapping import choose_groups

        return choose_groups(whole, policy, self.training.fsdp_min_params, blocks)

    def parallelize(self, model: nn.Module, groups: Sequence[FSDPGroup]) -> nn.Module:
        """Apply every feature to a model or pipeline stage on the meta device, in place, in the
        order that works.
        """
        self._set_dtype(model)
        chunks = loss_chunks_of(self.training)
        if chunks is not None:
            chunks.apply(model, self.spec.head)
        float8 = float8_of(self.float8)
        if float8 is not None:
            float8.convert(model, self.linears)
        lora = lora_of(self.lora)
        if lora is not None:
            lora.add(model, self.spec, self.args, self.frozen_dtype)
        if self.tp > 1:
            needs_torch("2.12", "tensor parallelism")
            if self.activation_checkpoint.mode == "budget":
                needs_torch("2.13", "tensor parallelism with a budget of activations")
            self._apply_tp(model)
        context = context_of(self.cp)
        has_blocks = bool(select(model, self.spec.block_names(self.args)))
        if context is not None and has_blocks:  # a stage may have none
            context.apply(model, self.mesh)
        if self.experts is not None:
            self.experts.apply(model, self.mesh, offered(self.spec, "experts")(self.args))
        self._apply_ac(model)
        self._apply_compile(model)
        if lora is not None:
            lora.freeze(model)
        self._apply_fsdp(model, groups)
        if float8 is not None:
            float8.after_sharding(model, self.mesh)
        if lora is not None:
            lora.after_sharding(model)
        return model

    def _set_dtype(self, model: nn.Module) -> None:
        """Give the parameters the dtype of the run; buffers keep theirs: RoPE tables need
        float32.
        """
        dtype = DTYPES[self.training.dtype]
        if dtype != torch.float32:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)

    def _apply_tp(self, model: nn.Module) -> None:
        if self.spec.whole_activations:
            from titanlite.parallel.tensor_whole import apply_whole_tp as apply_tp
        else:
            from titanlite.parallel.tensor import apply_tp

        # torch divides cross-entropy over ranks, and no other loss.
        shard_logits = self.training.enable_loss_parallel and self.own_loss is None
        plan = offered(self.spec, "tensor_plan")(self.args)
        apply_tp(model, plan, self.mesh["tp"], shard_logits)

    def _apply_ac(self, model: nn.Module) -> None:
        settings = self.activation_checkpoint
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
            apply_compile(modules, self.compile.backend, self.compile_options)

    def _separate_cache(self) -> None:
        """Keep graphs of tensor-parallel ranks apart, also those that code of the user compiles."""
        if self.training.compile or self.tp > 1:
            from titanlite.parallel.compile import separate_cache

            separate_cache(self.mesh, self.device)

    def _apply_fsdp(self, model: nn.Module, groups: Sequence[FSDPGroup]) -> None:
        present = [tuple(select(model, group)) for group in groups]
        apply_fsdp(
            model,
            [group for group in present if group],
            self.mesh,
            param_dtype=self.param_dtype,
            reduce_dtype=DTYPES[self.training.mixed_precision_reduce],
            reshard_after_forward=self.reshard_after_forward,
            prefetch=self.training.prefetch,
            cpu_offload=self.training.enable_cpu_offload,
            placement=None if self.experts is None else self.experts.placement(self.mesh),
        )

    def loss(self) -> LossFunction:
        """Return the loss function for the logits of the model, compiled if asked."""
        self._separate_cache()
        loss = self.plain_loss
        if self.compiles("loss"):
            from titanlite.parallel.compile import compile_loss

            loss = compile_loss(loss, self.compile.backend)
        if self.tp > 1:
            from titanlite.parallel.tensor import tensor_loss

            loss = tensor_loss(loss)
        return loss

    @cached_property
    def plain_loss(self) -> LossFunction:
        if self.own_loss is not None:
            return of_tokens(self.own_loss)
        z_loss, smoothing = self.training.z_loss, self.training.label_smoothing
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
        assert self.pipelined is not None
        sizes = {"batch_size": batch_size, "seq_len": seq_len, "accumulation": accumulation}
        return self.pipelined.runner(self, model, loss, **sizes)

    def positions(self, rank_len: int) -> torch.Tensor:
        """Return the places in the sequence of this rank's `rank_len` tokens, int64."""
        everywhere = torch.arange(rank_len * self.cp, device=self.device)
        context = context_of(self.cp)
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
        return self.training.compile and component in self.compile.components

    @property
    def compiled_names(self) -> list[str]:
        """The modules of the whole model that `torch.compile` makes one graph each."""
        if not self.compiles("model"):
            return []
        halves = compiles_halves(
            self.tp, self.ep, self.activation_checkpoint, self.float8, self.experimental
        )
        field = "sublayer_names" if halves else "block_names"
        names: list[str] = offered(self.spec, field)(self.args)
        return names

    def compiled_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return those of `compiled_names` in this model or pipeline stage, without the experts
        that ranks share.
        """
        modules = select(model, self.compiled_names)
        return modules if self.experts is None else self.experts.compiled(modules)

    # Values that follow from the sections and the mesh

    @cached_property
    def experts(self) -> ExpertParallel | None:
        """Expert parallelism, which divides the mesh once; None: each rank has all experts."""
        return experts_of(self.ep)

    @cached_property
    def stage_layout(self) -> StageLayout:
        """Where the model is cut into the stages of a pipeline."""
        assert self.pipelined is not None
        return self.pipelined.layout(self.spec, self.args, self.args.max_seq_len)

    @property
    def pipelined(self) -> PipelineParallel | None:
        """The pipeline; None: each rank has all layers."""
        return pipeline_of(self.experimental, self.pp)

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
    def compile_options(self) -> dict[str, Any]:
        """Settings of inductor for the blocks."""
        options: dict[str, Any] = {}
        async_tp = async_tp_of(self.experimental)
        if async_tp is not None:
            options |= async_tp.compile_options()
        float8 = float8_of(self.float8)
        if float8 is not None and self.compile.backend == "inductor":
            options |= float8.compile_options()
        return options

    @property
    def frozen_dtype(self) -> torch.dtype:
        """Of weights that are not trained: products take them in no other."""
        dtypes = (DTYPES[self.training.dtype], self.param_dtype)
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    @property
    def param_dtype(self) -> torch.dtype:
        """Of gathered weights and of activations."""
        return DTYPES[self.training.mixed_precision_param]

    @property
    def reshard_after_forward(self) -> bool | int | None:
        """The argument of `apply_fsdp`.

        Raises ParallelismError where the schedule of a pipeline does not allow it.
        """
        named: dict[Any, bool | None] = {"default": None, "always": True, "never": False}
        given = self.training.reshard_after_forward
        reshard: bool | int | None = named.get(given, given)  # type: ignore[arg-type]
        return reshard if self.pipelined is None else self.pipelined.resharding(reshard)


def select(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return those of the named modules that this model or pipeline stage has."""
    modules = dict(model.named_modules())
    return {name: modules[name] for name in names if name in modules}
