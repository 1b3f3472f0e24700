"""Rules of a model on its ranks: arguments and sizes that a run cannot follow or divide.

Each feature has its own (`titanlite.run.features.Feature.model_problems`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from titanlite.config.dataset_registry import BUNDLED_IDS, BUNDLED_TOKENIZER_NAME
from titanlite.config.errors import Problem
from titanlite.config.rules import divisors
from titanlite.config.sections import ActivationCheckpoint
from titanlite.config.toml import quote
from titanlite.run.config import RunConfig
from titanlite.run.interactions import halving_key, uneven_sequences

_TP = "training.tensor_parallel_degree"


def tokenizer_problems(run: RunConfig) -> Iterator[Problem]:
    """Check that a model with its own vocabulary is not trained with the bundled tokenizer."""
    vocabulary = run.model_args().vocab_size or 0
    if vocabulary > 2 * BUNDLED_IDS:
        message = (
            f"names none, and the bundled one has {BUNDLED_IDS:,} ids: {run.model.title} has a "
            f"vocabulary of {vocabulary:,}"
        )
        remedy = (
            "give the model's own, as `hf download OWNER/NAME --include 'tokenizer*' --local-dir "
            "FOLDER` fetches it; "
            f"{quote(BUNDLED_TOKENIZER_NAME)} takes the bundled one"
        )
        yield Problem("needs", "model.tokenizer_path", message, remedy)


def _keys(run: RunConfig, args: Any) -> Iterator[Problem]:
    """Check the keys that this model cannot follow, and that "every Nth block" recomputes some.

    The default of that may recompute none in one block.
    """
    ac = run.activation_checkpoint
    keys = {
        "training.loss_chunks": run.training.loss_chunks > 1,
        "data.mask_documents": run.data.mask_documents,
        "activation_checkpoint.selective_ac_option": ac.by_op,
    }
    for key, is_on in keys.items():
        reason = run.spec.why_not(args, key) if is_on else ""
        if reason:
            yield Problem("model", key, f"is not possible here: {reason}", "leave the key out")
    every = ac.selective_ac_option
    blocks = len(run.spec.block_names(args))
    is_chosen = every not in ("op", ActivationCheckpoint().selective_ac_option)
    if ac.mode == "selective" and is_chosen and int(every) > blocks:
        message = f'"{every}" recomputes one block of each {every}, but the model has {blocks}'
        remedy = 'take a smaller number, or "op", or set activation_checkpoint.mode = "none"'
        yield Problem("model", "activation_checkpoint.selective_ac_option", message, remedy)


def tensor_problems(run: RunConfig, args: Any) -> Iterator[Problem]:
    """Check what tensor-parallel ranks cannot share equally; an unknown vocabulary is left out."""
    tensor = run.mesh.tensor
    if tensor == 1:
        return
    vocabulary = args.vocab_size or 0
    shared = {**run.spec.tensor_sizes(args), "the vocabulary": vocabulary}
    odd = [f"{name} = {number:,}" for name, number in shared.items() if number % tensor]
    if odd:
        fitting = ", ".join(map(str, divisors(math.gcd(*shared.values()))))
        remedy = f"these work: {fitting}"
        if vocabulary % tensor:
            larger = -(-vocabulary // tensor) * tensor
            remedy += f"; model.vocab_size = {larger} leaves {larger - vocabulary} entries unused"
        yield Problem(
            "divide", _TP, f"is {tensor}, which does not divide {' nor '.join(odd)}", remedy
        )
    yield from uneven_sequences(run)


def _not_offered(run: RunConfig, args: Any) -> Iterator[Problem]:
    #: Field of the spec → the key that needs it.
    fields: dict[str, str] = {}
    if run.mesh.tensor > 1:
        fields["tensor_plan"] = _TP
    halving = halving_key(run)
    if halving is not None:
        fields["sublayer_names"] = halving
    for feature in run.features.on:
        if feature.model_field:
            fields[feature.model_field] = feature.key
    for field, key in fields.items():
        if getattr(run.spec, field):
            continue
        beside = " together with training.compile" if field == "sublayer_names" else ""
        message = (
            f"is not supported by the model {run.model.name}{beside}: its ModelSpec has no {field}"
        )
        yield Problem("model", key, message, "leave the key out, or add it to the model")


def group_problems(run: RunConfig, names: Sequence[str]) -> Iterator[Problem]:
    """Find patterns of `[[optimizer.groups]]` that match no parameter's name."""
    for index, group in enumerate(run.optimizer.groups):
        if any(re.search(group.pattern, name) for name in names):
            continue
        message = f"{group.pattern!r} is found in no parameter's name"
        hint = f"names are such as {', '.join(names[:2])}, {names[-1]}"
        yield Problem("does-not-fit", f"optimizer.groups[{index}].pattern", message, hint)


def _at_hf(run: RunConfig, args: Any) -> Iterator[Problem]:
    """Check the form for Hugging Face of saves, and patterns by its names of parameters."""
    saves = run.checkpoint
    is_needed = saves.enable_checkpoint and (saves.last_save_in_hf or saves.hub)
    if not is_needed and not run.optimizer.groups:
        return
    from titanlite.checkpoint.hf_files import hf_form

    try:
        # The vocabulary may be known only when the tokenizer is read.
        names, _ = hf_form(run.spec, replace(args, vocab_size=args.vocab_size or BUNDLED_IDS))
    except ValueError as error:
        key = "checkpoint.hub" if saves.hub else "checkpoint.last_save_in_hf"
        if is_needed:
            yield Problem("model", key, str(error), "leave the key out")
    else:
        yield from group_problems(run, [*names])


ModelRule = Callable[[RunConfig, Any], Iterable[Problem]]
#: Rules of a run and its model's arguments.
RULES: tuple[ModelRule, ...] = (_not_offered, _keys, _at_hf)
