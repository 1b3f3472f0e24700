"""Attention of ranks that share each sequence.

    apply_cp(model, mesh)  # after tensor parallelism, before activation checkpointing
    part = split_batch(batch, mesh)  # the loaders of a run do it (`CPLoader`)
    logits = model(part.tokens)  # [batch, seq / ranks, vocab]; the loss as without CP

All layers of a block but attention work on single tokens. Attention gathers the keys and values of
the whole sequence, once per block.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from titanlite.dist import ParallelismError
from titanlite.features.context.balanced_chunks import CPRank
from titanlite.models.attention import attend, band, document_positions
from titanlite.models.sinks import attend_in_window, attend_masked
from titanlite.parallel.submeshes import check_mesh

#: Name of the module in each block that a model lets be replaced.
_REPLACED = "inner_attention"


class ContextAttention(nn.Module):
    """Causal attention of this rank's queries to the keys of the whole sequence.

    Keys and values are gathered before they are repeated for groups of queries. Keys after a
    chunk's end, or before the window of its first query, are not multiplied. replaced: its `window`
    is as for `SdpaAttention`, its `chunk` as for `ChunkedAttention` of Llama 4; where `has_sinks`,
    `forward` gets them.
    """

    def __init__(self, cp_rank: CPRank, replaced: nn.Module | None = None) -> None:
        super().__init__()
        self.cp_rank = cp_rank
        self.window: int | None = getattr(replaced, "window", None)
        self.chunk: int | None = getattr(replaced, "chunk", None)
        self.has_sinks: bool = getattr(replaced, "has_sinks", False)

    def _spans(self, chunk: int) -> list[tuple[int, int]]:
        before = self.cp_rank.seq_len if self.window is None else self.window - 1
        spans = []
        for index in self.cp_rank.chunks:
            first = max(0, index * chunk - before)
            spans.append((first, (index + 1) * chunk))
        return spans

    def prepare(self, doc_ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return for each chunk the mask of its queries over its keys; None: causal, in the window.

        doc_ids: of the whole sequence, [batch, seq] int: masks [batch, 1, chunk, keys] bool. None:
        torch's `CausalBias`, which GPU kernels know.
        """
        chunk = self.cp_rank.seq_len // (2 * self.cp_rank.degree)
        spans = self._spans(chunk)
        masks: list[Tensor | None] = []
        if doc_ids is None:
            from torch.nn.attention.bias import causal_lower_right  # it loads the compiler

            for _, end in spans:
                # None: the window decides.
                mask = None
                if not self.has_sinks and (self.window is None or self.window >= end):
                    # Made here, since `torch.compile` can take them as arguments but cannot make
                    # them in a graph. They hold no data, and dispatch modes (a trace without data,
                    # a counter of FLOPs) cannot take them.
                    with _disable_current_modes():
                        mask = causal_lower_right(chunk, end)
                masks.append(mask)
            return masks[0], masks[1]
        if self.chunk is not None:
            from titanlite.models.document_attention import chunk_ids

            doc_ids = chunk_ids(doc_ids, self.chunk)
        own = self.cp_rank.part(doc_ids).chunk(2, 1)
        for queries, (begin, end) in zip(own, spans, strict=True):
            keys = doc_ids[:, begin:end]
            same = queries.unsqueeze(2) == keys.unsqueeze(1)
            seen = band(queries.size(1), keys.size(1), self.window, queries.device)
            masks.append((same & seen).unsqueeze(1))
        return masks[0], masks[1]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: tuple[Tensor | None, Tensor | None],
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return q's shape.

        q: [batch, heads, seq / ranks, head_dim], k and v: [batch, kv_heads, …], sinks: [heads].
        """
        keys, values = self.cp_rank.gather(torch.stack((k, v)), dim=3).unbind(0)
        spans = self._spans(q.size(2) // 2)
        parts = []
        for (begin, end), queries, seen in zip(spans, q.chunk(2, 2), mask, strict=True):
            inputs = (queries, keys[:, :, begin:end], values[:, :, begin:end])
            if sinks is not None:
                if seen is None:
                    parts.append(attend_in_window(*inputs, sinks, self.window))
                else:
                    parts.append(attend_masked(*inputs, sinks, seen))
                continue
            if seen is None:
                seen = band(queries.size(2), end - begin, self.window, q.device)
                if self.chunk is not None:
                    numbers = torch.arange(begin, end, device=q.device) // self.chunk
                    seen &= numbers[-queries.size(2) :, None] == numbers
            parts.append(attend(*inputs, seen))
        return torch.cat(parts, 2)


def apply_cp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let `model` take each rank's part of the tokens (`split_batch`), in place.

    mesh: from `DistEnv.build_mesh`. Replaces every block's `inner_attention`; where a call gives no
    `positions`, they are those of this rank's part. Weights stay as they are.

    Raises ParallelismError for another mesh, or if the model has no such attention. A call with a
    sequence that is, as a whole, longer than the model's RoPE tables raises it too.
    """
    check_mesh(mesh)
    cp_rank = CPRank.of(mesh)
    owners = [module for module in model.modules() if _REPLACED in dict(module.named_children())]
    if not owners:
        raise ParallelismError(
            f"context parallelism finds no {_REPLACED!r} in {type(model).__name__}"
        )
    for owner in owners:
        inner = owner.get_submodule(_REPLACED)
        setattr(owner, _REPLACED, ContextAttention(cp_rank, inner))
    model.register_forward_pre_hook(functools.partial(_pass_positions, cp_rank), with_kwargs=True)


def _pass_positions(cp_rank: CPRank, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    given = inspect.signature(model.forward).bind(*args, **kwargs)
    local = given.args[0]
    positions = given.arguments.get("positions")
    doc_ids = given.arguments.get("doc_ids")
    # Given positions tell the length: the hidden states of a pipeline may also be divided over
    # other ranks.
    own = local.size(1) if positions is None else positions.size(-1)
    if doc_ids is not None:
        own = doc_ids.size(1) // cp_rank.degree
    cp_rank.seq_len = own * cp_rank.degree
    rope: Any = model.get_submodule("rope")
    if cp_rank.seq_len > rope.max_seq_len:
        raise ParallelismError(
            f"{cp_rank.degree} ranks with {own} tokens each share a sequence of "
            f"{cp_rank.seq_len}, but the model's RoPE tables have {rope.max_seq_len}. Does each "
            "rank take its part only (split_batch)?"
        )
    if positions is None and doc_ids is not None:
        positions = cp_rank.part(document_positions(doc_ids))
    elif positions is None:
        positions = cp_rank.part(torch.arange(cp_rank.seq_len, device=local.device), 0).unsqueeze(0)
    given.arguments["positions"] = positions
    return given.args, given.kwargs
