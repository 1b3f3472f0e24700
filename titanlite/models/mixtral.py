"""Mixtral (Jiang et al. 2024): a Llama whose feed-forward is a mixture of experts. No torch here.

`titanlite.models.experts.layer` has the modules.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.experts.family import expert_spec
from titanlite.models.llama_hf import ATTENTION_NAMES, ENTRIES, NORM_NAMES, Entry, HFTable
from titanlite.models.spec import ModelSpec


@dataclass(frozen=True)
class MixtralArgs(ExpertArgs):
    """A decoder's arguments; `ffn_dim` is the width of each expert."""

    @property
    def published_context(self) -> int:
        return {4096: 32768, 6144: 65536}.get(self.dim, 0)


#: Flavor → arguments: Mixtral of Experts (2024), and of 8x22B from public descriptions.
FLAVORS: dict[str, MixtralArgs] = {
    "debugmodel": MixtralArgs(256, 6, 16, n_kv_heads=4, ffn_dim=512, rope_theta=1e6),
    "8x7B": MixtralArgs(
        4096, 32, 32, n_kv_heads=8, ffn_dim=14336, vocab_size=32000, rope_theta=1e6
    ),
    "8x22B": MixtralArgs(
        6144, 56, 48, n_kv_heads=8, ffn_dim=16384, vocab_size=32000, rope_theta=1e6, aux_loss=0.001
    ),
}


HF = HFTable(
    "mixtral",
    MixtralArgs,
    {
        **ENTRIES,
        "rope_theta": Entry("rope_theta", 1e6),
        "num_local_experts": Entry("n_experts", 8),
        "num_experts_per_tok": Entry("top_k", 2),
        # `transformers` has no z-loss.
        "router_aux_loss_coef": Entry("aux_loss", 0.001),
        "sliding_window": None,
        "router_jitter_noise": Entry(lambda args: 0.0, only="read"),
    },
    {
        **ATTENTION_NAMES,
        "feed_forward.experts.w1": "block_sparse_moe.experts.*.w1.weight",
        "feed_forward.experts.w2": "block_sparse_moe.experts.*.w2.weight",
        "feed_forward.experts.w3": "block_sparse_moe.experts.*.w3.weight",
        "feed_forward.gate.weight": "block_sparse_moe.gate.weight",
        **NORM_NAMES,
    },
)


SPEC: ModelSpec = expert_spec("mixtral", FLAVORS, HF)
