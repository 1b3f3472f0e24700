"""The loss in chunks for models of `transformers`, whose heads take no labels.

A hook hands labels and loss to the head, and takes the loss from it. Models that change their
logits after the head, as by a soft cap, are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titanlite.models.hf.skeleton import HEAD

if TYPE_CHECKING:
    from titanlite.models.hf.args import HFArgs

LossFunction = Callable[[Tensor, Tensor], Tensor]


def why_no_chunks(args: HFArgs) -> str:
    """Return why a model's loss cannot be computed in chunks; "": it can."""
    known = args.skeleton
    name = type(known.model).__name__
    head: Any = known.model.get_output_embeddings()
    if known.head != HEAD:
        return f"the head of {name} is called {known.head or 'nothing'}, not {HEAD}"
    if type(head) is not nn.Linear or head.bias is not None:
        return f"the head of {name} is no plain linear without bias: {head}"
    found: list[Tensor] = []
    handle = head.register_forward_hook(lambda _, args, output: found.append(output))
    try:
        with torch.no_grad():
            logits = known.model(torch.zeros((1, 1), dtype=torch.int64, device="meta"))
    finally:
        handle.remove()
    return "" if logits is found[0] else f"{name} changes its logits after the head"


def loss_of_head(
    model: Any, run: Callable[[], Tensor], labels: Tensor, loss: LossFunction
) -> Tensor:
    """Return the loss that the head computes in `run`. labels: [batch, seq] int64."""
    taken: list[Tensor] = []

    def hand_over(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "labels": labels, "loss": loss}

    def take(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        taken.append(output)
        # For the code after the head, which has nothing left to do.
        return output.detach().reshape(1, 1, 1)

    head = model.get_output_embeddings()
    hooks = [
        head.register_forward_pre_hook(hand_over, with_kwargs=True),
        head.register_forward_hook(take),
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return taken[0]
