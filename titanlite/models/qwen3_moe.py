"""The sparse models of the Qwen3 family (Qwen3 technical report, 2025): Qwen3's decoder with a
mixture of experts. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.models.argument_fields import argument
from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.experts.family import expert_spec
from titanlite.models.llama_hf import (
    ATTENTION_NAMES,
    ENTRIES,
    EXPERT_NAMES,
    NORM_NAMES,
    Entry,
    HFTable,
)
from titanlite.models.qwen3 import NO_WINDOWS
from titanlite.models.spec import ModelSpec, ShapeError

if TYPE_CHECKING:
    from typing_extensions import Self


class Blocks(tuple[int, ...]):
    """Numbers of blocks, from 0."""

    @classmethod
    def parse(cls, value: object) -> Blocks:
        """Return the blocks of a list. Raises ShapeError for anything else."""
        if not isinstance(value, list | tuple) or {type(index) for index in value} - {int}:
            raise ShapeError(
                Problem(
                    "model",
                    "overrides.dense_blocks",
                    f"expected a list of integers, got {value!r:.80}",
                )
            )
        return cls(value)


@dataclass(frozen=True)
class Qwen3MoeArgs(ExpertArgs):
    """Arguments of Qwen3's decoder with experts; `ffn_dim` is the width of a dense block."""

    #: Width of a head; it does not depend on `dim`.
    head_dim: int = 128
    expert_width: int = 768
    #: Every so many blocks one has experts; the others are dense.
    sparse_step: int = argument(1, decides="")
    #: More blocks that are dense.
    dense_blocks: Blocks = argument(Blocks(), decides="all_dense_blocks")
    #: Whether the weights of a token's experts are divided by their sum.
    norm_topk: bool = True
    #: Step by which each expert's bias moves after an update; 0: there are no biases.
    bias_update: float = argument(0.0, decides="")

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = []
        beyond = [index for index in self.dense_blocks if not 0 <= index < self.n_layers]
        if beyond:
            wrong.append(f"dense_blocks has {beyond[0]}, and blocks are 0 to {self.n_layers - 1}")
        elif self.n_experts and len(self.all_dense_blocks) == self.n_layers:
            wrong.append("no block has experts: the family qwen3 has dense models")
        if wrong:
            raise ShapeError(*wrong)

    @property
    def all_dense_blocks(self) -> list[int]:
        return [index for index in range(self.n_layers) if not self.of_block(index).n_experts]

    def of_block(self, index: int) -> Self:
        is_dense = (index + 1) % self.sparse_step or index in self.dense_blocks
        return self.without_experts() if is_dense else self

    qk_norm = True
    published_context = 40960


def _qwen3(dim: int, n_layers: int, n_heads: int, ffn_dim: int, **rest: Any) -> Qwen3MoeArgs:
    shape = {
        "n_kv_heads": 4,
        "vocab_size": 151936,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "n_experts": 128,
        "top_k": 8,
        "aux_loss": 0.001,
    }
    return Qwen3MoeArgs(dim, n_layers, n_heads, ffn_dim=ffn_dim, **{**shape, **rest})


_DEBUG = {"head_dim": 32, "n_experts": 16, "top_k": 4, "expert_width": 128, "vocab_size": None}
FLAVORS = {
    "debugmodel": _qwen3(256, 6, 8, 768, **_DEBUG),
    "30B-A3B": _qwen3(2048, 48, 32, 6144),
    "235B-A22B": _qwen3(4096, 94, 64, 12288, expert_width=1536),
}


HF = HFTable(
    "qwen3_moe",
    Qwen3MoeArgs,
    {
        **ENTRIES,
        "head_dim": Entry("head_dim", lambda given: given["dim"] // max(given["n_heads"], 1)),
        # `transformers` 5 writes the number of experts under its own name.
        "num_local_experts": Entry("n_experts", 128, only="read"),
        "num_experts": Entry("n_experts", itemgetter("n_experts")),
        "num_experts_per_tok": Entry("top_k", 8),
        "moe_intermediate_size": Entry("expert_width", 768),
        "norm_topk_prob": Entry("norm_topk", False),
        "decoder_sparse_step": Entry("sparse_step", 1),
        "mlp_only_layers": Entry("dense_blocks", Blocks(), lambda args: list(args.dense_blocks)),
        # `transformers` has no z-loss.
        "router_aux_loss_coef": Entry("aux_loss", 0.001),
        **NO_WINDOWS,
    },
    {**ATTENTION_NAMES, **EXPERT_NAMES, **NORM_NAMES},
    "Qwen3MoeForCausalLM",
)


SPEC: ModelSpec = expert_spec("qwen3_moe", FLAVORS, HF)
