"""What a forward and backward pass has on the GPU at its peak."""

from __future__ import annotations

import torch

from tests.training.harness import Run, build_tiny, micro_batches
from titanlite.data.loader import to_device
from titanlite.parallel.dist_env import DistEnv


def peak_and_gradients(world: DistEnv, run: Run) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes at the peak of a second pass over the run's first micro-batch, less what was there before; its gradients,
    whole, by name."""
    model, _, rank = build_tiny(world, run)
    data = to_device(micro_batches(run, 0, rank, world.size), world.device)
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(data[0].tokens).float().logsumexp(-1).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
    return peak, {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
