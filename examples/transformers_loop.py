"""Other models in a loop of your own: T5 of transformers or DeepViT, sharded by block class, with
checkpoints.

    torchrun --nproc_per_node 2 examples/transformers_loop.py t5 20 outputs/t5
    # goes on at step 20, on 4 ranks
    torchrun --nproc_per_node 4 examples/transformers_loop.py t5 30 outputs/t5

Arguments: a name of MODELS, steps, folder. t5 and deepvit are tiny, with random weights and
computed data. transformers_memory.py plans the others.
"""

import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

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


def t5(layers: int, heads: int, **sizes: int) -> tuple[nn.Module, list[str]]:
    """Return an encoder-decoder and the classes of its blocks."""
    config = T5Config(num_layers=layers, num_heads=heads, dropout_rate=0.0, **sizes)
    config.decoder_start_token_id = 0
    config.use_cache = False  # a recomputed block would find its own keys in the cache
    return T5ForConditionalGeneration(config), ["T5Block"]


class DeepViTBlock(nn.Module):
    """A transformer block whose heads are mixed after the softmax (re-attention, 2103.11886)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.mix = nn.Linear(heads, heads, bias=False)
        self.mix_norm = nn.LayerNorm(heads)
        self.out = nn.Linear(dim, dim)
        self.ffn = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        mixed = self.mix_norm(self.mix(weights.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        x = x + self.out((mixed @ v).transpose(1, 2).flatten(2))
        return x + self.ffn(x)


class DeepViT(nn.Module):
    """A classifier of square images."""

    def __init__(self, dim: int, layers: int, heads: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2, dim) * 0.02)
        self.blocks = nn.Sequential(*[DeepViTBlock(dim, heads) for _ in range(layers)])
        self.head = nn.Linear(dim, 1000)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        patches = self.patches(pixel_values.to(self.patches.weight.dtype)).flatten(2)
        features = self.blocks(patches.transpose(1, 2) + self.positions)
        logits = self.head(features.mean(1))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.float(), labels))


def deepvit(*sizes: int) -> tuple[nn.Module, list[str]]:
    """Return a vision transformer and the classes of its blocks."""
    return DeepViT(*sizes), ["DeepViTBlock"]


MODELS = {
    "t5": partial(t5, 2, 4, vocab_size=64, d_model=32, d_kv=8, d_ff=64),
    "t5-3b": partial(t5, 24, 32, d_model=1024, d_kv=128, d_ff=16384),
    "t5-11b": partial(t5, 24, 128, d_model=1024, d_kv=128, d_ff=65536),
    "deepvit": partial(deepvit, 32, 2, 4, 16, 4),
    "deepvit-8b": partial(deepvit, 4096, 40, 32, 224, 16),
}


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
    model, classes = MODELS[kind]()
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
