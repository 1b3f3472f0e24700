"""A causal model of `transformers` as a module that `ModelSpec` describes."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Extras(NamedTuple):
    """Functions for what a run asks beside logits of whole rows."""

    #: `titanlite.models.hf.documents.packed`, with the arguments.
    packed: Callable[[Any, Tensor], contextlib.AbstractContextManager[dict[str, Tensor]]]
    #: `titanlite.models.hf.chunks.loss_of_head`.
    loss: Callable[..., Tensor]


def causal_model(config: Any, extras: Extras | None = None) -> Any:
    """Return a config's model on the current default device. extras: None for facts alone."""
    import torch
    from transformers import AutoModelForCausalLM

    from titanlite.models.hf.experts import stacks_of

    # A copy: its experts and attention are of this model alone.
    own = copy.deepcopy(config)
    make = functools.partial(AutoModelForCausalLM.from_config, own, dtype=torch.float32)
    try:
        model = make(attn_implementation="sdpa")
    except ValueError:  # some models have only their own attention
        model = make(attn_implementation="eager")
    cls: Any = type(model)
    model.__class__ = _logits_class(cls)
    model.extras = extras
    for module in stacks_of(model).values():
        # On the meta device grouped products take no float32.
        module.config._experts_implementation = "batched_mm" if extras is None else "grouped_mm"
    return model


@functools.cache
def _logits_class(cls: Any) -> Any:
    class Causal(cls):
        # No annotations here: `transformers` evaluates them.
        plain_forward = cls.forward

        def forward(
            self,
            tokens: Tensor,
            doc_ids: Tensor | None = None,
            labels: Tensor | None = None,
            loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        ) -> Tensor:
            """Return the logits [batch, seq, vocab] of tokens [batch, seq] int64, or the loss.

            doc_ids: [batch, seq] int; attention stays within a document; None: one document.
            labels, loss: for a head that computes the loss itself
            (`titanlite.features.loss_chunks`).
            """
            if labels is None or loss is None:
                return _logits(self, tokens, doc_ids)
            return self.extras.loss(self, lambda: _logits(self, tokens, doc_ids), labels, loss)

        def init_buffers(self) -> None:
            """Compute the buffers by the model's own rules, which leave marked parameters alone."""
            for parameter in self.parameters():
                parameter._is_hf_initialized = True
            for module in self.modules():
                module.__dict__.pop("_is_hf_initialized", None)
            self.initialize_weights()

    Causal.__name__ = cls.__name__
    Causal.__qualname__ = cls.__qualname__
    Causal.__module__ = cls.__module__
    return Causal


def _logits(model: Any, tokens: Tensor, doc_ids: Tensor | None) -> Tensor:
    context: contextlib.AbstractContextManager[dict[str, Tensor]] = unpacked()
    if doc_ids is not None:
        context = model.extras.packed(model, doc_ids)
    with context as more:
        logits: Tensor = model.plain_forward(input_ids=tokens, use_cache=False, **more).logits
    return logits


@contextlib.contextmanager
def unpacked() -> Iterator[dict[str, Tensor]]:
    """Let each row be one sequence, else `transformers` asks the device and waits."""
    from transformers import masking_utils as masks

    plain = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield {}
    finally:
        masks.find_packed_sequence_indices = plain
