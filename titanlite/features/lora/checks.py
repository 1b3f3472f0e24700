"""Needs of adapters: other keys, and the model on its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.config.rules import Rule, is_set, several
from titanlite.config.toml import quote
from titanlite.features.lora.settings import (
    ALL,
    candidates,
    is_target,
    names_at_hf,
)
from titanlite.models.spec import names_like

if TYPE_CHECKING:
    from titanlite.run.config import RunConfig

RANK = "lora.rank"
TARGETS = "lora.targets"
_TP = "training.tensor_parallel_degree"
_PP = "experimental.pipeline_parallel_degree"

NEEDS = [
    Rule(
        RANK,
        bool,
        "checkpoint.initial_load_path",
        is_set,
        "name the weights that the adapters belong to: a checkpoint, or a folder of Hugging Face's",
    ),
]
EXCLUDES = [
    Rule(RANK, bool, _TP, several, "adapters are small: shard the model by FSDP"),
    Rule(RANK, bool, _PP, several, "adapters are small: shard the model by FSDP"),
    Rule(
        RANK,
        bool,
        "float8.enable_float8_linear",
        True,
        "frozen weights are in training.mixed_precision_param",
    ),
    Rule(
        RANK,
        bool,
        "checkpoint.initial_load_model_only",
        False,
        "the frozen weights are all that is taken from there",
    ),
    Rule(
        RANK,
        bool,
        "checkpoint.last_save_in_hf",
        True,
        "`titanlite export` merges adapters into such a folder",
    ),
    Rule(
        RANK,
        bool,
        "checkpoint.create_seed_checkpoint",
        True,
        "new adapters are the same on any ranks",
    ),
    Rule(
        RANK,
        bool,
        "optimizer.early_step_in_backward",
        True,
        "gradients of adapters take little memory",
    ),
]


def problems(run: RunConfig, args: Any) -> Iterator[Problem]:
    """Find targets that the model does not have."""
    args = replace(args, vocab_size=args.vocab_size or 1)
    sizes = candidates(run.spec, args)
    theirs = names_at_hf(run.spec, args)
    known = [*sizes, *(theirs[name] for name in sizes if name in theirs)]
    words = dict.fromkeys(name.rpartition(".")[2] for name in known)
    for entry in run.lora.targets:
        if any(is_target(entry, name, theirs.get(name, "")) for name in sizes):
            continue
        message = f"{quote(entry)} is the end of no linear's name"
        if is_target(entry, run.spec.head, theirs.get(run.spec.head, "")):
            message = f"{quote(entry)} is the head, which gets no adapter"
        yield Problem("unknown-value", TARGETS, message, names_like(entry, [*words, ALL]))
