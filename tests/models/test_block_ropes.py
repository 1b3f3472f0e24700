"""Blocks with rotary tables of their own: other bases, scalings, windows, or no rotation at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.support.llamas import SCALED, tokens_of
from titanlite.models.block_ropes import BlockRopes
from titanlite.models.layers import Llama
from titanlite.models.llama import LlamaArgs, Rotary
from titanlite.models.rope import Rope


@dataclass(frozen=True)
class MixedArgs(LlamaArgs):
    """Block 1 rotates by another base, block 2 not at all; block 1 has a window."""

    window: int | None = None
    local_theta: float = 100.0
    is_still: bool = False

    @property
    def rotary(self) -> Rotary | None:
        return None if self.is_still else super().rotary

    def of_block(self, index: int) -> Any:
        if index == 1:
            return replace(self, rope_theta=self.local_theta, rope_scaling=None, window=12)
        return replace(self, is_still=index == 2)


ARGS = MixedArgs(64, 4, 4, vocab_size=96, multiple_of=32, max_seq_len=64, rope_scaling=SCALED)


def built(args: LlamaArgs) -> Llama:
    torch.manual_seed(0)
    return Llama(args)


def one_by_one(model: Llama, args: LlamaArgs, tokens: torch.Tensor) -> torch.Tensor:
    """The model by hand: each block with the tables that its own arguments describe."""
    x = model.tok_embeddings(tokens)
    for index, block in enumerate(model.layers.values()):
        of_block = args.of_block(index)
        rotation: Any = nn.Identity()
        if of_block.rotary is not None:
            tables = Rope(
                args.head_dim, args.max_seq_len, of_block.rope_theta, of_block.rope_scaling
            )
            rotation = tables(tokens.size(1))
        x = block(x, rotation, None)
    logits: torch.Tensor = model.output(model.norm(x))
    return logits


def test_each_block_rotates_by_its_own_tables_and_equal_tables_exist_once() -> None:
    model = built(ARGS)
    tokens = tokens_of(ARGS)
    assert model(tokens).equal(one_by_one(model, ARGS, tokens))
    assert isinstance(model.rope, BlockRopes)
    assert len(model.rope.tables) == 2
    assert list(dict(model.named_buffers())) == [
        "rope.tables.0.cos",
        "rope.tables.0.sin",
        "rope.tables.1.cos",
        "rope.tables.1.sin",
    ]
    assert not model.rope.state_dict()


def test_documents_in_a_row_are_as_in_rows_of_their_own() -> None:
    model = built(ARGS)
    tokens = tokens_of(ARGS, batch=1)
    ids = torch.zeros_like(tokens)
    ids[:, 30:] = 1
    logits = model(tokens, doc_ids=ids)
    for part in (slice(0, 30), slice(30, 64)):
        torch.testing.assert_close(logits[:, part], model(tokens[:, part]), atol=1e-5, rtol=1e-5)
