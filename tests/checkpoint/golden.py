"""The golden checkpoints: folders that every later titanlite must load, and how they were made.

    python -m tests.checkpoint.golden FOLDER     # writes FOLDER/step-3 as this titanlite does

golden/format-1 is of the time without hashes, format-2 of the first one with them, format-3 of the
first one that may hold weights only, format-4 of the first one that hashes tensors with XXH3. A new
format gets a folder of its own; those that are there are never written again.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import torch
from torch import nn

from titanlite.checkpoint.manager import Checkpointer
from titanlite.config.sections import Checkpoint
from titanlite.dist.dist_env import DistEnv

HERE = Path(__file__).parent / "golden"
STEP = 3
PRINTS = {"model": "golden model", "tokenizer": "golden tokenizer", "data": "golden data"}
TRAIN = {"data": {"next_sequence": 24}, "tokens_seen": 384}
CONFIG = {"toml": "[training]\nsteps = 3\n"}


class Small(nn.Module):
    """Two of a Llama's tensors under their own names: small enough to lie in a repository."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(6, 4)
        self.output = nn.Linear(4, 6, bias=False)


def expected(name: str, like: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of this name: multiples of 1/64, another row for each name."""
    first = zlib.crc32(name.encode()) % 1000
    return ((torch.arange(like.numel()) + first) / 64).reshape(like.shape).to(like.dtype)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the latter with state, as after a step."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor by the name that the checkpoint gives it."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.data
        tensors.update(
            (f"optimizer.state.{name}.{key}", value)
            for key, value in optimizer.state[parameter].items()
        )
    return tensors


def write(world: DistEnv, folder: str) -> None:
    model, optimizer = make()
    for name, tensor in named(model, optimizer).items():
        tensor.copy_(expected(name, tensor))
    torch.manual_seed(1234)
    config = Checkpoint(enable_checkpoint=True, folder=folder)
    Checkpointer(config, world, PRINTS, CONFIG).save(STEP, model, optimizer, TRAIN)


if __name__ == "__main__":
    with DistEnv.open(device_type="cpu") as this:
        write(this, sys.argv[1])
