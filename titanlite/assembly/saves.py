"""A run's checkpoints: what writes them, and after which steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlite.assembly.datasets import Datasets
from titanlite.assembly.fingerprints import fingerprints
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.schedule import SaveSchedule
from titanlite.dist.dist_env import DistEnv
from titanlite.models.args import as_record
from titanlite.run.config import RunConfig
from titanlite.runs.provenance import public_config
from titanlite.utils import public

if TYPE_CHECKING:
    from titanlite.features.ema.average import WeightAverage


@dataclass(frozen=True)
class SaveParts:
    """Parts that save a run."""

    checkpointer: Checkpointer
    schedule: SaveSchedule


def build_saves(
    run: RunConfig,
    world: DistEnv,
    args: Any,
    datasets: Datasets,
    average: WeightAverage | None,
) -> SaveParts:
    """Build what saves a run and the weights' average. All ranks call it together."""
    from titanlite.data.tokenizer.export_files import hf_files
    from titanlite.data.tokenizer.load_local import tokenizer_path

    prints = fingerprints(run.model.name, args, datasets)
    tokenizer = tokenizer_path(run.model.tokenizer_path, run.model.name)
    about: dict[str, Any] = {
        "toml": public_config(run.toml),
        "model": as_record(run.model.name, args),
        "tokenizer": {"path": public(tokenizer), "ids": datasets.tokenizer.vocab_size},
    }
    files = functools.partial(hf_files, tokenizer)
    averages = None if average is None else average.tensors
    section = run.checkpoint
    base = None
    lora = run.features.lora
    if lora is not None:
        base = lora.base(run, world, args, prints, about).load
        section = lora.checkpoint(section)
    saver, schedule = Checkpointer, SaveSchedule
    local = run.features.local_saves
    if local is not None:
        saver, schedule = local.parts()
    checkpointer = saver(section, world, prints, about, files, averages=averages, base=base)
    return SaveParts(checkpointer, schedule(section, world))
