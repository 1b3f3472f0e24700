"""Attention of models of `transformers` within documents of packed sequences.

Positions begin anew with each document, and the model's attention is replaced by that of variable
lengths (`titanlite.models.document_attention`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.attention import document_positions
from titanlite.models.document_attention import DocumentMask, document_mask
from titanlite.models.hf.causal import causal_model, unpacked

if TYPE_CHECKING:
    from titanlite.models.hf.args import HFArgs
    from titanlite.models.hf.skeleton import Skeleton

#: Name of titanlite's attention among those of `transformers`.
NAME = "titanlite"


class Mask(NamedTuple):
    """Takes the place of a mask [batch, 1, seq, seq]."""

    documents: DocumentMask
    #: Tokens that a token sees, itself included; None: all before it.
    window: int | None


#: The documents of the batch whose masks are made.
_documents: ContextVar[DocumentMask | None] = ContextVar("documents", default=None)


class NoDocuments(ValueError):
    """A model cannot stop attention at documents."""


def _make_mask(*args: Any, **given: Any) -> Any:
    """Make a mask as `AttentionMaskInterface` asks, of a causal mask or a window."""
    from transformers.masking_utils import (
        causal_mask_function,
        sdpa_mask,
        sliding_window_overlay,
    )

    documents = _documents.get()
    if documents is None:
        return sdpa_mask(*args, **given)
    seen = given["mask_function"]
    if seen is causal_mask_function:
        return Mask(documents, None)
    parts = inspect.getclosurevars(seen).nonlocals.get("mask_functions", ())
    overlay = sliding_window_overlay(1).__qualname__
    others = [part for part in parts if part is not causal_mask_function]
    if len(parts) != 2 or len(others) != 1 or others[0].__qualname__ != overlay:
        raise NoDocuments("its masks are not those of causal attention or of a window")
    return Mask(documents, inspect.getclosurevars(others[0]).nonlocals["sliding_window"])


#: Arguments of attention that change nothing here.
_KNOWN = frozenset(
    {"sliding_window", "position_ids", "use_cache", "output_attentions", "output_hidden_states"}
    | {"is_causal", "output_router_logits", "return_dict", "cache_position"}
)


def _attend(  # noqa: PLR0913
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention as `AttentionInterface` asks.

    query: [batch, heads, seq, width], key and value: [batch, kv_heads, seq, width]. Returns [batch,
    seq, heads, width of value].
    """
    if not isinstance(attention_mask, Mask):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
        return found
    unknown = [name for name, item in more.items() if name not in _KNOWN and item is not None]
    narrower = query.size(-1) - value.size(-1)
    if dropout or unknown or narrower < 0:
        raise NoDocuments("its attention takes more than queries, keys and values")
    if narrower:
        value = F.pad(value, (0, narrower))
    documents, window = attention_mask
    out = documents.attend(query, key, value, window, scaling).transpose(1, 2)
    if narrower:
        out = out[..., :-narrower]
    return out.contiguous(), None


def exchange(model: Any) -> None:
    """Let a model use `_attend`, in place."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionMaskInterface.register(NAME, _make_mask)
    AttentionInterface.register(NAME, _attend)
    model.config._attn_implementation = NAME


@contextlib.contextmanager
def _within(doc_ids: Tensor) -> Iterator[dict[str, Tensor]]:
    """Let `_make_mask` know the documents, [batch, seq] int; yield the call's arguments."""
    token = _documents.set(document_mask(doc_ids))
    try:
        with unpacked():
            yield {"position_ids": document_positions(doc_ids)}
    finally:
        _documents.reset(token)


def packed(args: HFArgs, model: Any, doc_ids: Tensor) -> AbstractContextManager[dict[str, Tensor]]:
    """Let attention stop at documents; return the call's arguments.

    doc_ids: [batch, seq] int. Raises ValueError if it cannot.
    """
    reason = why_no_documents(args)
    if reason:
        raise ValueError(f"attention cannot stop at documents: {reason}")
    if model.config._attn_implementation != NAME:
        exchange(model)
    return _within(doc_ids)


# Which models can


@functools.lru_cache(maxsize=8)
def why_no_documents(args: HFArgs) -> str:
    """Return why attention cannot stop at documents; "": it can."""
    known = args.skeleton
    return _excluded(known) or _tried(known)


def _excluded(known: Skeleton) -> str:
    """Return what else carries state between documents."""
    model = known.model
    name = type(model).__name__
    takes_positions = False
    for part in (model, model.base_model):
        forward = getattr(type(part), "plain_forward", type(part).forward)
        takes_positions |= "position_ids" in inspect.signature(forward).parameters
    if not takes_positions:
        return f"the forward of {name} takes no position_ids"
    if getattr(model, "_is_stateful", False):
        return f"layers of {name} carry a state from token to token"
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            return f"the convolution {path} of {name} sees tokens of other documents"
    rope = getattr(known.config, "rope_parameters", None) or {}
    tables = [rope] if "rope_type" in rope else list(rope.values())
    kinds = {table.get("rope_type") for table in tables if isinstance(table, dict)}
    varying = kinds & {"dynamic", "longrope"}
    if varying:
        return f'RoPE tables of "{varying.pop()}" depend on the length of the sequence'
    return ""


def _tried(known: Skeleton) -> str:
    """Run the model on the meta device; return why a block gets no mask."""
    with torch.device("meta"):
        model = causal_model(known.config)
    name = type(model).__name__
    if model.config._attn_implementation != "sdpa":
        return f"the attention of {name} is its own"
    exchange(model)
    model.train()
    without = dict.fromkeys(known.blocks)

    def look(block: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if any(isinstance(item, Mask) for item in [*args, *kwargs.values()]):
                without.pop(block, None)  # a block may run twice

        return hook

    for block in known.blocks:
        model.get_submodule(block).register_forward_pre_hook(look(block), with_kwargs=True)
    tokens = torch.zeros((1, 6), dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _within(tokens) as given:
            model.plain_forward(input_ids=tokens, use_cache=False, **given)
    except Exception as error:  # code of `transformers` raises any class
        return f"{name}: {str(error).partition(chr(10))[0]}"
    return f"{next(iter(without))} of {name} takes no mask" if without else ""
