"""The loss in chunks for models of `transformers`, whose heads take no labels.

A hook hands labels and loss to the head, and takes the loss from it. What the model does to its
logits after the head, as a soft cap, becomes a part of the loss: see `Tail`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titanlite.models.hf.skeleton import HEAD

if TYPE_CHECKING:
    from titanlite.models.hf.args import HFArgs

LossFunction = Callable[[Tensor, Tensor], Tensor]


class Tail:
    """What a model does to its logits after the head: its own code, with the rest left out."""

    def __init__(self, model: Any) -> None:
        """model: on the meta device. Raises what its code raises if the rest cannot be left out."""
        name = model.base_model_prefix
        base = _output_of(model, model.get_submodule(name))
        self._head = _Returns()
        shell = copy.copy(model)
        replaced = {name: _Returns(base), _name_of(model): self._head}
        shell._modules = {**model._modules, **replaced}
        self._shell = shell
        self._tokens = torch.zeros((1, 1), dtype=torch.int64, device="meta")

    def __call__(self, logits: Tensor) -> Tensor:
        """Return logits [batch, seq, vocab] as the model returns them."""
        self._head.output = logits
        try:
            changed: Tensor = self._shell(self._tokens)
        finally:
            self._head.output = None
        return changed


class _Returns(nn.Module):
    """Takes the place of a module, and returns what it is told."""

    def __init__(self, output: Any = None) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


def _name_of(model: Any) -> str:
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


@torch.no_grad()
def _output_of(model: Any, module: nn.Module) -> Any:
    """Return what a module returns in a run of the model, on the meta device."""
    found: list[Any] = []
    handle = module.register_forward_hook(lambda _, args, output: found.append(output))
    try:
        model(torch.zeros((1, 1), dtype=torch.int64, device="meta"))
    finally:
        handle.remove()
    return found[0]


@torch.no_grad()
def find_tail(model: Any) -> Tail | None:
    """Return what a model on the meta device does to its logits; None: nothing.

    Raises ValueError if it is more than a function of each token's logits.
    """
    found: list[Tensor] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, args, output: found.append(output))
    try:
        logits = model(torch.zeros((1, 1), dtype=torch.int64, device="meta"))
    finally:
        handle.remove()
    if found and logits is found[0]:
        return None
    tail = Tail(model)
    drawn = torch.randn(1, 3, model.config.vocab_size, generator=torch.Generator().manual_seed(0))
    whole = tail(drawn)
    if whole.shape != drawn.shape or not whole[:, :2].equal(tail(drawn[:, :2])):
        raise ValueError("the logits of a token are not a function of the head's output for it")
    return tail


@functools.lru_cache(maxsize=8)
def tail_of(args: HFArgs) -> Tail | None:
    """Return what a model does to its logits; None: nothing. Raises as `find_tail`."""
    return find_tail(args.skeleton.model)


def why_no_chunks(args: HFArgs) -> str:
    """Return why the loss of a model cannot be computed in chunks; "": it can."""
    known = args.skeleton
    name = type(known.model).__name__
    head: Any = known.model.get_output_embeddings()
    if known.head != HEAD:
        return f"the head of {name} is called {known.head or 'nothing'}, not {HEAD}"
    if type(head) is not nn.Linear or head.bias is not None:
        return f"the head of {name} is no plain linear without bias: {head}"
    try:
        tail_of(args)
    except Exception as error:  # code of `transformers` raises any class
        return (
            f"what {name} does to its logits after the head cannot be run by chunks: "
            f"{type(error).__name__}: {error}"
        )
    return ""


def loss_of_head(
    model: Any,
    tail: Tail | None,
    run: Callable[[], Tensor],
    labels: Tensor,
    loss: LossFunction,
) -> Tensor:
    """Return the loss that the head of `model` computes while `run` runs the model.

    tail: what the model does to its logits. labels: [batch, seq] int64. loss: of logits as the
    model returns them.
    """

    def of_head(logits: Tensor, labels: Tensor) -> Tensor:
        return loss(logits if tail is None else tail(logits), labels)

    taken: list[Tensor] = []

    def hand_over(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "labels": labels, "loss": of_head}

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
