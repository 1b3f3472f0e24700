"""Experts of models of `transformers`, computed by titanlite's grouped products.

`transformers` lets a function take the place of the forward of experts that are stacks of matrices
(`transformers.integrations.moe`). Here is such a function. It sends rows to the ranks of their
experts where ranks share them (`titanlite.features.experts`). Other experts are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlite.models.autograd import silu_mul
from titanlite.models.experts.arguments import MOST_EXPERTS
from titanlite.models.experts.grouped import (
    AddBias,
    Combine,
    Dispatch,
    by_expert,
    experts_of_rows,
    grouped_mm,
    local,
)
from titanlite.models.hf.config_json import refused

#: Of titanlite's experts among those of `transformers`.
NAME = "titanlite"
#: Kernels of grouped products want rows of 16 bytes, in bfloat16.
_MULTIPLE = 8


class MoELayer(NamedTuple):
    """The experts of one block."""

    experts: int
    #: Experts of a token.
    top_k: int
    #: Numbers between the products of an expert.
    width: int
    #: Of all experts together.
    parameters: int


# The model


def stacks_of(model: nn.Module) -> dict[str, Any]:
    """Return the experts that take a function of others, by name."""
    found = {}
    for name, module in model.named_modules():
        # `transformers.integrations.moe.use_experts_implementation` sets these.
        if hasattr(module, "is_transposed") and hasattr(module, "has_bias"):
            found[name] = module
    return found


def exchange(model: nn.Module) -> None:
    """Let the experts of a model compute by `_forward`, in place."""
    stacks = stacks_of(model)
    if not stacks:
        return
    from transformers.integrations import moe

    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    plain_gate = getattr(moe, "_default_apply_gate", None)
    for module in stacks.values():
        module.config._experts_implementation = NAME
        #: See `titanlite.models.experts.grouped.Experts`.
        module.exchange = None
        #: [experts + 3] float64 on the device, or None, as that of
        #: `titanlite.models.experts.layer.MoE`; losses of the router stay zero.
        module.record = None
        is_silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        gate = getattr(type(module), "_apply_gate", None)
        module.is_swiglu = _has_gate(module) and is_silu and gate is plain_gate


def _has_gate(module: Any) -> bool:
    return bool(getattr(module, "has_gate", True))


def _names_of(module: Any) -> list[str]:
    """Return the names of the parameters that experts have: stacks of matrices, and of biases."""
    names = ["gate_up_proj" if _has_gate(module) else "up_proj", "down_proj"]
    if module.has_bias:
        names += [f"{name}_bias" for name in names]
    return names


# What a model has


def moe_layers_of(model: Any) -> dict[str, MoELayer]:
    """Return the MoE layers of a model on the meta device, by the name of their experts.

    Raises ShapeError for experts that cannot be computed here.
    """
    stacks = stacks_of(model)
    _check_others(model, stacks)
    if not stacks:
        return {}
    if getattr(model.config, "output_router_logits", False):
        message = "the load-balancing loss that output_router_logits adds is not computed here"
        raise refused(message, "set model.overrides.output_router_logits = false")
    chosen = _choices(model, stacks)
    found = {}
    for name, module in stacks.items():
        if name not in chosen:
            raise refused(f"{name} of {type(model).__name__} never runs")
        found[name] = _moe_layer(name, module, chosen[name])
    return found


def _check_others(model: nn.Module, stacks: dict[str, Any]) -> None:
    """Raise ShapeError for experts that take no function of others."""
    for name, _ in model.named_parameters():
        path, is_expert, _ = f".{name}".partition(".experts.")
        experts = f"{path}.experts".removeprefix(".")
        if is_expert and experts not in stacks:
            raise refused(
                f"{experts} of {type(model).__name__} do not go through the interface of "
                "transformers for experts (use_experts_implementation), and cannot be trained here",
                field="name",
            )


def _choices(model: Any, stacks: dict[str, Any]) -> dict[str, int]:
    """Run the model; return the number of each token's experts, by MoE layer."""
    found: dict[str, int] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            found[name] = _index_of(*args, **kwargs).size(-1)

        return hook

    handles = []
    for name, module in stacks.items():
        handles.append(module.register_forward_pre_hook(look(name), with_kwargs=True))
    try:
        with torch.no_grad():
            model(torch.zeros((1, 2), dtype=torch.int64, device="meta"))
    except Exception as error:  # code of `transformers` raises any class
        reason = str(error).partition("\n")[0]
        raise refused(
            f"{type(model).__name__} does not run on tensors without data, which tell how it uses "
            f"its experts: {type(error).__name__}: {reason}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return found


def _index_of(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the experts of each token, of the arguments of `_forward`."""
    return index


def _moe_layer(name: str, module: Any, top_k: int) -> MoELayer:
    """Return the facts of an MoE layer. Raises ShapeError for shapes that are not understood."""
    own: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    names = _names_of(module)
    experts = module.num_experts
    if set(own) != set(names) or any(len(one) != experts for one in own.values()):
        shapes = ", ".join(f"{leaf} {list(one.shape)}" for leaf, one in own.items())
        raise refused(f"{name} has other parameters than stacks of {experts} experts: {shapes}")
    if experts > MOST_EXPERTS:
        raise refused(f"{name} has {experts} experts; at most {MOST_EXPERTS} can be sorted here")
    down = own["down_proj"]
    width, dim = down.shape[1:] if module.is_transposed else down.shape[:0:-1]
    if width % _MULTIPLE or dim % _MULTIPLE:
        message = f"{name} has matrices of {width} x {dim}"
        raise refused(message, f"take widths that are multiples of {_MULTIPLE}")
    parameters = sum(math.prod(one.shape) for one in own.values())
    return MoELayer(experts, top_k, width, parameters)


# The forward


def _forward(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute experts, as the functions of `transformers` do that `ExpertsInterface` names.

    self: the module that has them. hidden: [tokens, dim]. index, weights: [tokens, top_k], the
    experts of each token, and by what their results are multiplied. Returns hidden's shape.
    """
    counts, order, places = by_expert(index, self.num_experts)
    if self.record is not None and torch.is_grad_enabled():
        _record(self.record, counts, len(hidden))
    rows = Dispatch.apply(hidden, order, places)
    state = None
    if self.exchange is not None:
        rows, counts, state = self.exchange.dispatch(rows, counts)
    y = _products(self, rows, counts.cumsum(0).to(torch.int32))
    if state is not None:
        y = self.exchange.combine(y, state)
    result: Tensor = Combine.apply(y, weights.float(), order, places)
    return result


@torch.no_grad()
def _record(record: Tensor, counts: Tensor, tokens: int) -> None:
    """Add each expert's rows, and their tokens; losses of the router are not known here."""
    record.add_(torch.cat([counts, counts.new_full((1,), tokens), counts.new_zeros(2)]))


def _products(self: Any, rows: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's result for its rows [rows, dim], sorted by expert.

    ends: [experts] int32, where each expert's rows end.
    """
    first, second = _names_of(self)[:2]
    experts = experts_of_rows(rows, ends) if self.has_bias else None
    h = _product(self, first, rows, ends, experts)
    if self.is_swiglu:
        h = silu_mul(*h.chunk(2, -1))
    elif _has_gate(self):
        h = self._apply_gate(h)
    else:
        h = self.act_fn(h)
    return _product(self, second, h, ends, experts)


def _product(self: Any, name: str, rows: Tensor, ends: Tensor, experts: Tensor | None) -> Tensor:
    """Return rows times the matrices of their experts, plus their biases."""
    weight = local(getattr(self, name))
    if not self.is_transposed:
        weight = weight.transpose(1, 2)
    y = grouped_mm(rows, weight, ends)
    if experts is None:
        return y
    biased: Tensor = AddBias.apply(y, local(getattr(self, f"{name}_bias")), experts, ends)
    return biased
