"""Models of transformers in a loop of your own: T5 or ViT, sharded by block class, with
checkpoints.

    torchrun --nproc_per_node 2 examples/transformers_loop.py t5 20 outputs/t5
    # goes on at step 20, on 4 ranks
    torchrun --nproc_per_node 4 examples/transformers_loop.py t5 30 outputs/t5

Arguments: t5 or vit, steps, folder. The models are tiny, with random weights; the data are
computed.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification

from titanlite import (
    ActivationCheckpoint,
    AnyPrecisionAdamW,
    Checkpoint,
    Checkpointer,
    DistEnv,
    apply_ac,
    apply_fsdp,
    groups_by_class,
)

BATCH = 8  # of all ranks


def t5() -> tuple[nn.Module, list[str]]:
    """Return an encoder-decoder and the classes of its blocks."""
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    config.use_cache = False  # a recomputed block would find its own keys in the cache
    return T5ForConditionalGeneration(config), ["T5Block"]


def vit() -> tuple[nn.Module, list[str]]:
    """Return a vision transformer and the classes of its blocks."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    return ViTForImageClassification(
        ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=4)
    ), ["ViTLayer"]


def batch_of(kind: str, step: int) -> dict[str, Tensor]:
    """Return the whole batch of a step, the same on every rank: copied words, or images with a
    brighter quarter.
    """
    generator = torch.Generator().manual_seed(step)
    if kind == "t5":
        words = torch.randint(2, 64, (BATCH, 12), generator=generator)
        return {"input_ids": words, "labels": words[:, :6].contiguous()}
    labels = torch.randint(4, (BATCH,), generator=generator)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 8 * (label // 2) :, 8 * (label % 2) :][:, :8, :8] += 2
    return {"pixel_values": images, "labels": labels}


def train(world: DistEnv, kind: str, steps: int, folder: str) -> Iterator[tuple[int, float]]:
    """Train up to `steps`, from the newest checkpoint in `folder` if there is one; yield step and
    mean loss.
    """
    torch.manual_seed(0)  # every rank builds the same weights, and then keeps its part
    model, classes = {"t5": t5, "vit": vit}[kind]()
    mesh = world.build_mesh(dp_shard=world.size)
    groups = groups_by_class(model, classes)
    apply_ac(
        model,
        [name for group in groups for name in group],
        ActivationCheckpoint(mode="full"),
        world.device,
    )
    apply_fsdp(model, groups, mesh, param_dtype=torch.float32, average=True)
    model.to(world.device).train()
    optimizer = AnyPrecisionAdamW(model.parameters(), lr=3e-3, kahan=False)

    checkpoints = Checkpointer(Checkpoint(folder=folder), world, {"model": kind})
    state = checkpoints.load(model, optimizer)
    for step in range(state.step + 1 if state else 1, steps + 1):
        rows = slice(world.rank * BATCH // world.size, (world.rank + 1) * BATCH // world.size)
        batch = {
            name: tensor[rows].to(world.device) for name, tensor in batch_of(kind, step).items()
        }
        loss = model(**batch).loss  # a mean: all ranks have as many rows
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world.size
        torch.distributed.all_reduce(mean)
        yield step, mean.item()
    checkpoints.save(steps, model, optimizer, train={})
    checkpoints.close()


if __name__ == "__main__":
    kind, steps, folder = sys.argv[1:]
    with DistEnv.open() as world:
        for step, loss in train(world, kind, int(steps), folder):
            if world.rank == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)
