"""The groups of `[[optimizer.groups]]`: which parameters have which options."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn

from titanlite.config.model_sections import Optimizer

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Scale(NamedTuple):
    """Factors of the options of one parameter."""

    rate: float = 1.0
    eps: float = 1.0

    def factors(self) -> dict[str, float]:
        """Return the factor of each option: the product of rate and weight decay stays."""
        return {"lr": self.rate, "weight_decay": 1 / self.rate, "eps": self.eps}


#: (name of a parameter, whether Muon updates it) → its scale.
Scales = Callable[[str, bool], Scale]


def parameter_groups(
    parameters: dict[str, nn.Parameter],
    settings: Optimizer,
    blocks: Collection[str] = (),
    scales: Scales | None = None,
) -> list[dict[str, Any]]:
    """Divide parameters into the groups of `[[optimizer.groups]]`, and one group of all others.

    The first pattern found in a name decides; `scales` divide further. Groups without parameters on
    this rank are left out.
    """
    found: dict[_Kind, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        plain = plain_name(name)
        kind = _kind_of(plain, parameter, settings, blocks)
        if scales is not None:
            kind = kind._replace(scale=scales(plain, kind.is_muon))
        found.setdefault(kind, []).append(parameter)
    groups = []
    for kind, members in found.items():
        group: dict[str, Any] = {"params": members, **_options(settings, kind)}
        if kind.is_muon:
            group["muon"] = True
        groups.append(group)
    return groups


class _Kind(NamedTuple):
    #: Number of the first pattern that its name has; one further for a parameter without any.
    pattern: int
    without_decay: bool
    is_muon: bool
    scale: Scale = Scale()


def _kind_of(
    name: str, parameter: nn.Parameter, settings: Optimizer, blocks: Collection[str]
) -> _Kind:
    pattern = len(settings.groups)
    for index, group in enumerate(settings.groups):
        if re.search(group.pattern, name):
            pattern = index
            break
    in_block = name.startswith(tuple(f"{block}." for block in blocks))
    # A stack of experts' biases has two dimensions.
    is_vector = parameter.ndim < 2 or name.endswith("bias")
    return _Kind(
        pattern,
        without_decay=settings.no_decay_on_norms and is_vector,
        is_muon=settings.name == "Muon" and not is_vector and in_block,
    )


def _options(settings: Optimizer, kind: _Kind) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if kind.pattern < len(settings.groups):
        group = settings.groups[kind.pattern]
        for key in ("lr", "weight_decay", "eps"):
            if getattr(group, key) is not None:
                options[key] = getattr(group, key)
        if group.beta1 is not None or group.beta2 is not None:
            beta1 = settings.beta1 if group.beta1 is None else group.beta1
            beta2 = settings.beta2 if group.beta2 is None else group.beta2
            options["betas"] = (beta1, beta2)
    for key, factor in kind.scale.factors().items():
        if factor != 1:
            options[key] = options.get(key, getattr(settings, key)) * factor
    if kind.without_decay:
        options["weight_decay"] = 0.0
    return options


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that torch's wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
