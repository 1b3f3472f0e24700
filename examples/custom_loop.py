"""A training loop of your own: torchrun --nproc_per_node 2 examples/custom_loop.py [--section.key
value ...]

`Trainer(build(config, world)).train()` is the same loop with checkpoints, validation, metrics and
the rest.
"""

import sys

from titanlite import DistEnv, build, load_config, to_device


def main(flags: list[str]) -> None:
    with DistEnv.open() as world:
        parts = build(load_config("debug_model.toml", world.size, flags), world)
        for step in range(1, parts.steps + 1):
            parts.resize(parts.course.size(step))
            batches = to_device(parts.loader.next_step(), world.device)
            result = parts.train_step(batches, step, lr=parts.learning_rate(step))
            # raises if the loss was not finite; the weights are then as before
            parts.train_step.guard.poll()
            if world.rank == 0:
                print(f"step {step}: {result.loss.item():.4f} nats per token")
        parts.close()


if __name__ == "__main__":
    main(sys.argv[1:])
