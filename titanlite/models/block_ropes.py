"""Rotary tables of a model whose blocks rotate in several ways, or not at all.

    rope = build_rope(args)  # of `titanlite.models.rope`
    rotation = rope(seq_len, positions).of(args.of_block(3).rotary)

It has the attributes and methods of `titanlite.models.rope.Rope`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from titanlite.models.llama import Rotary
    from titanlite.models.rope import Rope, Rotation


class NoRotation:
    """Leaves q and k as they are. positions: [batch, seq] int64; None: 0, 1, 2, …"""

    def __init__(self, positions: Tensor | None = None) -> None:
        self.positions = positions

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Rotations:
    """The rotations of one batch: a plain object, as `Rotation` must be."""

    def __init__(self, by_kind: Mapping[Rotary | None, Rotation | NoRotation]) -> None:
        self._by_kind = by_kind

    def of(self, rotary: Rotary | None) -> Rotation | NoRotation:
        return self._by_kind[rotary]


class BlockRopes(nn.Module):
    """One `Rope` for each kind of tables."""

    def __init__(self, ropes: Mapping[Rotary, Rope], max_seq_len: int) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.ropes = dict(ropes)
        self.tables = nn.ModuleList(self.ropes.values())

    def init_buffers(self) -> None:
        for rope in self.ropes.values():
            rope.init_buffers()

    def forward(self, seq_len: int, positions: Tensor | None = None) -> Rotations:
        found: dict[Rotary | None, Rotation | NoRotation] = {None: NoRotation(positions)}
        for kind, rope in self.ropes.items():
            found[kind] = rope(seq_len, positions)
        return Rotations(found)
