"""A training loop of one's own over titanlite's pieces.

torchrun --nproc_per_node 2 examples/custom_loop.py [--section.key value ...]
"""

import sys

import torch

import titanlite


def main(flags: list[str]) -> None:
    with titanlite.World.open() as world:
        plans = titanlite.load_plans("debug_model.toml", world.size, flags)
        tokenizer, dataset = titanlite.read_text(plans)
        parts = titanlite.build(plans, world, tokenizer, dataset)
        for step in range(1, plans.train.steps + 1):
            micro_batches = titanlite.to_device(parts.loader.next_step(), world.device)
            tokens = sum(titanlite.count_valid(batch.labels) for batch in micro_batches)
            torch.distributed.all_reduce(tokens)

            loss = titanlite.forward_backward(parts.model, micro_batches, tokens)
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), plans.optimizer.max_norm)
            for group in parts.optimizer.param_groups:
                group["lr"] = titanlite.learning_rate(plans.schedule, plans.optimizer.lr, step)
            parts.optimizer.step()
            parts.optimizer.zero_grad()

            torch.distributed.all_reduce(loss)
            if world.rank == 0:
                print(f"step {step}: {loss.item():.4f} nats per token")


if __name__ == "__main__":
    main(sys.argv[1:])
