"""Whole runs of the trainer on the ranks of a pool, and what is compared of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.harness import W2
from tests.support.steps import written_rows
from tests.support.tiny import TWENTY_STEPS
from tests.support.words import listening
from titanlite import exit_codes
from titanlite.assembly.build import build
from titanlite.assembly.datasets import read_datasets
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.config.load import load_file
from titanlite.data.rows import Rows
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.signals import StopRequested
from titanlite.optim.bad_step_errors import BadStepError
from titanlite.resolve.load import resolve
from titanlite.runs.read_jsonl import read_lines
from titanlite.trainer import Trainer


def make_trainer(world: DistEnv, folder: str, *flags: str) -> Trainer:
    """A trainer as `train.py` makes it, inside the pool."""
    config = load_file("debug_model.toml", [*TWENTY_STEPS, f"--job.dump_folder={folder}", *flags])
    run = resolve(config, world.size)[1]
    return Trainer(build(run, world, read_datasets(run)))


def outcome_of(trainer: Trainer, folder: str) -> dict[str, Any]:
    """Train; how that ended, what was logged, and what is in the run's folder."""
    found: dict[str, Any] = {"error": "", "code": exit_codes.DONE}
    with listening() as said:
        try:
            trainer.train()
        except (CheckpointError, BadStepError, StopRequested) as error:
            found = {"error": str(error), "code": exit_codes.code_of(error)}
    found["rows"] = written_rows(trainer.parts.world, folder)
    found["events"] = read_lines(Path(folder) / "guard.jsonl")
    return {**found, "said": said, "step": trainer.step}


def train_run(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    """Train as `train.py` would, inside the pool."""
    return outcome_of(make_trainer(world, folder, *flags), folder)


def losses_of(rows: list[dict[str, Any]]) -> dict[int, tuple[float, float, float]]:
    return {
        row["step"]: (row["loss"], row["grad_norm"], row["lr"]) for row in rows if "loss" in row
    }


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


#: Sequences per step.
GLOBAL = 8


def poisoned_run(
    world: DistEnv, folder: str, poison: dict[int, float], *flags: str
) -> dict[str, Any]:
    """Train; on the last rank, in these steps of the data order, an activation (by NaN) or the
    logits are scaled.
    """
    trainer = make_trainer(world, folder, "--no-validation.enable", *flags)
    model = trainer.parts.model

    def spoil(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        factor = poison.get(trainer.parts.loader.state_dict()["next_sequence"] // GLOBAL)
        mine = (
            factor is not None
            and world.rank == world.size - 1
            and (module is model) == math.isfinite(factor)
        )
        return out * factor if mine else out

    for module in (model, model.get_submodule(W2)):
        module.register_forward_hook(spoil)
    documents = {str(n): names_in(trainer.parts.datasets.train, n) for n in range(12 * GLOBAL)}
    return {**outcome_of(trainer, folder), "documents": documents}


def names_in(rows: Rows, index: int) -> list[Any]:
    return [name for name, _ in rows.documents_in(index)]


#: Ways to divide a run: its ranks and flags.
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "TP 2": (2, ("--training.tensor_parallel_degree=2",)),
    "FSDP 2": (2, ()),
    "replicas 2": (2, ("--training.data_parallel_replicate_degree=2",)),
    "PP 2": (2, ("--experimental.pipeline_parallel_degree=2",)),
    "FSDP 2, TP 2": (4, ("--training.tensor_parallel_degree=2",)),
}


def on_each_layout(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with the arguments `ranks` and `flags` on each of `LAYOUTS`; two are quick."""
    cases = pytest.mark.parametrize(("ranks", "flags"), LAYOUTS.values(), ids=LAYOUTS)
    return pytest.mark.slow_after(2)(cases(test))


def of_whole_weights(
    model: nn.Module, number: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, float]:
    """Return parameter → `number` of the whole tensor in float64, on any layout.

    All ranks call it together. A rank of a pipeline has the parameters of its own stages.
    """
    found = {}
    for name, weight in model.named_parameters():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        found[name] = number(whole.detach().double()).item()
    return found
