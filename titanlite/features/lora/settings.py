"""Which linears of a model have adapters, and what an adapter is. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from titanlite.models.linears import kind_of
from titanlite.models.spec import Init, Size

if TYPE_CHECKING:
    from titanlite.config.sections import Lora
    from titanlite.models.spec import ModelSpec

#: An entry of `lora.targets`: all linears but the head.
ALL = "all-linear"
#: Names of an adapter's parameters in its linear: [rank, in_features], [out_features, rank].
DOWN = "lora_a"
UP = "lora_b"
#: Entry of a manifest's config and of its fingerprints; in both, that of the frozen weights.
RECORD = "lora"
BASE = "base"


@dataclass(frozen=True)
class Adapters:
    """The adapters of a whole model: y = W x + scale * B A x."""

    rank: int
    alpha: float
    #: The factor is alpha / sqrt(rank), not alpha / rank (Kalajdzievski 2023, arXiv:2312.03732).
    rslora: bool = False
    #: Name of each linear that has one → its size.
    sizes: Mapping[str, Size] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def kinds(self) -> list[str]:
        """Their names in a block, in the model's order."""
        return list(dict.fromkeys(map(kind_of, self.sizes)))

    @property
    def parameters(self) -> int:
        return sum(
            self.rank * (size.in_features + size.out_features) for size in self.sizes.values()
        )

    @cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        found = {}
        for name, size in self.sizes.items():
            found[f"{name}.{DOWN}"] = (self.rank, size.in_features)
            found[f"{name}.{UP}"] = (size.out_features, self.rank)
        return found

    def init_rule(self, name: str) -> Init | None:
        """Return how a parameter is drawn; None: it belongs to no adapter.

        A is drawn as torch's linears, B is zero: an adapter adds nothing at first.
        """
        linear, _, leaf = name.rpartition(".")
        if linear not in self.sizes or leaf not in (DOWN, UP):
            return None
        if leaf == UP:
            return Init("zeros")
        return Init("uniform", bound=self.sizes[linear].in_features ** -0.5)

    def as_record(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "rslora": self.rslora,
            "targets": list(self.sizes),
        }

    @property
    def fingerprint(self) -> str:
        """Two runs share it if one may resume the other's adapters."""
        way = "rslora" if self.rslora else "lora"
        return f"{way}, rank {self.rank}, alpha {self.alpha:g}, {', '.join(self.kinds)}"


def adapters_of(section: Lora, spec: ModelSpec, args: Any) -> Adapters:
    """Return the adapters that a section asks for; entries that match nothing are left out."""
    sizes = candidates(spec, args)
    theirs = names_at_hf(spec, args)
    chosen = {}
    for name, size in sizes.items():
        if any(is_target(entry, name, theirs.get(name, "")) for entry in section.targets):
            chosen[name] = size
    return Adapters(section.rank, section.alpha, section.rslora, chosen)


def candidates(spec: ModelSpec, args: Any) -> dict[str, Size]:
    """Return the linears that may have an adapter: all but the head."""
    if spec.linears is None:
        return {}
    return {name: size for name, size in spec.linears(args).items() if name != spec.head}


def names_at_hf(spec: ModelSpec, args: Any) -> dict[str, str]:
    """Return our name of a linear → Hugging Face's; empty for a model without such a form."""
    try:
        names = spec.hf_names(args)
    except ValueError:
        return {}
    found = {}
    for ours, theirs in names.items():
        if isinstance(theirs, str):
            found[ours.removesuffix(".weight")] = theirs.removesuffix(".weight")
    return found


def is_target(entry: str, name: str, at_hf: str) -> bool:
    """Return whether an entry of `lora.targets` names a linear: by whole words from its end."""
    if entry == ALL:
        return True
    return any(f".{known}".endswith(f".{entry}") for known in (name, at_hf) if known)
