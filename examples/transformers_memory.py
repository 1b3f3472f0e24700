"""Memory of each GPU for a model of transformers_loop.py, by a step on tensors without data.

    python examples/transformers_memory.py t5-11b 24 50
    python examples/transformers_memory.py t5-11b 24 3 --keep-activations

Weights are float32, computation is in bfloat16, and blocks are recomputed and sharded fully. Each
option takes away one of the blog's optimizations.
"""

import argparse

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers_loop import MODELS

from titanlite import (
    ActivationCheckpoint,
    AnyPrecisionAdamW,
    DistEnv,
    apply_ac,
    apply_fsdp,
    groups_by_class,
)
from titanlite.cli.plan.memory_tracker import MemoryMeter
from titanlite.plan.parts import GIB, RankMemory


def batch_of(kind: str, rows: int) -> dict[str, Tensor]:
    """Return articles of 512 tokens with summaries of 150, or images."""
    if kind.startswith("t5"):
        tokens = torch.ones(rows, 512, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens[:, :150].contiguous()}
    labels = torch.ones(rows, dtype=torch.int64)
    return {"pixel_values": torch.zeros(rows, 3, 224, 224), "labels": labels}


def asked() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("gpus", type=int)
    parser.add_argument("rows", type=int, help="of each GPU")
    parser.add_argument("--keep-activations", action="store_true", help="recompute no block")
    parser.add_argument("--zero2", action="store_true", help="keep gathered weights")
    parser.add_argument("--root", action="store_true", help="gather the whole model at once")
    parser.add_argument("--float32", action="store_true", help="compute in float32")
    return parser.parse_args()


def memory_of(options: argparse.Namespace) -> RankMemory:
    """Return the memory of a step, after one that made the optimizer's state."""
    kind, ranks, rows = options.model, options.gpus, options.rows
    world = DistEnv(0, 0, ranks, torch.device("cpu"))
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = world.build_mesh(dp_shard=ranks)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, classes = MODELS[kind]()
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{kind}: {size:,} parameters")
        groups = groups_by_class(model, classes)
        blocks = [name for group in groups for name in group]
        if not options.keep_activations:
            apply_ac(model, blocks, ActivationCheckpoint(mode="full"), world.device)
        apply_fsdp(
            model,
            [] if options.root else groups,
            mesh,
            param_dtype=torch.float32 if options.float32 else torch.bfloat16,
            reshard_after_forward=False if options.zero2 else None,
            average=True,
        )
        optimizer = AnyPrecisionAdamW(model.parameters(), kahan=False)
        meter = MemoryMeter(model.train(), optimizer, blocks, "lm_head")
        with meter:
            for _ in range(2):
                meter.restart()
                loss = model(**batch_of(kind, rows)).loss
                meter.phase("backward")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return RankMemory(0, meter.moments())


if __name__ == "__main__":
    peak = memory_of(asked()).peak
    for part, size in peak.parts.items():
        print(f"{part:20}{size / GIB:7.1f} GiB")
    print(f"{'in all':20}{sum(peak.parts.values()) / GIB:7.1f} GiB")
