"""What does not fit the ranks and the model, in a config without contradictions.

Here are batches, the model's own numbers and tensor parallelism, which every run passes; each
feature has its own (`titanlite.features.feature.Feature.rank_misfits` and `model_misfits`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from titanlite.config.rules import Finding, around, divisors
from titanlite.config.sections import ActivationCheckpoint, Config
from titanlite.config.text_names import BUNDLED_IDS, BUNDLED_TOKENIZER_NAME
from titanlite.config.toml import quote
from titanlite.models.spec import ModelSpec
from titanlite.run.config import RunConfig
from titanlite.run.derive import degrees_of, parallelism
from titanlite.run.interactions import uneven_sequences
from titanlite.utils import counted

_SHARD = "training.data_parallel_shard_degree"
_TP = "training.tensor_parallel_degree"
_RESHARD = "training.reshard_after_forward"


# The tokenizer


def tokenizer_misfits(run: RunConfig) -> Iterator[Finding]:
    """Check that a model with a vocabulary of its own is not trained with the bundled tokenizer."""
    vocabulary = run.model_args().vocab_size or 0
    if vocabulary > 2 * BUNDLED_IDS:
        message = (
            f"names none, and the bundled one has {BUNDLED_IDS:,} ids: {run.model.title} has a "
            f"vocabulary of {vocabulary:,}"
        )
        hint = (
            "give the model's own, which `titanlite tokenizer fetch OWNER/NAME` downloads; "
            f"{quote(BUNDLED_TOKENIZER_NAME)} takes the bundled one"
        )
        yield "needs", "model.tokenizer_path", message, hint


# The ranks


def rank_misfits(d: Config, run: RunConfig) -> Iterator[Finding]:
    """Check that the degrees of parallelism make the number of ranks.

    d: the sections as written; those of the run have -1 filled in.
    """
    ranks = run.mesh.world_size
    if d.checkpoint.create_seed_checkpoint:
        yield from _seed_misfits(ranks)
        return
    degrees = degrees_of(d)
    fixed = {key: degree for key, degree in degrees.items() if degree != -1}
    product = math.prod(fixed.values())
    has_rest = len(fixed) < len(degrees)
    if product == ranks or (has_rest and ranks % product == 0):
        return
    factors = [f"{parallelism(key)} {degree}" for key, degree in fixed.items() if degree != 1]
    equation = " * ".join(factors) or "all degrees 1"
    relation = "which does not divide" if has_rest else "which is not"
    shown = f"{equation} = {product}, {relation} the world size {ranks}"
    hint = f"run on {counted(product, 'ranks')}, or {_other_ranks(d, has_rest)}"
    divided = [key for key, degree in degrees.items() if degree > 1]
    key = divided[-1] if divided else _SHARD
    yield "ranks", key, f"the degrees do not fit the ranks: {shown}", hint


def _seed_misfits(ranks: int) -> Iterator[Finding]:
    if ranks == 1:
        return
    key = "checkpoint.create_seed_checkpoint"
    hint = (
        "start it with `python train.py …` and the same config; its degrees of parallelism may stay"
    )
    yield "ranks", key, f"is made by one process, and there are {ranks}", hint


def _other_ranks(d: Config, has_rest: bool) -> str:
    """Return what else than the product of the degrees would fit."""
    if has_rest:
        return "on a multiple of it"
    rest = "shard_degree = -1"
    if d.training.data_parallel_type == "ddp":
        rest = "replicate_degree = 1"
    return f"set training.data_parallel_{rest} for the ranks left over"


# The model


def rope_misfits(args: Any, run: RunConfig) -> Iterator[Finding]:
    """Check what RoPE tables exclude that depend on the length of the sequence."""
    scaling = getattr(args, "rope_scaling", None)
    above = getattr(scaling, "varies_above", None)
    if scaling is None or above is None or run.max_seq_len <= above:
        return
    reason = f"above {above} tokens the RoPE tables of {scaling.kind} depend on the length"
    if run.data.mask_documents:
        message = f"cannot be exact: {reason}, and a row has documents of several lengths"
        hint = 'set it to false, or take model.rope_scaling with rope_type = "yarn"'
        yield "conflict", "data.mask_documents", message, hint
    if run.sample.prompts and run.mesh.tensor * run.mesh.context > 1:
        message = f"cannot be exact: {reason}, and these ranks pad or divide a text"
        yield "conflict", "sample.prompts", message, "sample checkpoints by `titanlite sample`"


def refused_keys(args: Any, run: RunConfig) -> Iterator[Finding]:
    """Find keys that a model cannot follow, which only its own code tells (`ModelSpec.why_not`)."""
    keys = {
        "training.loss_chunks": run.training.loss_chunks > 1,
        "data.mask_documents": run.data.mask_documents,
        _TP: run.mesh.tensor > 1,
        "float8.enable_float8_linear": run.float8.enable_float8_linear,
        "parallelism.expert_parallel_degree": run.mesh.expert > 1,
        "experimental.enable_async_tensor_parallel": (
            run.experimental.enable_async_tensor_parallel
        ),
    }
    for key, is_on in keys.items():
        reason = run.spec.why_not(args, key, run.mesh.tensor) if is_on else ""
        if reason:
            yield "model", key, f"is not possible here: {reason}", "leave the key out"


# The batch


def batch_misfits(run: RunConfig) -> Iterator[Finding]:
    """Check what depends on the sizes of the mesh and of a batch."""
    yield from _reshard_misfits(run)
    yield from _early_misfits(run)
    key = "training.global_batch_size"
    yield from global_batch_misfits(run, key, run.training.global_batch_size)


def _reshard_misfits(run: RunConfig) -> Iterator[Finding]:
    """Check that groups of this many ranks can share the weights after the forward."""
    reshard = run.training.reshard_after_forward
    shards = run.mesh.weight_shards
    if not isinstance(reshard, int) or shards % reshard == 0:
        return
    message = (
        f"is {reshard}, which does not divide the {shards} ranks that share one copy of the "
        f"weights ({run.mesh.weight_shards_in_words})"
    )
    numbers = "".join(f"{number}, " for number in divisors(shards)[1:])
    hint = f'these work: {numbers}"default", "always" or "never"'
    yield "ranks", _RESHARD, message, hint


def _early_misfits(run: RunConfig) -> Iterator[Finding]:
    """Check that a step has one micro-batch where updates happen in its backward."""
    batch = max(run.legs.values(), key=lambda batch: batch.accumulation)
    if not run.optimizer.early_step_in_backward or batch.accumulation == 1:
        return
    message = f"excludes accumulation, and a step has {batch.accumulation} micro-batches"
    largest = batch.global_batch_size // batch.accumulation
    hint = (
        f"take more ranks, a larger training.batch_size, or training.global_batch_size = {largest}"
    )
    yield "batch", "optimizer.early_step_in_backward", message, hint


def global_batch_misfits(run: RunConfig, key: str, wanted: int) -> Iterator[Finding]:
    """Check that the ranks can share a global batch in whole micro-batches. wanted: -1: one of
    them.
    """
    size = run.training.batch_size
    at_once = size * run.mesh.dp_degree
    if wanted == -1 or wanted % at_once == 0:
        return
    width = counted(run.mesh.dp_degree, "data-parallel ranks")
    message = f"is {wanted}, not a multiple of batch_size {size} * {width} = {at_once}"
    hint = f"these work: global_batch_size = {around(wanted, at_once)}"
    if wanted % size == 0:
        numbers = ", ".join(map(str, divisors(wanted // size)))
        hint += f"; or one of {numbers} data-parallel ranks"
    yield "batch", key, message, hint


# The model


def recomputation_misfits(spec: ModelSpec, args: Any, d: Config) -> Iterator[Finding]:
    """Check that "every Nth block" recomputes some.

    The default may recompute none, in a model of one block.
    """
    ac = d.activation_checkpoint
    every = ac.selective_ac_option
    if ac.mode != "selective" or every in ("op", ActivationCheckpoint().selective_ac_option):
        return
    blocks = len(spec.block_names(args))
    if int(every) <= blocks:
        return
    message = f'"{every}" recomputes one block of each {every}, but the model has {blocks}'
    hint = 'take a smaller number, or "op", or set activation_checkpoint.mode = "none"'
    yield "model", "activation_checkpoint.selective_ac_option", message, hint


def tensor_misfits(args: Any, run: RunConfig) -> Iterator[Finding]:
    """Check what the ranks of tensor parallelism cannot share equally.

    A vocabulary whose size is not known yet is left out.
    """
    tensor = run.mesh.tensor
    if tensor == 1:
        return
    vocabulary = args.vocab_size or 0
    shared = {**run.spec.tensor_sizes(args), "the vocabulary": vocabulary}
    odd = [f"{name} = {number:,}" for name, number in shared.items() if number % tensor]
    if odd:
        fitting = ", ".join(map(str, divisors(math.gcd(*shared.values()))))
        hint = f"these work: {fitting}"
        if vocabulary % tensor:
            larger = -(-vocabulary // tensor) * tensor
            hint += f"; model.vocab_size = {larger} leaves {larger - vocabulary} entries unused"
        yield "divide", _TP, f"is {tensor}, which does not divide {' nor '.join(odd)}", hint
    yield from uneven_sequences(run)
