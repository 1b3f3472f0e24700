"""With offload, parameters, gradients and optimizer state are in host memory, and training is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.steps import train_step
from tests.training.harness import TINY, Run, batches, build_tiny, full_precision, micro_batches, train
from titanlite.config.sections import Training
from titanlite.data.loader import to_device
from titanlite.guard import FiniteGuard
from titanlite.parallel.dist_env import DistEnv

STEPS = 5
TOKENS, LABELS = batches(STEPS, 4, 32, 192)
RUN = Run(TOKENS, LABELS, [1e-3] * STEPS, accumulation=2)
OFFLOADED = replace(RUN, training=full_precision(enable_cpu_offload=True))


def _locals(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


@pytest.mark.parametrize("implementation", [None, "foreach"])
def test_training_is_the_same(world: DistEnv, implementation: str | None) -> None:
    on_device = train(world, RUN)
    offloaded = train(world, replace(OFFLOADED, implementation=implementation))
    assert offloaded.losses == pytest.approx(on_device.losses, abs=5e-6)
    assert offloaded.norms == pytest.approx(on_device.norms, rel=1e-4)
    for name, weight in on_device.weights.items():
        difference = offloaded.weights[name].cpu() - weight.cpu()
        assert (difference.norm() / weight.cpu().norm()).item() < 1e-4, name


def test_state_is_on_the_host_and_computation_on_the_device(world: DistEnv) -> None:
    model, optimizer, rank = build_tiny(world, OFFLOADED)
    data = to_device(micro_batches(OFFLOADED, 0, rank, world.size), world.device)
    assert model(data[0].tokens).device.type == "cuda"
    gradients: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.extend(p.grad for p in model.parameters()))
    train_step(model, optimizer, data, step=1, lr=1e-3, max_norm=1.0, guard=FiniteGuard(world.device))
    parameters = _locals(list(model.parameters()))
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    assert len(gradients) == len(parameters) and len(state) == 3 * len(parameters)
    assert {t.device.type for t in (*parameters, *_locals(gradients), *_locals(state))} == {"cpu"}
    assert all(t.is_pinned() for t in parameters)
    assert {b.device.type for b in model.buffers()} == {"cuda"}


def test_the_device_holds_no_weights_between_steps(world: DistEnv) -> None:
    wide = replace(OFFLOADED, args=replace(TINY, dim=512, n_layers=4))
    before = torch.cuda.memory_allocated()
    model, _, _ = build_tiny(world, wide)
    size = sum(p.numel() for p in model.parameters()) * 4
    assert torch.cuda.memory_allocated() - before < 0.05 * size


def test_a_bad_gradient_changes_no_weight(world: DistEnv) -> None:
    model, optimizer, rank = build_tiny(world, replace(OFFLOADED, training=Training(enable_cpu_offload=True)))
    data = to_device(micro_batches(OFFLOADED, 0, rank, world.size), world.device)
    before = [p.clone() for p in _locals(list(model.parameters()))]
    block = model.get_submodule("layers.1")

    def spoil(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * float("inf")

    block.register_forward_hook(spoil)
    guard = FiniteGuard(world.device)
    train_step(model, optimizer, data, step=1, lr=1e-3, max_norm=1.0, guard=guard)
    assert bool(guard._tripped)
    assert all(map(torch.equal, before, _locals(list(model.parameters()))))
