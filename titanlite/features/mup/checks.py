"""Needs of muP: other keys, and the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.config.rules import Rule
from titanlite.features.mup.base import base_args, head_width
from titanlite.features.mup.rules import Rules
from titanlite.models.llama import LlamaArgs
from titanlite.models.spec import ShapeError
from titanlite.utils import is_dotted

if TYPE_CHECKING:
    from titanlite.run.config import RunConfig

KEY = "mup.base_dim"
TABLE = "mup.base"


EXCLUDES = [
    Rule(KEY, bool, "lora.rank", bool, "adapters beside frozen weights have rules of their own"),
    Rule(
        KEY,
        bool,
        "optimizer.name",
        is_dotted,
        "its rules are for AdamW, Adam, AnyPrecisionAdamW and Muon",
    ),
]


def adam_decays(name: str, decay: float) -> Iterator[Problem]:
    """Find weight decay that is added to the gradient: no rate keeps it in proportion."""
    if name == "Adam" and decay > 0:
        message = 'excludes optimizer.weight_decay with optimizer.name = "Adam"'
        yield Problem(
            "conflict", KEY, message, 'take "AdamW", whose decay is decoupled, or no decay'
        )


def problems(run: RunConfig, args: Any) -> Iterator[Problem]:
    """Find a base model that cannot be, and a model that has no rules."""
    if is_dotted(run.model.name) or not isinstance(args, LlamaArgs):
        message = f"has no rules for the matrices of model.name = {run.model.name!r}"
        yield Problem("model", KEY, message, "leave it out, or take a family of titanlite")
        return
    try:
        base = base_args(args, run.mup.base_dim, run.mup.base)
    except ShapeError as error:
        for problem in error.problems:
            key = f"{TABLE}.{problem.key}" if problem.key else KEY
            message = f"makes no base model: {problem.message}"
            yield Problem("model", key, message, problem.remedy)
        return
    rules = Rules(run.spec, args, base)
    yield from _decayed_offsets(run, rules)
    are_wider = head_width(args) != head_width(base)
    if are_wider and getattr(args, "unit_qk", False):
        message = "scales scores by queries, and unit_qk divides these by their size"
        yield Problem(
            "conflict", KEY, message, "take heads of one width, or model.overrides.unit_qk = false"
        )


def _decayed_offsets(run: RunConfig, rules: Rules) -> Iterator[Problem]:
    """Decay would draw a factor of 1 + weight to 1, whatever muP makes it."""
    optimizer = run.optimizer
    if optimizer.no_decay_on_norms:
        return
    for name in rules.offset_gains():
        decay = optimizer.weight_decay
        for group in optimizer.groups:
            if re.search(group.pattern, name):
                decay = decay if group.weight_decay is None else group.weight_decay
                break
        if decay:
            message = f"scales {name}, whose factor is 1 + weight: decay would draw it to 1"
            yield Problem("conflict", KEY, message, "set optimizer.no_decay_on_norms = true")
            return
