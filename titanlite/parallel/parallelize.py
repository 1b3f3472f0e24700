"""The recipe from a model's arguments to this rank's part of it.

    run = load_config("debug_model.toml", world.size)
    builder = ModelBuilder(run, run.model_args(), world.build_mesh(**run.mesh.dimensions), device)
    model = builder.build(seed=0)
    loss = builder.loss()

`parallelize` has the order, which matters: each step changes modules that the next one takes.
Features that a run switches on take part by the hooks of `titanlite.run.features.Feature`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.dist.local_parts import parts_of
from titanlite.loss import LossFunction, cross_entropy_sum, of_tokens
from titanlite.models.spec import Init, ModelSpec
from titanlite.parallel import needs_torch, offered
from titanlite.parallel.fsdp import DTYPES, apply_fsdp, offloads
from titanlite.parallel.init import init_weights, materialize
from titanlite.run.interactions import compiles_halves

if TYPE_CHECKING:
    from titanlite.models.linears import Linears
    from titanlite.parallel.fsdp_groups import FSDPGroup
    from titanlite.run.config import RunConfig


@dataclass(frozen=True)
class ModelBuilder:
    """Builds this rank's part of a model, as the config sections say."""

    run: RunConfig
    #: The model's arguments.
    args: Any
    #: From `DistEnv.build_mesh`.
    mesh: DeviceMesh
    #: Device that the model will run on.
    device: torch.device
    #: (logits [tokens, vocab], labels [tokens]) → the summed loss. None: cross-entropy.
    own_loss: LossFunction | None = None
    #: Settings of inductor for the blocks, and arguments of `apply_fsdp`; features add theirs.
    compile_options: dict[str, Any] = field(default_factory=dict)
    shard_options: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int) -> nn.Module:
        """Build the sharded model on the device with its initial weights. No rank ever holds a full
        copy.
        """
        model = self.build_on_meta()

        def of_model(name: str) -> Init:
            return self.spec.init_rule(name, self.args)

        rule: Callable[[str], Init] = of_model
        for feature in self.run.features.on:
            rule = feature.init_rule(rule, self.spec, self.args)

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

    def build_on_meta(self) -> nn.Module:
        """Build the model as `build` does, but on the meta device."""
        # Groups of the whole model, so that they do not depend on where it is cut.
        groups: Sequence[FSDPGroup] = self.spec.fsdp_groups(self.args)
        policy = self.run.training.fsdp_units
        if policy != "block":
            from titanlite.parallel.fsdp_groups import choose_groups

            groups = choose_groups(self.whole(), policy, groups)

        def divide(part: nn.Module) -> nn.Module:
            return self.parallelize(part, groups)

        return self.run.features.build(self, divide)

    def whole(self) -> nn.Module:
        """Build the whole model on the meta device."""
        return self.spec.build_on_meta(self.args)

    def parallelize(self, model: nn.Module, groups: Sequence[FSDPGroup]) -> nn.Module:
        """Divide and wrap a model or pipeline stage on the meta device, in place."""
        features = self.run.features.on
        self._set_dtype(model)
        # Other modules in the place of some: float8, adapters, a head that computes the loss.
        for feature in features:
            feature.convert(self, model)
        if self.tp > 1:
            self._apply_tp(model)
        # Over ranks in other ways: sequences, experts.
        for feature in features:
            feature.distribute(self, model)
        # Around each block: first what recomputes, then one graph of it, then its all-gather.
        self._apply_ac(model)
        self._separate_cache()
        if self.compiles("model"):
            from titanlite.parallel.compile import apply_compile

            modules = self.compiled_modules(model)
            apply_compile(modules, self.run.compile.backend, self.compile_options)
        self._apply_fsdp(model, groups)
        for feature in features:
            feature.after_sharding(self, model)
        return model

    def _set_dtype(self, model: nn.Module) -> None:
        """Give the parameters the dtype of the run; buffers keep theirs, as RoPE's in float32."""
        dtype = DTYPES[self.run.training.dtype]
        if dtype != torch.float32:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)

    def _apply_tp(self, model: nn.Module) -> None:
        from titanlite.parallel.tensor import apply_tp

        needs_torch("2.12", "tensor parallelism")
        if self.run.activation_checkpoint.mode == "budget":
            needs_torch("2.13", "tensor parallelism with a budget of activations")
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
        # A policy by operator is applied inside of graphs, which hide their operators.
        if settings.by_op:
            names = self.compiled_names or names
        apply_ac(model, names, settings, self.device)

    def _separate_cache(self) -> None:
        if self.run.training.compile or self.tp > 1:
            from titanlite.parallel.compile import separate_cache

            separate_cache(self.mesh, self.device)

    def _apply_fsdp(self, model: nn.Module, groups: Sequence[FSDPGroup]) -> None:
        reshard: Any = self.run.training.reshard_after_forward
        reshard = {"default": None, "always": True, "never": False}.get(reshard, reshard)
        present = [tuple(select(model, group)) for group in groups]
        apply_fsdp(
            model,
            [group for group in present if group],
            self.mesh,
            param_dtype=self.param_dtype,
            reduce_dtype=DTYPES[self.run.training.mixed_precision_reduce],
            reshard_after_forward=reshard,
            prefetch=self.run.training.prefetch,
            cpu_offload=self.run.training.enable_cpu_offload,
            **self.shard_options,
        )

    def loss(self) -> LossFunction:
        self._separate_cache()
        training = self.run.training
        loss: LossFunction = cross_entropy_sum
        if self.own_loss is not None:
            loss = of_tokens(self.own_loss)
        elif training.z_loss or training.label_smoothing:
            from titanlite.regularized_loss import regularized

            loss = regularized(training.z_loss, training.label_smoothing)
        if self.compiles("loss"):
            from titanlite.parallel.compile import compile_loss

            loss = compile_loss(loss, self.run.compile.backend)
        if self.tp > 1:
            from titanlite.parallel.tensor import tensor_loss

            loss = tensor_loss(loss)
        return loss

    # Parts that were applied

    @property
    def linears(self) -> Linears:
        """Raises ParallelismError for a model that names none."""
        from titanlite.models.linears import linears_of

        offered(self.spec, "linears")
        return linears_of(self.spec, self.args, self.tp)

    def compiles(self, component: str) -> bool:
        return self.run.training.compile and component in self.run.compile.components

    @property
    def compiled_names(self) -> list[str]:
        if not self.compiles("model"):
            return []
        field = "sublayer_names" if compiles_halves(self.run) else "block_names"
        names: list[str] = offered(self.spec, field)(self.args)
        return names

    def compiled_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the compiled modules that are here, without those that send rows: the host reads
        how many.
        """
        from titanlite.parallel.activation_checkpoint import exchange_of

        modules = select(model, self.compiled_names)
        return {name: module for name, module in modules.items() if exchange_of(module) is None}

    # Values that follow from the run and the mesh

    @property
    def spec(self) -> ModelSpec:
        return self.run.spec

    @property
    def tp(self) -> int:
        return self.mesh["tp"].size()

    @property
    def param_dtype(self) -> torch.dtype:
        return DTYPES[self.run.training.mixed_precision_param]


def select(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return those of the named modules that this model or pipeline stage has."""
    modules = dict(model.named_modules())
    return {name: modules[name] for name in names if name in modules}
