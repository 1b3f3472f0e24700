"""Attention of models of `transformers` within documents of packed sequences.

Positions begin anew with each document. Where a model's attention is exchangeable, it is that of
variable lengths (`titanlite.models.document_attention`). Elsewhere `transformers` makes masks of
the positions, [batch, 1, seq, seq].
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

from titanlite.models.attention import document_begins, document_positions
from titanlite.models.document_attention import DocumentMask, document_mask
from titanlite.models.hf.causal import causal_model

if TYPE_CHECKING:
    from titanlite.models.hf.args import HFArgs
    from titanlite.models.hf.skeleton import Skeleton

#: How a model's attention stops at documents.
VARLEN = "varlen"
MASKS = "masks"
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
    """A model cannot stop attention at documents in one of the ways."""


def _make_mask(*args: Any, **given: Any) -> Any:
    """Make a mask as `AttentionMaskInterface` asks."""
    from transformers.masking_utils import sdpa_mask

    documents = _documents.get()
    if documents is None:
        return sdpa_mask(*args, **given)
    return Mask(documents, _window_of(given["mask_function"]))


def _window_of(seen: Callable[..., Any]) -> int | None:
    """Return a mask function's window. Raises NoDocuments for other kinds of attention."""
    from transformers.masking_utils import causal_mask_function, sliding_window_overlay

    if seen is causal_mask_function:
        return None
    parts = inspect.getclosurevars(seen).nonlocals.get("mask_functions", ())
    overlay = sliding_window_overlay(1).__qualname__
    others = [part for part in parts if part is not causal_mask_function]
    if len(parts) != 2 or len(others) != 1 or others[0].__qualname__ != overlay:
        raise NoDocuments("its masks are not those of causal attention or of a window")
    window: int = inspect.getclosurevars(others[0]).nonlocals["sliding_window"]
    return window


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


class _Packed:
    """Tells `transformers` the documents, [batch, seq] int; its own function waits."""

    def __init__(self, number: Tensor | None) -> None:
        self.number = number
        #: Whether a mask was made of it.
        self.asked = False

    def __call__(self, position_ids: Tensor) -> Tensor | None:
        self.asked = True
        return self.number


@contextlib.contextmanager
def within(doc_ids: Tensor, way: str) -> Iterator[dict[str, Tensor]]:
    """Let `transformers` make masks of documents; yield the call's arguments.

    doc_ids: [batch, seq] int. way: VARLEN after `exchange`, or MASKS.
    """
    from transformers import masking_utils as masks

    packed = _Packed(None if way == VARLEN else document_begins(doc_ids).cumsum(1))
    token = _documents.set(document_mask(doc_ids) if way == VARLEN else None)
    plain = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = packed
    try:
        yield {"position_ids": document_positions(doc_ids)}
        if way == MASKS and not packed.asked:
            raise NoDocuments("its masks do not follow its position_ids")
    finally:
        masks.find_packed_sequence_indices = plain
        _documents.reset(token)


def packed(args: HFArgs, model: Any, doc_ids: Tensor) -> AbstractContextManager[dict[str, Tensor]]:
    """Let attention stop at documents; return the call's arguments.

    doc_ids: [batch, seq] int. Raises ValueError if it cannot.
    """
    way, reason = way_of(args)
    if not way:
        raise ValueError(f"attention cannot stop at documents: {reason}")
    if way == VARLEN and model.config._attn_implementation != NAME:
        exchange(model)
    return within(doc_ids, way)


# Which way a model can go


@functools.lru_cache(maxsize=8)
def way_of(args: HFArgs) -> tuple[str, str]:
    """Return how attention stops at documents, or "" and why it cannot."""
    known = args.skeleton
    reason = _excluded(known)
    if reason:
        return "", reason
    for way in (VARLEN, MASKS):
        reason = _tried(known, way)
        if not reason:
            return way, ""
    return "", reason


def _excluded(known: Skeleton) -> str:
    """Return what else carries state between documents."""
    model = known.model
    name = type(model).__name__
    if not any(_takes_positions(part) for part in (model, model.base_model)):
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


def _takes_positions(model: Any) -> bool:
    forward = getattr(type(model), "plain_forward", type(model).forward)
    return "position_ids" in inspect.signature(forward).parameters


def _tried(known: Skeleton, way: str) -> str:
    """Run the model on the meta device; return why a block gets no mask."""
    with torch.device("meta"):
        model = causal_model(known.config)
    if way == VARLEN:
        if model.config._attn_implementation != "sdpa":
            return "its attention is its own"
        exchange(model)
    model.train()
    without: list[str] = []
    seq = 6

    def look(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not any(_is_mask(item, seq) for item in [*args, *kwargs.values()]):
                without.append(name)

        return hook

    for name in known.blocks:
        model.get_submodule(name).register_forward_pre_hook(look(name), with_kwargs=True)
    tokens = torch.zeros((1, seq), dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), within(tokens, way) as given:
            model.plain_forward(input_ids=tokens, use_cache=False, **given)
    except Exception as error:  # code of `transformers` raises any class
        return f"{type(model).__name__}: {str(error).partition(chr(10))[0]}"
    if without:
        return f"{without[0]} of {type(model).__name__} takes no mask"
    return ""


def _is_mask(item: Any, seq: int) -> bool:
    if isinstance(item, Tensor):
        return item.ndim == 4 and item.shape[-2:] == (seq, seq)
    return isinstance(item, Mask)
