"""The linears of a model, as the ranks of tensor parallelism hold them: by name and size.

No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titanlite.models.spec import ModelSpec, Size

_LAYER = re.compile(r"^(?:\w+\.)+?\d+\.")


@dataclass(frozen=True)
class LinearKind:
    """Linears of one kind and size, in several layers."""

    #: Their name in a layer, as `attention.wq`.
    kind: str
    names: tuple[str, ...]
    #: K and N of the product M x K x N on one rank. Tensor parallelism divides one of the two.
    size: Size

    @property
    def weights(self) -> int:
        """Numbers in all their weights on one rank."""
        return self.size.in_features * self.size.out_features * len(self.names)


@dataclass(frozen=True)
class Linears:
    """All linears of a model, and their tensor parallelism."""

    #: Name → size in the whole model, in the model's order.
    sizes: Mapping[str, Size]
    #: Name of the one that makes the logits.
    head: str = "output"
    #: Name → how it is divided over `tensor` ranks, see `titanlite.parallel.tensor.apply_tp`.
    plan: Mapping[str, str] = field(default_factory=dict)
    tensor: int = 1

    def on_rank(self, name: str) -> Size:
        size = self.sizes[name]
        way = self.plan.get(name)
        if way == "rowwise":
            return Size(size.in_features // self.tensor, size.out_features)
        if way in ("colwise", "gathered", "head"):
            return Size(size.in_features, size.out_features // self.tensor)
        return size

    def kinds(self) -> list[LinearKind]:
        found: dict[tuple[str, Size], list[str]] = {}
        for name in self.sizes:
            key = kind_of(name), self.on_rank(name)
            found.setdefault(key, []).append(name)
        kinds = []
        for (kind, size), names in found.items():
            kinds.append(LinearKind(kind, tuple(names), size))
        return kinds


def kind_of(name: str) -> str:
    """Return the name in a layer: `attention.wq` of `layers.3.attention.wq`."""
    return _LAYER.sub("", name)


def linears_of(spec: ModelSpec, args: Any, tensor: int = 1) -> Linears:
    """Return the linears of a model on `tensor` ranks of tensor parallelism."""
    if spec.linears is None:
        return Linears({}, spec.head)
    plan = spec.tensor_plan(args) if tensor > 1 and spec.tensor_plan else {}
    return Linears(spec.linears(args), spec.head, plan, tensor)
