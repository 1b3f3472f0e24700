"""A causal model of `transformers` as a module that `ModelSpec` describes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def causal_model(config: Any) -> Any:
    """Return the model of a config on the current default device, as `ModelSpec` wants it."""
    import torch
    from transformers import AutoModelForCausalLM

    make = functools.partial(AutoModelForCausalLM.from_config, config, dtype=torch.float32)
    try:
        model = make(attn_implementation="sdpa")
    except ValueError:  # some models have only their own attention
        model = make(attn_implementation="eager")
    cls: Any = type(model)
    model.__class__ = _logits_class(cls)
    return model


@functools.cache
def _logits_class(cls: Any) -> Any:
    class Causal(cls):
        def forward(self, tokens: Tensor) -> Tensor:
            """Return the logits [batch, seq, vocab] of tokens [batch, seq] int64."""
            from transformers import masking_utils as masks

            # It asks the device whether a row holds several sequences, and waits for the answer:
            # here it never does.
            plain = masks.find_packed_sequence_indices
            masks.find_packed_sequence_indices = lambda position_ids: None
            try:
                logits: Tensor = super().forward(input_ids=tokens, use_cache=False).logits
            finally:
                masks.find_packed_sequence_indices = plain
            return logits

        def init_buffers(self) -> None:
            """Compute the buffers by the model's own rules, which leave marked parameters as they
            are.
            """
            for parameter in self.parameters():
                parameter._is_hf_initialized = True
            for module in self.modules():
                module.__dict__.pop("_is_hf_initialized", None)
            self.initialize_weights()

    Causal.__name__ = cls.__name__
    Causal.__qualname__ = cls.__qualname__
    Causal.__module__ = cls.__module__
    return Causal
