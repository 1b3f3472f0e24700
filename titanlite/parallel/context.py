"""Context parallelism (CP): ranks that share each sequence.

    apply_cp(model, mesh)  # after tensor parallelism, before activation checkpointing
    part = split_batch(batch, mesh)         # the loaders of `build` do it (`CPLoader`)
    logits = model(part.tokens)             # [batch, seq / ranks, vocab]; the loss as without CP

A sequence is cut into twice as many chunks as there are ranks, and rank r takes chunk r and chunk r
from the end. Under a causal mask an early chunk has few keys and a late one many; so all ranks have
equally many pairs of query and key (Llama 3, 2024, section 3.3.2). All layers of a block but
attention work on single tokens. Attention gathers the keys and values of the whole sequence, once
per block.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from titanlite.data.loader import Batch
from titanlite.models.attention import attend, band, document_positions
from titanlite.parallel import ParallelismError

#: The differentiable all-gather: its backward is a reduce-scatter. torch 2.13 renamed it.
_all_gather: Any = (
    getattr(collectives, "all_gather_single_autograd", None)
    or collectives.all_gather_tensor_autograd
)

#: Name of the module in each block that a model lets be replaced.
_REPLACED = "inner_attention"


@dataclass
class CPRank:
    """One rank among those that share each sequence."""

    rank: int
    degree: int
    group: ProcessGroup
    #: Tokens of the whole sequence in the forward pass under way.
    seq_len: int = 0

    @classmethod
    def of(cls, mesh: DeviceMesh) -> CPRank:
        """Return this rank's. mesh: from `DistEnv.build_mesh`."""
        return cls(mesh.get_local_rank("cp"), mesh["cp"].size(), mesh.get_group("cp"))

    @property
    def chunks(self) -> tuple[int, int]:
        """Return the two chunks of this rank, of 2 * degree."""
        return self.rank, 2 * self.degree - 1 - self.rank

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's two chunks of x along `dim`, the sequence, one after the other in a
        copy.

        Raises ParallelismError if x cannot be cut into as many equal chunks.
        """
        chunk, rest = divmod(x.size(dim), 2 * self.degree)
        if rest or not chunk:
            raise ParallelismError(
                f"a sequence of {x.size(dim)} tokens cannot be cut into 2 equal chunks for each "
                f"of {self.degree} ranks: its length must be a multiple of {2 * self.degree}"
            )
        return torch.cat([x.narrow(dim, index * chunk, chunk) for index in self.chunks], dim)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole from every rank's `part`, in the order of the sequence;
        differentiable.
        """
        parts = _all_gather(x.unsqueeze(0).contiguous(), 0, self.group).unbind(0)
        # Each `unbind` and `chunk` is one node of the graph, whose backward makes one copy; a
        # slice's makes one each.
        heads, tails = zip(*(part.chunk(2, dim) for part in parts), strict=True)
        return torch.cat((*heads, *reversed(tails)), dim)


class ContextAttention(nn.Module):
    """Causal attention of this rank's queries to the keys of the whole sequence.

    Keys and values are gathered before they are repeated for groups of queries. Keys after a
    chunk's end, or before the window of its first query, are not multiplied. window: as for
    `SdpaAttention`.
    """

    def __init__(self, cp_rank: CPRank, window: int | None = None) -> None:
        super().__init__()
        self.cp_rank = cp_rank
        self.window = window

    def _spans(self, chunk: int) -> list[tuple[int, int]]:
        """Return for each chunk its first key and its end."""
        before = self.cp_rank.seq_len if self.window is None else self.window - 1
        return [
            (max(0, index * chunk - before), (index + 1) * chunk) for index in self.cp_rank.chunks
        ]

    def prepare(self, doc_ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return for each chunk the mask of its queries over its keys; None: that of the window
        alone.

        doc_ids: of the whole sequence, [batch, seq] int: masks [batch, 1, chunk, keys] bool. None:
        torch's `CausalBias`, which attention kernels for GPUs know; elsewhere torch makes a mask
        [chunk, keys] of it.
        """
        chunk = self.cp_rank.seq_len // (2 * self.cp_rank.degree)
        spans = self._spans(chunk)
        if doc_ids is None:
            from torch.nn.attention.bias import causal_lower_right  # it loads the compiler

            # Made here, since `torch.compile` can take them as arguments but cannot make them in a
            # graph. They hold no data, and dispatch modes (a trace without data, a counter of
            # FLOPs) cannot take them.
            with _disable_current_modes():
                early, late = (
                    causal_lower_right(chunk, end)
                    if self.window is None or self.window >= end
                    else None
                    for _, end in spans
                )
                return early, late

        def mask(own: Tensor, span: tuple[int, int]) -> Tensor:
            same = own.unsqueeze(2) == doc_ids[:, slice(*span)].unsqueeze(1)
            return (same & band(chunk, span[1] - span[0], self.window, own.device)).unsqueeze(1)

        first, second = map(mask, self.cp_rank.part(doc_ids).chunk(2, 1), spans)
        return first, second

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        """q: [batch, heads, seq / ranks, head_dim], k and v: [batch, kv_heads, …].

        Return q's shape.
        """
        keys, values = self.cp_rank.gather(torch.stack((k, v)), dim=3).unbind(0)
        parts = []
        for (begin, end), queries, allowed in zip(
            self._spans(q.size(2) // 2), q.chunk(2, 2), mask, strict=True
        ):
            seen = (
                band(queries.size(2), end - begin, self.window, q.device)
                if allowed is None
                else allowed
            )
            parts.append(attend(queries, keys[:, :, begin:end], values[:, :, begin:end], seen))
        return torch.cat(parts, 2)


def apply_cp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let `model` take each rank's part of the tokens (`split_batch`), in place.

    mesh: from `DistEnv.build_mesh`. Replaces every block's `inner_attention`; where a call gives no
    `positions`, they are those of this rank's part. Weights stay as they are.

    Raises ParallelismError if the model has no such attention. A call with a sequence that is, as a
    whole, longer than the model's RoPE tables raises it too.
    """
    cp_rank = CPRank.of(mesh)
    owners = [module for module in model.modules() if _REPLACED in dict(module.named_children())]
    if not owners:
        raise ParallelismError(
            f"context parallelism finds no {_REPLACED!r} in {type(model).__name__}"
        )
    for owner in owners:
        window = getattr(owner.get_submodule(_REPLACED), "window", None)
        setattr(owner, _REPLACED, ContextAttention(cp_rank, window))
    model.register_forward_pre_hook(functools.partial(_pass_positions, cp_rank), with_kwargs=True)


def _pass_positions(cp_rank: CPRank, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A hook before each forward pass: passes the positions of this rank's tokens in the
    sequence.
    """
    given = inspect.signature(model.forward).bind(*args, **kwargs)
    local, positions, doc_ids = (
        given.args[0],
        given.arguments.get("positions"),
        given.arguments.get("doc_ids"),
    )
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
            f"{cp_rank.seq_len}, but the model's RoPE tables have {rope.max_seq_len}: does each "
            "rank take its part only (split_batch)?"
        )
    if positions is None and doc_ids is not None:
        positions = cp_rank.part(document_positions(doc_ids))
    elif positions is None:
        positions = cp_rank.part(torch.arange(cp_rank.seq_len, device=local.device), 0).unsqueeze(0)
    given.arguments["positions"] = positions
    return given.args, given.kwargs


def split_batch(batch: Batch, mesh: DeviceMesh) -> Batch:
    """Return this rank's part of a batch that all ranks of its "cp" group hold alike.

    mesh: from `DistEnv.build_mesh`; the batch itself where no ranks share sequences. Parts do not
    overlap, so valid tokens and losses add up over ranks as those of different sequences do.
    """
    cp_rank = CPRank.of(mesh)
    return batch if cp_rank.degree == 1 else _part(batch, cp_rank)


def _part(batch: Batch, cp_rank: CPRank) -> Batch:
    # Documents stay whole: attention and positions depend on those of the whole sequence.
    return Batch(cp_rank.part(batch.tokens), cp_rank.part(batch.labels), batch.documents)


class CPLoader:
    """Gives this rank's part of the batches of a training or validation loader; position and state
    are the loader's.
    """

    def __init__(self, loader: Any, mesh: DeviceMesh) -> None:
        self.loader = loader
        self.cp_rank = CPRank.of(mesh)

    @property
    def steps_left(self) -> int | None:
        return cast("int | None", self.loader.steps_left)

    def next_step(self) -> list[Batch]:
        return [_part(batch, self.cp_rank) for batch in self.loader.next_step()]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.loader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        return (_part(batch, self.cp_rank) for batch in self.loader)
