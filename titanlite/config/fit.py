"""Check the third stage of a config: what does not fit the number of ranks and the model. No torch here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from titanlite.config.checks import Finding, around, divisors, lengths, placed, some
from titanlite.config.dialect import Dialect
from titanlite.config.errors import Problem, nearest
from titanlite.config.job import JobConfig
from titanlite.config.pipeline import SCHEDULES
from titanlite.config.schema import quote
from titanlite.config.sections import AUTO_FILTER
from titanlite.models.llama.plan import linears, pipeline_costs, tensor_plan
from titanlite.models.shapes import SHAPES, LlamaArgs, ShapeError
from titanlite.models.spec import Size
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.config.derive import RunConfig
    from titanlite.parallel.float8_choice import Choice

_PP = "experimental.pipeline_parallel_"
_TP, _CP = "training.tensor_parallel_degree", "experimental.context_parallel_degree"
_AC_OPTION = "activation_checkpoint.selective_ac_option"


def misfits(config: JobConfig, run: RunConfig) -> list[Problem]:
    """Return all that does not fit the number of ranks and the model, for a config without contradictions.

    A model that cannot be built, or degrees that do not fit the ranks, say nothing of the rest: it is not checked then.
    """
    found: list[Finding] = list(_rank_misfits(config.dialect, run))
    if not found:
        found += _batch_misfits(config.dialect, run)
    try:
        args = run.model_args()
    except ShapeError as error:
        return placed(config, iter(found)) + _model_problems(config, error)
    option = config.is_given(_AC_OPTION) or config.is_given("activation_checkpoint.mode")
    if option and (problem := useless_selective_checkpoint(config.dialect)):
        hint = 'take a smaller number, or "op", or set activation_checkpoint.mode = "none"'
        found.append(("model", _AC_OPTION, problem, hint))
    if not any(code == "ranks" for code, *_ in found):
        found += [*tensor_misfits(args, run), *_stage_misfits(args, run), *_float8_misfits(args, run)]
    return placed(config, iter(found))


def _model_problems(config: JobConfig, error: ShapeError) -> list[Problem]:
    """Return what is wrong with the model's arguments."""
    given = [source.place for key, source in config.sources.items() if key.startswith("model.")]
    problems = []
    for misfit in error.misfits:
        key = f"model.{misfit.field}" if misfit.field else "model"
        place = config.place(key) or (given[-1] if given else "")
        problems.append(Problem(place, key, misfit.message, misfit.advice, code="model"))
    return problems


def degrees_of(d: Dialect) -> dict[str, int]:
    """Return the dimensions of the mesh by key; one of data parallelism may be -1 for the ranks left over."""
    replicate, shard = d.training.data_parallel_replicate_degree, d.training.data_parallel_shard_degree
    if d.training.data_parallel_type == "ddp":
        replicate, shard = replicate if replicate > 1 else -1, 1
    return {
        "training.data_parallel_replicate_degree": replicate,
        "training.data_parallel_shard_degree": shard,
        _TP: d.training.tensor_parallel_degree,
        f"{_PP}degree": d.experimental.pipeline_parallel_degree,
        _CP: d.experimental.context_parallel_degree,
    }


def parallelism(key: str) -> str:
    """Return the name of a dimension of the mesh, by the key of its degree."""
    return key.rpartition(".")[2].removesuffix("_degree")


def _rank_misfits(d: Dialect, run: RunConfig) -> Iterator[Finding]:
    size = run.mesh.world_size
    if d.checkpoint.create_seed_checkpoint:
        if size > 1:
            hint = "start it with `python train.py …` and the same config, whatever its degrees of parallelism"
            yield "ranks", "checkpoint.create_seed_checkpoint", f"is made by one process, and there are {size}", hint
        return
    degrees = degrees_of(d)
    fixed = {key: degree for key, degree in degrees.items() if degree != -1}
    product, rest = math.prod(fixed.values()), len(fixed) < len(degrees)
    if product == size or rest and size % product == 0:
        return
    equation = " * ".join(f"{parallelism(key)} {degree}" for key, degree in fixed.items() if degree != 1)
    shown = f"{equation or 'all degrees 1'} = {product}"
    relation = "which does not divide" if rest else "which is not"
    key = next((key for key, degree in reversed(degrees.items()) if degree > 1), "training.data_parallel_shard_degree")
    open_key = "replicate_degree = 1" if d.training.data_parallel_type == "ddp" else "shard_degree = -1"
    other = "a multiple of it" if rest else f"set training.data_parallel_{open_key} for the ranks left over"
    message = f"the degrees do not fit the ranks: {shown}, {relation} the world size {size}"
    yield "ranks", key, message, f"run on {counted(product, 'ranks')}, or {'on ' if rest else ''}{other}"


def _batch_misfits(d: Dialect, run: RunConfig) -> Iterator[Finding]:
    t, mesh, batch = d.training, run.mesh, run.batch
    reshard, shards = t.reshard_after_forward, mesh.weight_shards
    if isinstance(reshard, int) and shards % reshard:
        which = f"data_parallel_shard{' * context_parallel' if mesh.context > 1 else ''}"
        numbers = f"{some(divisors(shards)[1:])}, or " if shards > 1 else ""
        message = f"is {reshard}, which does not divide the {shards} ranks that share one copy of the weights ({which})"
        hint = f'these work: {numbers}"default", "always" or "never"'
        yield "ranks", "training.reshard_after_forward", message, hint
    if t.global_batch_size not in (-1, batch.global_batch_size):
        at_once, width = t.batch_size * mesh.dp_degree, counted(mesh.dp_degree, "data-parallel ranks")
        message = f"is {t.global_batch_size}, not a multiple of batch_size {t.batch_size} * {width} = {at_once}"
        yield (
            "batch",
            "training.global_batch_size",
            message,
            _batch_advice(t.global_batch_size, t.batch_size, mesh.dp_degree),
        )
    elif mesh.pipeline > 1:
        yield from _microbatch_misfits(run)


def _microbatch_misfits(run: RunConfig) -> Iterator[Finding]:
    """Check how many micro-batches a pipeline has in a step."""
    degree, pieces, name = run.mesh.pipeline, run.pipeline.microbatches, run.experimental.pipeline_parallel_schedule
    total = pieces * run.batch.accumulation
    rounds = max(1, total // degree)
    number = (
        f"is {pieces}, which makes {total} micro-batches per step ({pieces} * accumulation {run.batch.accumulation})"
    )
    if name == "1F1B" and total < degree:
        message = f"{number}, and 1F1B needs one for each of the {degree} stages at least"
        yield "batch", f"{_PP}microbatches", message, f'give {degree} or more, or take the schedule "GPipe"'
    if name.startswith("Interleaved") and total % rounds:
        message = f"{number}; {name} runs them in {rounds} rounds of equal size over {degree} ranks"
        yield "batch", f"{_PP}microbatches", message, f"give a multiple of {degree}"


def useless_selective_checkpoint(d: Dialect) -> str:
    """Return why "every Nth block" recomputes none: the model has fewer blocks. Empty where it has enough."""
    ac, shape = d.activation_checkpoint, SHAPES.get(d.model.name, {}).get(d.model.flavor)
    blocks = d.model.overrides.get("n_layers", shape and shape.n_layers)
    if ac.mode != "selective" or ac.selective_ac_option == "op" or not isinstance(blocks, int):
        return ""
    every = int(ac.selective_ac_option)
    return f'"{every}" recomputes one block of each {every}, but the model has {blocks}' if every > blocks else ""


def tensor_misfits(args: LlamaArgs, run: RunConfig) -> Iterator[Finding]:
    """Check what the ranks of tensor parallelism cannot share equally; a vocabulary that is unknown yet is left out."""
    tensor, context = run.mesh.tensor, run.mesh.context
    if tensor == 1:
        return
    vocabulary = args.vocab_size or 0
    shared = {"n_heads": args.n_heads, "n_kv_heads": args.kv_heads, "the feed-forward's width": args.ffn_width}
    shared["the vocabulary"] = vocabulary
    if odd := [f"{name} = {number:,}" for name, number in shared.items() if number % tensor]:
        hint = f"these work: {', '.join(str(n) for n in divisors(math.gcd(*shared.values())) if n <= args.n_heads)}"
        if vocabulary % tensor:
            larger = -(-vocabulary // tensor) * tensor
            hint += f"; model.vocab_size = {larger} leaves {larger - vocabulary} entries unused"
        yield "divide", _TP, f"is {tensor}, which does not divide {' nor '.join(odd)}", hint
    ranks = tensor * context
    for key, length in lengths(run).items():
        if length % ranks:
            by = f"tensor_parallel {tensor}" + (f" * context_parallel {context}" if context > 1 else "")
            message = f"is {length}, and the sequence is divided over {by} = {ranks} ranks"
            yield "divide", key, message, f"these work: {around(length, ranks)}"


def tensor_problems(args: LlamaArgs, run: RunConfig) -> list[Problem]:
    """Return `tensor_misfits` without places, for a vocabulary that is known only when the tokenizer is read."""
    return [Problem("", key, message, hint, code=code) for code, key, message, hint in tensor_misfits(args, run)]


def _stage_misfits(args: LlamaArgs, run: RunConfig) -> Iterator[Finding]:
    """Check that the model can be cut into the stages of the pipeline."""
    if run.mesh.pipeline == 1:
        return
    if args.tied:
        message = "embedding and head share one weight, and a pipeline has them on different ranks"
        hint = "set model.overrides.tied = false for two weights, or divide the model by other degrees"
        yield "divide", f"{_PP}degree", message, hint
        return
    from titanlite.config.legacy_plans import legacy_plans  # temporary: until parallel/ takes sections
    from titanlite.parallel.pipeline_split import SplitError, divide

    try:
        # No stage depends on the size of a vocabulary that is the tokenizer's, which is not read yet.
        costs = pipeline_costs(replace(args, vocab_size=args.vocab_size or 1), 1)
        divide(costs, legacy_plans(run).pipeline, run.mesh.pipeline)
    except SplitError as error:
        if run.experimental.pipeline_parallel_split_points:
            yield "divide", f"{_PP}split_points", str(error), ""
        else:
            several = SCHEDULES[run.experimental.pipeline_parallel_schedule].stages != "one"
            hint = f"take a smaller degree{', or a schedule with one stage per rank' if several else ''}"
            yield "divide", f"{_PP}degree", str(error), hint


def _float8_misfits(args: LlamaArgs, run: RunConfig) -> Iterator[Finding]:
    """Check that float8 can take the products of the model, and that it takes some."""
    f, mesh, pieces = run.float8, run.mesh, run.pipeline.microbatches
    if not f.enable_float8_linear:
        return
    names = linears(replace(args, vocab_size=args.vocab_size or 1))  # the head is not converted, whatever its size
    choices = _float8_choices(names, args, run)
    filters = [part for part in f.filter_fqns if part != AUTO_FILTER]
    unknown = [part for part in filters if not part or not any(part in name for name in names)]
    for part in unknown:
        components = list(dict.fromkeys(c for name in names for c in name.split(".") if not c.isdigit()))
        hint = "".join(f"nearest: {name}; " for name in nearest(part, [*components, AUTO_FILTER]))
        hint += f"parts of names are {', '.join(components)}; the head is output, and it always stays in high precision"
        yield "float8", "float8.filter_fqns", f"{quote(part)} is part of no linear's name", hint
    if not unknown and not any(choice.converted for choice in choices):
        reasons: dict[str, list[str]] = {}
        for choice in choices:
            reasons.setdefault(choice.reason, []).append(choice.kind)
        shown = "; ".join(f"{', '.join(kinds)} ({reason})" for reason, kinds in reasons.items())
        message = f"leaves no product in float8: {shown}"
        yield "float8", "float8.enable_float8_linear", message, "convert some linears, or set it to false"
    rows, length = run.training.batch_size // pieces, run.training.seq_len // mesh.context
    if rows * length % _FLOAT8_MULTIPLE:
        by = counted(rows, "sequences") + (" of a pipeline micro-batch" if pieces > 1 else "")
        by += f" x {length} tokens" + (f" on each of {mesh.context} context-parallel ranks" if mesh.context > 1 else "")
        message = f"needs a multiple of {_FLOAT8_MULTIPLE} tokens in a product, and there are {by} = {rows * length}"
        fitting = _FLOAT8_MULTIPLE // math.gcd(_FLOAT8_MULTIPLE, length) * pieces
        hint = f"these work: training.batch_size = {fitting} or a multiple of it, or another training.seq_len"
        yield "float8", "float8.enable_float8_linear", message, hint
    odd = [c for c in choices if c.converted and c.size.out_features % mesh.weight_shards]
    if f.enable_fsdp_float8_all_gather and odd:
        which = ", ".join(f"{c.kind} has {c.size.out_features}" for c in odd)
        message = f"needs weights whose rows divide over the {mesh.weight_shards} ranks that share them; {which}"
        hint = (
            f"set it to false, keep them with float8.filter_fqns = {quote([c.kind for c in odd])}, or take fewer ranks"
        )
        yield "float8", "float8.enable_fsdp_float8_all_gather", message, hint


#: float8 units need every dimension of a product to be a multiple of it.
_FLOAT8_MULTIPLE = 16


def _float8_choices(names: Mapping[str, Size], args: LlamaArgs, run: RunConfig) -> Sequence[Choice]:
    from titanlite.config.legacy_plans import legacy_plans  # temporary, as above
    from titanlite.parallel.float8_choice import choose

    return choose(names, legacy_plans(run).float8, tensor_plan(args), run.mesh.tensor)


def wide_filters(run: RunConfig) -> list[str]:
    """Return a warning for each filter of float8 that ends within a number of some names, as layers.1 in layers.10."""
    found: list[str] = []
    if not run.float8.enable_float8_linear:
        return found
    try:
        names = list(linears(replace(run.model_args(), vocab_size=1)))
    except ShapeError:  # `misfits` reports it
        return found
    for part in run.float8.filter_fqns:
        whole = any(re.search(rf"{re.escape(part)}(?!\d)", name) for name in names)
        cut = [match[0] for name in names if (match := re.search(rf"^.*?{re.escape(part)}\d+", name))]
        others = list(dict.fromkeys(cut))
        if part[-1:].isdigit() and whole and others:
            shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            found.append(
                f"float8.filter_fqns: {quote(part)} is also part of {shown}, which stay in high precision too; "
                f"{quote(part + '.')} is not"
            )
    return found


def _batch_advice(wanted: int, micro: int, ranks: int) -> str:
    """Return changes of one number that make the batch divisible."""
    options = [f"global_batch_size = {around(wanted, micro * ranks)}"]
    if wanted % ranks == 0:
        options.append(f"batch_size = {some(divisors(wanted // ranks))} on {counted(ranks, 'ranks')}")
    if wanted % micro == 0:
        options.append(f"{some(divisors(wanted // micro))} data-parallel ranks with batch_size {micro}")
    return "these work: " + "; ".join(options)
