"""Which linears compute in float8, and why the others do not: by name and size, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from titanlite.config.sections import AUTO_FILTER, Float8
from titanlite.models.linears import LinearKind, kind_of
from titanlite.models.spec import Size

#: float8 units need every dimension of a product to be a multiple of it.
MULTIPLE = 16

#: By recipe, pairs (K, N): a linear that is no larger in both is too small to gain. These are
#: torchao's, measured on H100s (its `_auto_filter_for_recipe`; a test compares). inf: any size.
SMALL_SIZES = {
    "tensorwise": ((4096, 1024),),
    "rowwise": ((math.inf, 2048), (1024, math.inf), (2048, 4096)),
}


@dataclass(frozen=True)
class Float8Choice(LinearKind):
    """Linears of one kind with the same decision."""

    #: Why they stay in high precision; "" for linears in float8.
    reason: str = ""

    @property
    def converted(self) -> bool:
        return not self.reason


def choose_linears(
    linears: Mapping[str, Size],
    settings: Float8,
    tp_plan: Mapping[str, str] | None = None,
    tp: int = 1,
    head: str = "output",
) -> list[Float8Choice]:
    """Decide for each linear of a model, by kind and in its order.

    linears: name → size, of the whole model. tp_plan: name → how tensor parallelism divides it over
    `tp` ranks (see `titanlite.parallel.tensor.apply_tp`). head: it stays; its outputs are the
    logits, and every recipe changes the loss when they are rounded.
    """
    found: dict[tuple[str, Size, str], list[str]] = {}
    for name, size in linears.items():
        way = (tp_plan or {}).get(name)
        local = Size(
            size.in_features // tp if way == "rowwise" else size.in_features,
            size.out_features // tp if way in ("colwise", "head") else size.out_features,
        )
        reason = "the head" if name == head else _reason(name, size, local, settings)
        found.setdefault((kind_of(name), local, reason), []).append(name)
    return [
        Float8Choice(kind, tuple(names), size, reason)
        for (kind, size, reason), names in found.items()
    ]


def _reason(name: str, size: Size, local: Size, settings: Float8) -> str:
    # At any place: `layers.1` is part of `layers.1.w` and of `layers.10.w`.
    if matching := [part for part in settings.filter_fqns if part != AUTO_FILTER and part in name]:
        return f"filter_fqns: {', '.join(matching)}"
    odd = [
        f"{which} = {n}"
        for which, n in (("K", local.in_features), ("N", local.out_features))
        if n % MULTIPLE
    ]
    if odd:
        return f"{' and '.join(odd)} is not a multiple of {MULTIPLE}"
    if min(size.in_features, size.out_features) < settings.min_features:
        return f"below min_features = {settings.min_features}"
    if AUTO_FILTER in settings.filter_fqns and too_small(size, settings.recipe_name):
        return f"{AUTO_FILTER}: too small to gain by {settings.recipe_name}"
    return ""


def too_small(size: Size, recipe: str) -> bool:
    """Whether float8 costs a linear more than it saves.

    Raises KeyError for a recipe without measured sizes.
    """
    return any(size.in_features <= k and size.out_features <= n for k, n in SMALL_SIZES[recipe])


def converted_names(choices: Iterable[Float8Choice]) -> list[str]:
    """Return the linears that compute in float8."""
    return [name for choice in choices if choice.converted for name in choice.names]
