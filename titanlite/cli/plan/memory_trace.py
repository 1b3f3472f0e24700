"""Memory of one rank by a trace.

The real model and step run at their real sizes, on tensors without data and a fake process group.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from msgspec.structs import replace as replace_fields
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.assembly.model import ModelParts, build_model, build_step
from titanlite.cli.plan.memory_tracker import MemoryMeter
from titanlite.config.errors import bad_flag, unfit
from titanlite.data.loader import Batch
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.local_parts import parts_of
from titanlite.features.context import gathered_attention as context_attention
from titanlite.features.float8 import tensor_parallel as float8_tensor
from titanlite.models import autograd, layers
from titanlite.optim import gradients
from titanlite.parallel import fsdp_one_rank, tensor
from titanlite.parallel.parallelize import ModelBuilder
from titanlite.plan.loss_ops import loss_of
from titanlite.plan.parts import VOCABULARY, RankMemory
from titanlite.run.config import RunConfig

_BY_FORMULA = "plan it by formula, without --exact"
_MEASURE = (
    'try training.mixed_precision_param = "bfloat16", or train two steps: memory_gib of '
    "metrics.jsonl is the peak"
)


def trace(run: RunConfig, rank: int = 0, device: str = "cuda") -> RankMemory:
    """Run a training step of rank `rank` without data, and return its memory by part.

    device: "cuda" or "cpu". Compiled modules run eagerly, which keeps more: the result is an upper
    bound.

    Raises ConfigError for a run that offloads to the host, or has operators that need data. Raises
    RuntimeError in a process with a default process group: the trace makes its own.
    """
    if run.training.enable_cpu_offload or run.activation_checkpoint.offload:
        message = "a trace has no host memory, and this run offloads to it"
        raise bad_flag("--exact", message, _BY_FORMULA)
    if dist.is_initialized():
        raise RuntimeError(
            "a trace makes a process group of its own, and this process has one: take another "
            "process"
        )
    compiled_loss = loss_of(run).divided == "compiled"
    run = _traced(run, device)
    with contextlib.ExitStack() as patches:
        patches.enter_context(_fake_group(run.mesh.world_size, rank, device))
        if device == "cuda":
            patches.enter_context(_like_gpu())
        if run.float8.is_mx:
            from titanlite.features.mx.package import without_kernels

            patches.enter_context(without_kernels())
        if compiled_loss:
            patches.enter_context(
                mock.patch.object(
                    tensor, "divided_cross_entropy", lambda logits, *_: _CompiledLoss.apply(logits)
                )
            )
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        world = DistEnv(rank, 0, run.mesh.world_size, torch.device("cpu"))

        vocabulary = run.model_args().vocab_size or VOCABULARY
        parts = build_model(run, world, vocabulary, functools.partial(_made, fake))
        # torch prints the tracebacks of what it cannot run without data.
        log = logging.getLogger("torch._subclasses.fake_tensor")
        patches.enter_context(mock.patch.object(log, "disabled", True))
        try:
            with fake:
                return RankMemory(rank, _measure_step(run, parts).moments())
        except RuntimeError as error:
            message = f"torch cannot run this model without data: {error}"
            raise bad_flag("--exact", message, _MEASURE) from error


def _made(fake: FakeTensorMode, builder: ModelBuilder) -> nn.Module:
    model = builder.build_on_meta()
    with fake:
        for part in parts_of(model):
            part.to_empty(device="cpu")
    return model


def _measure_step(run: RunConfig, parts: ModelParts) -> MemoryMeter:
    optimizer, step = build_step(run, parts)
    blocks = run.spec.block_names(parts.args)
    # Rows that an MoE layer sends to each of the ranks that share its experts, which are taken as
    # balanced: the host reads no other integers. Tensor-parallel ranks divide the sequence.
    ranks = run.mesh.expert
    tokens = run.tokens_at_once // run.mesh.tensor
    rows, rest = divmod(tokens * getattr(parts.args, "top_k", 1), ranks)
    if rest:
        message = f"a trace cannot divide the rows of {tokens} tokens evenly over {ranks} ranks"
        raise unfit("parallelism.expert_parallel_degree", message, _BY_FORMULA)
    rows = rows if ranks > 1 else 1
    meter = MemoryMeter(parts.model, optimizer, blocks, run.spec.head, integer=rows)
    step.phase = meter.phase
    with meter:
        trained = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        # They live as long as the step.
        averages = []
        if run.features.ema is not None:
            averages = [torch.zeros_like(one, dtype=torch.float32) for one in trained]
        for average in averages:
            meter.track(average, "optimizer")
        step.after_update()
        batches = _batches(run)
        meter.restart()
        step(batches, 2, 1e-3)
    return meter


def _traced(run: RunConfig, device: str) -> RunConfig:
    """Run eagerly, and two micro-batches at most: more add nothing."""
    accumulation = run.batch.accumulation
    if run.mesh.pipeline == 1:
        accumulation = min(accumulation, 2)
    optimizer, activations = run.optimizer, run.activation_checkpoint
    if device == "cuda" and optimizer.implementation is None:
        optimizer = replace_fields(optimizer, implementation="fused")
    if activations.mode == "budget":
        activations = replace_fields(activations, mode="none")
    return replace_fields(
        run,
        batch=replace(run.batch, accumulation=accumulation),
        optimizer=optimizer,
        activation_checkpoint=activations,
        training=replace_fields(run.training, compile=False),
        experimental=replace_fields(run.experimental, enable_async_tensor_parallel=False),
    )


def _batches(run: RunConfig) -> list[Batch]:
    rows = run.batch.micro_batch_size
    found = []
    for _ in range(run.batch.accumulation):
        tokens = torch.zeros(rows, run.rank_len, dtype=torch.int64)
        documents = None
        if run.data.mask_documents:
            documents = torch.zeros(rows, run.batch.seq_len, dtype=torch.int32)
        found.append(Batch(tokens, torch.zeros_like(tokens), documents))
    return found


@contextlib.contextmanager
def _fake_group(size: int, rank: int, device: str) -> Iterator[None]:
    """Enter a default group of `size` ranks, of which only this process exists."""
    from torch.distributed import device_mesh

    real: Any = device_mesh.new_group

    def own_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        # A group without this rank takes its time for nothing: of 4,096 ranks a mesh has thousands.
        if ranks is None or rank in ranks:
            return real(ranks, *args, **kwargs)
        return dist.GroupMember.NON_GROUP_MEMBER

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with (
            mock.patch.object(device_mesh, "new_group", own_group),
            mock.patch.object(float8_tensor, "sends_float8", lambda _: device == "cuda"),
        ):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _like_gpu() -> Iterator[None]:
    """Let the model do on CPU tensors what it does on a GPU, where the memory differs."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
        # On a GPU torch makes no tensor of a `CausalBias`.
        return layers.attend(q, k, v, None if isinstance(mask, CausalBias) else mask)

    with (
        mock.patch.object(autograd, "_RmsNorm", _FusedNorm),
        mock.patch.object(context_attention, "attend", attend),
        mock.patch.object(gradients, "_NORM_CHUNK", sys.maxsize),
        mock.patch.object(fsdp_one_rank, "casts_together", lambda _: True),
    ):
        yield


class _CompiledLoss(torch.autograd.Function):
    """The memory of a compiled loss on divided logits, of which eager code in place needs less.

    It keeps them and probabilities, beside a gradient in float32.
    """

    @staticmethod
    def forward(ctx: Any, logits: DTensor) -> torch.Tensor:
        ctx.kept, ctx.probabilities = logits, logits.to(torch.float32, copy=True)
        return ctx.probabilities.to_local().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gradient, dtype = torch.empty_like(ctx.probabilities), ctx.kept.dtype
        del ctx.kept
        result = gradient.to(dtype)
        del ctx.probabilities
        return result


class _FusedNorm(torch.autograd.Function):
    """The memory of torch's fused RMSNorm of GPUs: one number per row for the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.mean(-1, keepdim=True, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), grad.flatten(0, -2).sum(0).to(weight.dtype), None
