"""The recipe from a model's arguments to this rank's part of it: the features, their order and
their settings.

    builder = ModelBuilder(spec, args, mesh, device, training=Training(compile=True))
    model = builder.build(seed=0)
    loss = builder.loss()

Order: model on the meta device → pipeline stages → loss in chunks → float8 → tensor, context and
expert parallelism → activation checkpointing → `torch.compile` → `fully_shard` → memory → initial
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.sections import ActivationCheckpoint, Compile, Experimental, Float8, Training
from titanlite.loss import LossFunction, cross_entropy_sum, of_tokens, regularized
from titanlite.loss_chunks import chunk_head
from titanlite.models.spec import ModelSpec
from titanlite.parallel import ParallelismError, compiles_halves
from titanlite.parallel.activation_checkpoint import (
    apply_ac,
    is_by_op,
)
from titanlite.parallel.async_tp import ASYNC_OPTIONS
from titanlite.parallel.compile import CompileWatch, apply_compile, compile_loss, separate_cache
from titanlite.parallel.context import CPRank, apply_cp
from titanlite.parallel.expert import apply_ep, expert_mesh, has_exchange
from titanlite.parallel.float8 import COMPILE_OPTIONS, apply_float8, gather_as_bytes, sends_float8
from titanlite.parallel.float8_choice import Float8Choice, choose_linears, converted_names
from titanlite.parallel.fsdp import DTYPES, apply_fsdp, offloads
from titanlite.parallel.init import init_weights, materialize
from titanlite.parallel.pipeline import MicroBatchShape, Pipeline, PipelineModel, cut_stages
from titanlite.parallel.pipeline_split import SCHEDULES, find_schedule, split_stages
from titanlite.parallel.tensor import apply_tp, tensor_loss
from titanlite.parallel.wrapping import FSDPGroup, choose_groups


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
    #: Ranks that share the experts of a mixture.
    ep: int = 1

    def build(self, seed: int) -> nn.Module:
        """Build the sharded model on the device with its initial weights; no rank ever holds a full
        copy.

        With pipeline ranks: this rank's stages, in a `PipelineModel`.
        """
        model = self.build_on_meta()

        def initialize(part: nn.Module) -> None:
            init_weights(part, lambda name: self.spec.init_rule(name, self.args), seed, self.device)
            if hasattr(part, "init_buffers"):
                part.init_buffers()  # type: ignore[operator]

        offload = offloads(self.training.enable_cpu_offload, self.device.type)
        for part in model.stages.values() if isinstance(model, PipelineModel) else [model]:
            materialize(
                part, self.device, initialize, torch.device("cpu") if offload else self.device
            )
        return model

    def build_on_meta(self) -> nn.Module:
        """Build the model as `build` does, divided and sharded, but on the meta device: without
        memory or weights.
        """

        def whole() -> nn.Module:
            return self.spec.build_on_meta(self.args)

        # Groups of the whole model, so that they do not depend on where it is cut.
        policy, min_params = self.training.fsdp_units, self.training.fsdp_min_params
        groups = choose_groups(whole(), policy, min_params, self.spec.fsdp_groups(self.args))
        if self.pp == 1:
            return self.parallelize(whole(), groups)
        costs = self.offered("pipeline_costs")(self.args, self.args.max_seq_len)
        layout = split_stages(
            costs, self.pp, self.schedule, self.experimental.pipeline_parallel_split_points
        )
        stages = cut_stages(whole, layout, self.mesh.get_local_rank("pp"))
        parts = {number: self.parallelize(stage, groups) for number, stage in stages.items()}
        return PipelineModel(parts, layout, self.mesh)

    def parallelize(self, model: nn.Module, groups: Sequence[FSDPGroup]) -> nn.Module:
        """Apply every feature to a model or pipeline stage on the meta device, in place, in the
        order that works.
        """
        t, blocks = self.training, self.spec.block_names(self.args)
        if (dtype := DTYPES[t.dtype]) != torch.float32:
            for parameter in model.parameters():  # buffers keep theirs: RoPE tables need float32
                parameter.data = parameter.data.to(dtype)
        if t.loss_chunks > 1:
            chunk_head(model, t.loss_chunks, self.spec.head)
        self.apply_float8(model, self.float8.enable_fsdp_float8_all_gather)
        if self.tp > 1:
            # torch divides cross-entropy over ranks, and no other loss.
            shard_logits = t.enable_loss_parallel and self.own_loss is None
            apply_tp(model, self.offered("tensor_plan")(self.args), self.mesh["tp"], shard_logits)
        if self.cp > 1 and select(model, blocks):  # a stage may have no block
            apply_cp(model, self.mesh)
        if self.expert_mesh is not None:
            apply_ep(model, self.expert_mesh["ep"])
            mixtures = select(model, self.offered("experts")(self.args))
            if whole := [name for name, module in mixtures.items() if not has_exchange(module)]:
                raise ParallelismError(
                    f"ranks cannot share experts without an `exchange`: {', '.join(whole)}"
                )
        # Graphs hide their operators from a policy by operator, so that one is applied inside of
        # them.
        inside = self.compiled_names if is_by_op(self.activation_checkpoint) else []
        apply_ac(model, inside or blocks, self.activation_checkpoint, self.device)
        separate_cache(self.mesh, self.device)
        apply_compile(self.compiled_modules(model), self.compile.backend, self.compile_options)
        present = [tuple(select(model, group)) for group in groups]
        apply_fsdp(
            model,
            [group for group in present if group],
            self.mesh,
            param_dtype=self.param_dtype,
            reduce_dtype=DTYPES[t.mixed_precision_reduce],
            reshard_after_forward=self.reshard_after_forward,
            prefetch=t.prefetch,
            cpu_offload=t.enable_cpu_offload,
            experts=self.expert_mesh,
        )
        if self.float8.enable_fsdp_float8_all_gather and not sends_float8(self.mesh["dp_shard"]):
            gather_as_bytes(model)
        return model

    def apply_float8(self, model: nn.Module, all_gather: bool) -> None:
        if names := converted_names(self.float8_choices()):
            apply_float8(
                model,
                names,
                self.float8.recipe_name,
                all_gather=all_gather,
                emulate=self.float8.emulate,
            )

    def loss(self) -> LossFunction:
        """Return the loss function for the logits of the model, compiled if asked."""
        separate_cache(self.mesh, self.device)
        loss = (
            compile_loss(self.plain_loss, self.compile.backend)
            if self.compiles("loss")
            else self.plain_loss
        )
        return tensor_loss(loss) if self.tp > 1 else loss

    @cached_property
    def plain_loss(self) -> LossFunction:
        z_loss, smoothing = self.training.z_loss, self.training.label_smoothing
        if self.own_loss is None:
            return regularized(z_loss, smoothing) if z_loss or smoothing else cross_entropy_sum
        return of_tokens(self.own_loss)

    def pipeline(
        self,
        model: PipelineModel,
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
        rows, length = batch_size // self.microbatches, seq_len // self.cp
        args, cp = self.args, self.cp
        shape = MicroBatchShape(
            rows, length, length // self.tp, args.dim, args.vocab_size, self.param_dtype
        )

        def positions(seq_len: int) -> torch.Tensor:
            everywhere = torch.arange(seq_len * cp, device=self.device)
            return everywhere if cp == 1 else CPRank.of(self.mesh).part(everywhere, 0)

        given = positions if self.tp > 1 else None
        return Pipeline(
            model, self.schedule, shape, self.microbatches, accumulation, self.device, loss, given
        )

    # What was applied

    def float8_choices(self) -> list[Float8Choice]:
        """Decide for each kind of linear of the whole model; [] without float8."""
        if not self.float8.enable_float8_linear:
            return []
        plan = self.offered("tensor_plan")(self.args) if self.tp > 1 else {}
        return choose_linears(
            self.offered("linears")(self.args), self.float8, plan, self.tp, self.spec.head
        )

    def offered(self, feature: str) -> Callable[..., Any]:
        """Return a function of the spec.

        Raises ParallelismError if the model does not offer this feature.
        """
        if (found := getattr(self.spec, feature)) is None:
            raise ParallelismError(
                f"the model {self.spec.name} does not offer this: its ModelSpec has no {feature}"
            )
        return cast("Callable[..., Any]", found)

    def watch_compilation(self, model: nn.Module) -> CompileWatch | None:
        """Watch what is compiled; None where that is nothing."""
        modules = self.compiled_modules(model).values()
        functions = [self.plain_loss] if self.compiles("loss") else []
        return (
            CompileWatch(modules, functions, self.compile.backend) if modules or functions else None
        )

    def compiles(self, component: str) -> bool:
        """Whether `torch.compile` is applied to "model" or to "loss"."""
        return self.training.compile and component in self.compile.components

    @property
    def compiled_names(self) -> list[str]:
        """The modules of the whole model that `torch.compile` makes one graph each.

        Where ranks share experts, the host reads a number in the middle of a block. Where they
        share each product, whole blocks have wrong gradients before torch 2.13. With full
        recomputation torch cannot divide their graph: it puts a device mesh among the saved
        tensors.
        """
        if not self.compiles("model"):
            return []
        of_tensor = compiles_halves(self.activation_checkpoint, self.float8, self.experimental)
        halves = self.ep > 1 or (self.tp > 1 and of_tensor)
        names: list[str] = self.offered("sublayer_names" if halves else "block_names")(self.args)
        return names

    def compiled_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return those of `compiled_names` in this model or pipeline stage, without the experts
        that ranks share.
        """
        return {
            name: module
            for name, module in select(model, self.compiled_names).items()
            if not has_exchange(module)
        }

    # Values that follow from the sections and the mesh

    @cached_property
    def expert_mesh(self) -> DeviceMesh | None:
        return expert_mesh(self.mesh, self.ep) if self.ep > 1 else None

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
        options = dict(ASYNC_OPTIONS) if self.experimental.enable_async_tensor_parallel else {}
        if self.float8.enable_float8_linear and self.compile.backend == "inductor":
            options |= COMPILE_OPTIONS.get(self.float8.recipe_name.partition("_")[0], {})
        return options

    @property
    def param_dtype(self) -> torch.dtype:
        """Of gathered weights and of activations."""
        return DTYPES[self.training.mixed_precision_param]

    @property
    def schedule(self) -> str:
        """A name of `SCHEDULES`."""
        name = self.experimental.pipeline_parallel_schedule
        if (schedule := find_schedule(name)) is None:
            raise ParallelismError(
                f"no pipeline schedule {name!r}; there are {', '.join(SCHEDULES)}"
            )
        return schedule

    @property
    def microbatches(self) -> int:
        """Pieces of each micro-batch that go through the pipeline one by one."""
        return 1 if self.pp == 1 else self.experimental.pipeline_parallel_microbatches or self.pp

    @property
    def reshard_after_forward(self) -> bool | int | None:
        """The argument of `apply_fsdp`.

        Pipeline stages keep weights gathered between micro-batches by default.

        Raises ParallelismError if they should not, and the schedule splits the backward: weights
        that are gathered anew between its two halves are new tensors, and get no gradient without
        an error.
        """
        named: dict[Any, bool | None] = {
            "default": None if self.pp == 1 else False,
            "always": True,
            "never": False,
        }
        given = self.training.reshard_after_forward
        reshard: bool | int | None = named.get(given, given)  # type: ignore[arg-type]
        if self.pp > 1 and reshard is not False and SCHEDULES[self.schedule].splits_backward:
            raise ParallelismError(
                f"{self.schedule} needs weights that stay gathered: reshard_after_forward = False"
            )
        return reshard


def select(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return those of the named modules that this model or pipeline stage has."""
    modules = dict(model.named_modules())
    return {name: modules[name] for name in names if name in modules}
