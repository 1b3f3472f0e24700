"""A run's model on this rank, with what runs it, its optimizer and its step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.dist.dist_env import DistEnv
from titanlite.loss import LossFunction
from titanlite.optim.guard import FiniteGuard
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.init import seed_generators
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.run.config import RunConfig
from titanlite.run.features import moe_layers_of
from titanlite.step import PlainRunner, ReplicationFactors, Runner, TrainStep
from titanlite.utils import is_dotted

if TYPE_CHECKING:
    from titanlite.features.experts import MoELayers


@dataclass(frozen=True)
class ModelParts:
    """A model with initial weights on this rank, and what runs it."""

    mesh: DeviceMesh
    #: The model's arguments.
    args: Any
    builder: ModelBuilder
    model: nn.Module
    runner: Runner
    factors: ReplicationFactors
    moe_layers: MoELayers | None


def build_model(
    run: RunConfig,
    world: DistEnv,
    tokenizer_size: int,
    make: Callable[[ModelBuilder], nn.Module] | None = None,
) -> ModelParts:
    """Build the model as the run divides it. All ranks call it together.

    `make` returns the builder's model with memory; None takes initial weights of the run's seed.
    """
    degrees = run.mesh
    args = run.model_args(tokenizer_size)
    if run.training.compile:
        from titanlite.parallel.compile import prepare_compile

        prepare_compile(run.compile.backend, world.device.type, run.compile.cache_dir)
    mesh = world.build_mesh(**degrees.dimensions)
    builder = _builder(run, args, mesh, world.device)
    async_tp = run.features.async_tp
    if async_tp is not None:
        async_tp.enable(mesh)
    model = builder.build(run.training.seed) if make is None else make(builder)
    world.apply_timeout()
    runner = _runner(run, builder, model, builder.loss())
    # These are torch's own generators: the weights and the data order have theirs.
    seed_generators(run.training.seed, mesh)
    moe_layers = moe_layers_of(run.spec, args)
    if moe_layers is not None:
        moe_layers.set_step_tokens(model, run.batch.tokens_per_step)
    factors = ReplicationFactors(degrees.tensor * degrees.pipeline, degrees.tensor)
    return ModelParts(mesh, args, builder, model, runner, factors, moe_layers)


def _builder(run: RunConfig, args: Any, mesh: DeviceMesh, device: torch.device) -> ModelBuilder:
    own_loss = None
    if is_dotted(run.training.loss):
        from titanlite.config.own_functions import load_function

        own_loss = load_function("training.loss", run.training.loss)
    return ModelBuilder(run, args, mesh, device, own_loss)


def _runner(run: RunConfig, builder: ModelBuilder, model: nn.Module, loss: LossFunction) -> Runner:
    pipeline = run.features.pipeline
    if pipeline is not None:
        return pipeline.runner(builder, model, loss)
    return PlainRunner(model, loss, run.training.gradient_sync == "every")


def build_step(run: RunConfig, parts: ModelParts) -> tuple[torch.optim.Optimizer, TrainStep]:
    """Build the optimizer and the step of a model."""
    model = parts.model
    device = parts.builder.device
    blocks = run.spec.block_names(parts.args)
    parameters = dict(model.named_parameters())
    if run.lora.rank:
        parameters = {name: one for name, one in parameters.items() if one.requires_grad}
    mup = run.features.mup
    scales = None if mup is None else mup.scales(run.spec, parts.args)
    optimizer = build_optimizer(parameters, run.optimizer, device, blocks, scales)
    policy = run.guard
    guard = FiniteGuard(device, policy.policy, policy.max_skips, policy.spike_sigmas, policy.window)
    train_step = TrainStep(
        model, optimizer, parts.runner, guard, run.training.max_norm, parts.factors
    )
    if run.optimizer.early_step_in_backward:
        from titanlite.optim.in_backward import StepInBackward

        train_step.in_backward = StepInBackward(model, optimizer)
        train_step.guard.applied = True
    if parts.moe_layers is not None:
        train_step.balance = parts.moe_layers.balance(run, parts.args, model, device)
    float8 = run.features.float8
    if float8 is not None:
        train_step.after_update = float8.after_update(model, parts.mesh)
    return optimizer, train_step
