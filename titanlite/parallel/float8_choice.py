"""Which linears compute in float8, and why the others do not: by name and size, without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from titanlite.config.errors import Problem, nearest
from titanlite.config.plans import BatchPlan, Float8Plan, MeshPlan, PipelinePlan
from titanlite.config.sections import AUTO_FILTER
from titanlite.config.toml import quote
from titanlite.models.spec import Size
from titanlite.utils import counted

#: What float8 units want every dimension of a product to be a multiple of.
MULTIPLE = 16

#: The head: its outputs are the logits, and no recipe of float8 leaves the loss as it is when they are rounded.
HEAD = "output"

_LAYER = re.compile(r"^\w+\.\d+\.")

#: The sizes K and N up to which both hold, by recipe, are too small to gain by it: torchao's, measured on H100s (its
#: `_auto_filter_for_recipe`, which a test compares). inf: whatever the size.
_SMALL = {
    "tensorwise": ((4096, 1024),),
    "rowwise": ((math.inf, 2048), (1024, math.inf), (2048, 4096)),
}


@dataclass(frozen=True)
class Choice:
    """Linears of one kind, in several layers, that are treated alike."""

    #: Their name in a layer, as `attention.wq`.
    kind: str
    names: tuple[str, ...]
    #: K and N of the product M x K x N on one rank: tensor parallelism divides one of the two.
    size: Size
    #: Why they stay as they are; "" for those that compute in float8.
    reason: str = ""

    @property
    def converted(self) -> bool:
        return not self.reason


def choose(
    linears: Mapping[str, Size], plan: Float8Plan, divided: Mapping[str, str] | None = None, tensor: int = 1
) -> list[Choice]:
    """What becomes of each linear of a model, by kind and in its order.

    linears: name → size, of the whole model. divided: name → how tensor parallelism divides it over `tensor` ranks (see
    `titanlite.parallel.tensor.split`).
    """
    found: dict[tuple[str, Size, str], list[str]] = {}
    for name, size in linears.items():
        way = (divided or {}).get(name)
        local = Size(
            size.in_features // tensor if way == "rowwise" else size.in_features,
            size.out_features // tensor if way in ("colwise", "head") else size.out_features,
        )
        found.setdefault((_LAYER.sub("", name), local, _reason(name, size, local, plan)), []).append(name)
    return [Choice(kind, tuple(names), size, reason) for (kind, size, reason), names in found.items()]


def _reason(name: str, size: Size, local: Size, plan: Float8Plan) -> str:
    if name == HEAD:
        return "the head"
    filters = [part for part in plan.keep if matches(part, name)]
    if filters:
        return f"float8.filter_fqns: {', '.join(filters)}"
    odd = [f"{which} = {n}" for which, n in (("K", local.in_features), ("N", local.out_features)) if n % MULTIPLE]
    if odd:
        return f"{' and '.join(odd)} is not a multiple of {MULTIPLE}"
    if min(size.in_features, size.out_features) < plan.min_features:
        return f"below float8.min_features = {plan.min_features}"
    if plan.skip_small and too_small(size, plan.recipe):
        return f"{AUTO_FILTER}: too small to gain by {plan.recipe}"
    return ""


def matches(part: str, name: str) -> bool:
    """Whether `part` is in `name`, at any place: `layers.1` is in `layers.1.w` and in `layers.10.w`."""
    return bool(part) and part in name


def too_small(size: Size, recipe: str) -> bool:
    """Whether float8 costs a linear more than it saves. Raises KeyError for a recipe whose sizes nobody measured."""
    return any(size.in_features <= k and size.out_features <= n for k, n in _SMALL[recipe])


def recipe_problem(plan: Float8Plan) -> Problem | None:
    """A recipe of whose sizes nothing is known, where they are asked for."""
    if not plan.skip_small or plan.recipe in _SMALL:
        return None
    return Problem(
        "",
        "float8.filter_fqns",
        f"{quote(AUTO_FILTER)} does not work with float8.recipe_name = {quote(plan.recipe)}: torchao has no sizes for "
        "it",
        "leave it out; float8.min_features = 4096 keeps what has fewer input or output features",
    )


def wide_filters(linears: Iterable[str], plan: Float8Plan) -> list[str]:
    """What to say of filters that end within a number of some names, and at its end of others."""
    names, found = list(linears), []
    for part in plan.keep:
        if not part[-1:].isdigit():
            continue
        whole = any(re.search(rf"{re.escape(part)}(?!\d)", name) for name in names)
        cut = [m.group() for name in names if (m := re.search(rf"^.*?{re.escape(part)}\d+", name))]
        others = list(dict.fromkeys(cut))
        if whole and others:
            shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            found.append(
                f"float8.filter_fqns: {quote(part)} is also part of {shown}, which stay in high precision too; "
                f"{quote(part + '.')} is not"
            )
    return found


def converted_names(choices: Iterable[Choice]) -> list[str]:
    """The linears that compute in float8."""
    return [name for choice in choices if choice.converted for name in choice.names]


def tokens(batch: BatchPlan, mesh: MeshPlan, pipeline: PipelinePlan) -> int:
    """M: the tokens of one product. Tensor-parallel ranks gather the sequence before it."""
    return batch.micro_batch_size // pipeline.microbatches * (batch.seq_len // mesh.context)


def choice_problems(linears: Mapping[str, Size], choices: Sequence[Choice], plan: Float8Plan) -> list[Problem]:
    """Filters without an effect, and a choice that converts nothing."""
    key = "float8.filter_fqns"
    found = []
    for part in plan.keep:
        if not any(matches(part, name) for name in linears):
            components = list(dict.fromkeys(c for name in linears for c in name.split(".") if not c.isdigit()))
            hint = "".join(f"nearest: {name}; " for name in nearest(part, [*components, AUTO_FILTER]))
            hint += f"parts of names are {', '.join(components)}; the head is {HEAD}, and it always stays"
            found.append(Problem("", key, f"{quote(part)} is part of no linear's name", hint))
    if not found and not any(choice.converted for choice in choices):
        by_reason: dict[str, list[str]] = {}
        for choice in choices:
            by_reason.setdefault(choice.reason, []).append(choice.kind)
        reasons = "; ".join(f"{', '.join(kinds)} ({reason})" for reason, kinds in by_reason.items())
        message = f"leaves no product in float8: {reasons}"
        found.append(Problem("", "float8.enable_float8_linear", message, "convert something, or set it to false"))
    return found


def token_problem(batch: BatchPlan, mesh: MeshPlan, pipeline: PipelinePlan) -> Problem | None:
    """M that float8 units cannot take: in the gradient of a weight it is the inner dimension."""
    count = tokens(batch, mesh, pipeline)
    if count % MULTIPLE == 0:
        return None
    length = batch.seq_len // mesh.context
    rows = batch.micro_batch_size // pipeline.microbatches
    by = [counted(rows, "sequences") + (" of a pipeline micro-batch" if pipeline.microbatches > 1 else "")]
    by.append(f"{length} tokens" + (f" on each of {mesh.context} context-parallel ranks" if mesh.context > 1 else ""))
    fitting = MULTIPLE // math.gcd(MULTIPLE, length) * pipeline.microbatches
    return Problem(
        "",
        "float8.enable_float8_linear",
        f"needs a multiple of {MULTIPLE} tokens in a product, and there are {' x '.join(by)} = {count}",
        f"these work: training.batch_size = {fitting} or a multiple of it, or another training.seq_len",
    )


def gather_problem(choices: Sequence[Choice], shards: int) -> Problem | None:
    """Weights that cannot be gathered in float8 because their rows do not divide evenly over `shards` ranks."""
    odd = [c for c in choices if c.converted and c.size.out_features % shards]
    if not odd:
        return None
    which = ", ".join(f"{c.kind} has {c.size.out_features}" for c in odd)
    names = ", ".join(quote(c.kind) for c in odd)
    return Problem(
        "",
        "float8.enable_fsdp_float8_all_gather",
        f"needs weights whose rows divide over the {shards} ranks that share them; {which}",
        f"set it to false, keep them with float8.filter_fqns = [{names}], or share weights among fewer ranks",
    )
