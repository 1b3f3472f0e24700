"""Experts of models of `transformers`: stacks of matrices, which its grouped products compute.

Other experts are refused: one that gets no tokens would have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlite.models.hf.config_json import refused


class MoELayer(NamedTuple):
    """The experts of one block."""

    experts: int
    #: Experts of a token.
    top_k: int
    #: Parameters of all experts together.
    parameters: int


def stacks_of(model: nn.Module) -> dict[str, Any]:
    """Return the experts whose function can be replaced, by name."""
    found = {}
    for name, module in model.named_modules():
        # `transformers.integrations.moe.use_experts_implementation` sets these.
        if hasattr(module, "is_transposed") and hasattr(module, "has_bias"):
            found[name] = module
    return found


def moe_layers_of(model: Any) -> dict[str, MoELayer]:
    """Return the MoE layers of a model on the meta device, by the name of their experts.

    Raises ShapeError for experts of other forms.
    """
    stacks = stacks_of(model)
    kind = type(model).__name__
    for name, _ in model.named_parameters():
        path, is_expert, _ = f".{name}".partition(".experts.")
        experts = f"{path}.experts".removeprefix(".")
        if is_expert and experts not in stacks:
            raise refused(
                f"{experts} of {kind} do not go through the interface of transformers for experts "
                "(use_experts_implementation), and cannot be trained here",
                field="name",
            )
    if not stacks:
        return {}
    if getattr(model.config, "output_router_logits", False):
        message = "the load-balancing loss that output_router_logits adds is not computed here"
        raise refused(message, "set model.overrides.output_router_logits = false")
    chosen = _choices(model, stacks)
    found = {}
    for name, module in stacks.items():
        if not chosen.get(name):
            raise refused(f"{name} of {kind} gives a token no experts, or never runs")
        own: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
        count = module.num_experts
        if "down_proj" not in own or any(len(one) != count for one in own.values()):
            shapes = ", ".join(f"{leaf} {list(one.shape)}" for leaf, one in own.items())
            raise refused(f"{name} has other parameters than stacks of {count} experts: {shapes}")
        parameters = sum(math.prod(one.shape) for one in own.values())
        found[name] = MoELayer(count, chosen[name], parameters)
    return found


def _choices(model: Any, stacks: dict[str, Any]) -> dict[str, int]:
    """Run the model; return the experts per token of each layer."""
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
    """Return the experts of each token, [tokens, top_k], from a stack's arguments."""
    return index
