"""With offload, parameters, gradients and optimizer state are in host memory, and training is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.training.harness import Run, batches, full_precision, stepper, train
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
    model, optimizer, take = stepper(world, OFFLOADED)
    assert model(TOKENS[0].to(world.device)).device.type == "cuda"
    gradients: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.extend(p.grad for p in model.parameters()))
    take(1)
    parameters = _locals(list(model.parameters()))
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    assert len(gradients) == len(parameters) and len(state) == 3 * len(parameters)
    assert {t.device.type for t in (*parameters, *_locals(gradients), *_locals(state))} == {"cpu"}
    assert all(t.is_pinned() for t in parameters)
    assert {b.device.type for b in model.buffers()} == {"cuda"}
