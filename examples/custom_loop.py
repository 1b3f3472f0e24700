"""A training loop of one's own: torchrun --nproc_per_node 2 examples/custom_loop.py [--section.key value ...]"""

import sys

import torch

from titanlite.build import build
from titanlite.loss import count_valid
from titanlite.optim.schedule import learning_rate
from titanlite.parallel.dist_env import DistEnv
from titanlite.step import forward_backward


def main(flags: list[str]) -> None:
    with DistEnv.open() as world:
        plans = load_plans("debug_model.toml", world.size, flags)
        text = read_text(plans)
        parts = build(plans, world, text)
        for step in range(1, plans.train.steps + 1):
            micro_batches = to_device(parts.loader.next_step(), world.device)
            tokens = sum(count_valid(batch.labels) for batch in micro_batches)
            torch.distributed.all_reduce(tokens)

            loss = forward_backward(parts.model, micro_batches, tokens)
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), plans.optimizer.max_norm)
            for group in parts.optimizer.param_groups:
                group["lr"] = learning_rate(plans.schedule, plans.optimizer.lr, step)
            parts.optimizer.step()
            parts.optimizer.zero_grad()

            torch.distributed.all_reduce(loss)
            if world.rank == 0:
                print(f"step {step}: {loss.item():.4f} nats per token")


if __name__ == "__main__":
    main(sys.argv[1:])
