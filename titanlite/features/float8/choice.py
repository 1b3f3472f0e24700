"""Which linears compute in float8, and why the others do not: by name and size, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from titanlite.config.sections import AUTO_FILTER, Float8
from titanlite.models.linears import LinearKind, Linears, kind_of
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
    linears: Linears, settings: Float8, multiple: int = MULTIPLE
) -> list[Float8Choice]:
    """Decide for each linear of a model, by kind and in its order.

    multiple: of K and N of a product on one rank. The head stays: every recipe changes the loss
    when logits are rounded.
    """
    found: dict[tuple[str, Size, str], list[str]] = {}
    for name, size in linears.sizes.items():
        local = linears.on_rank(name)
        reason = "the head"
        if name != linears.head:
            reason = _reason(name, size, local, settings, multiple)
        found.setdefault((kind_of(name), local, reason), []).append(name)
    return [
        Float8Choice(kind, tuple(names), size, reason)
        for (kind, size, reason), names in found.items()
    ]


def _reason(name: str, size: Size, local: Size, settings: Float8, multiple: int) -> str:
    """Return why a linear stays in high precision, or "". local: size on a rank."""
    # At any place: `layers.1` is part of `layers.1.w` and of `layers.10.w`.
    matching = [part for part in name_filters(settings) if part in name]
    if matching:
        return f"filter_fqns: {', '.join(matching)}"
    dimensions = {"K": local.in_features, "N": local.out_features}
    odd = [f"{which} = {n}" for which, n in dimensions.items() if n % multiple]
    if odd:
        return f"{' and '.join(odd)} is not a multiple of {multiple}"
    if min(size.in_features, size.out_features) < settings.min_features:
        return f"below min_features = {settings.min_features}"
    if AUTO_FILTER in settings.filter_fqns and too_small(size, settings.recipe_name):
        return f"{AUTO_FILTER}: too small to gain by {settings.recipe_name}"
    return ""


def name_filters(settings: Float8) -> list[str]:
    """Return the filters that are parts of names."""
    return [part for part in settings.filter_fqns if part != AUTO_FILTER]


def too_small(size: Size, recipe: str) -> bool:
    """Whether float8 costs a linear more than it saves.

    Raises KeyError for a recipe without measured sizes.
    """
    return any(size.in_features <= k and size.out_features <= n for k, n in SMALL_SIZES[recipe])


def converted_names(choices: Iterable[Float8Choice]) -> list[str]:
    """Return the linears that compute in float8."""
    return [name for choice in choices if choice.converted for name in choice.names]
