"""The DeepSeek-V3 family (DeepSeek-V2, 2024; DeepSeek-V3, 2024): latent attention, and experts of
which some are shared by all tokens. No torch here.

`titanlite.models.latent_attention` has the attention, `titanlite.models.moe` the mixture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titanlite.models import llama
from titanlite.models.expert_args import ExpertArgs, experts_of
from titanlite.models.llama import decoder_spec, linear_init
from titanlite.models.rope_scaling import YarnScaling
from titanlite.models.spec import Init, Size

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

#: Of the norms on latents. `transformers` has this number whatever `rms_norm_eps` is.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeepSeekV3Args(ExpertArgs):
    """Arguments of DeepSeek-V3's decoder, and of DeepSeek-V2's."""

    #: Width of the latent of queries; 0: queries are a product of the hidden states.
    q_lora_rank: int = 0
    #: Width of the latent of keys and values.
    kv_lora_rank: int = 512
    #: Widths of the parts of each head's query and key: without positions, and rotated.
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    #: Width of each head's value.
    v_head_dim: int = 128
    #: Pairs that rotate together are neighbours, as in DeepSeek's files.
    rope_interleave: bool = True
    #: Blocks at the beginning whose feed-forward is dense.
    n_dense_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()

    def _misfits_of_derived(self) -> list[str]:
        wrong = []
        if self.ffn_width < 1:
            wrong.append(f"ffn_width must be positive, got {self.ffn_width}")
        return wrong

    def of_block(self, index: int) -> Self:
        return replace(self, n_experts=0) if index < self.n_dense_layers else self

    @property
    def head_dim(self) -> int:
        """Return the width of the rotated part of a head."""
        return self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Return the width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def score_factor(self) -> float:
        """Return what scores are multiplied by, beside the root of the width: YaRN's `mscale`,
        squared.
        """
        scaling = self.rope_scaling
        return scaling.mscale_of_all**2 if isinstance(scaling, YarnScaling) else 1.0

    def attention_linears(self) -> dict[str, Size]:
        queries = self.n_heads * self.qk_head_dim
        expanded = self.n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        found: dict[str, Size] = {}
        if self.q_lora_rank:
            found["attention.wq_a"] = Size(self.dim, self.q_lora_rank)
            found["attention.wq_b"] = Size(self.q_lora_rank, queries)
        else:
            found["attention.wq"] = Size(self.dim, queries)
        found["attention.wkv_a"] = Size(self.dim, self.kv_lora_rank + self.qk_rope_head_dim)
        found["attention.wkv_b"] = Size(self.kv_lora_rank, expanded)
        found["attention.wo"] = Size(self.n_heads * self.v_head_dim, self.dim)
        return found

    def attention_extras(self) -> dict[str, int]:
        found = {"attention.q_norm": self.q_lora_rank} if self.q_lora_rank else {}
        found["attention.kv_norm"] = self.kv_lora_rank
        return found

    def attention_flops(self, seq_len: int) -> int:
        return 6 * self.n_heads * (self.qk_head_dim + self.v_head_dim) * seq_len

FLAVORS = {
    "debugmodel": DeepSeekV3Args(256, 6, 16, ffn_dim=1024, n_experts=8, top_k=3)
}
_LATENT = re.compile(r"layers\.(\d+)\.attention\.(?:w(?:q|q_a|q_b|kv_a|kv_b)|(?:q|kv)_norm)\.weight")

def init_rule(name: str, args: DeepSeekV3Args) -> Init:
    match = _LATENT.fullmatch(name)
    if match is None or int(match[1]) >= args.n_layers:
        return llama.init_rule(name, args)
    return Init("ones") if "norm" in name else linear_init()

_LATENT_PLAN = {
    "attention_norm": "sequence",
    "attention.wq_a": "sequence",
    "attention.q_norm": "sequence",
    "attention.wq_b": "gathered",
    "attention.wq": "gathered",
    "attention.wkv_a": "sequence",
    "attention.rotated_key": "shared",
    "attention.kv_norm": "sequence",
    "attention.wkv_b": "gathered",
    "attention.wo": "rowwise",
}

def block_plan(args: DeepSeekV3Args) -> dict[str, str]:
    own = {*args.attention_linears(), *args.attention_extras()}
    kinds = dict(_LATENT_PLAN)
    for name, kind in llama.block_plan(args).items():
        if not name.startswith("attention"):
            kinds[name] = kind
    return kinds

def tensor_plan(args: DeepSeekV3Args) -> dict[str, str]:
    plan = {"tok_embeddings": "embedding"}
    for index, block in enumerate(llama.block_names(args)):
        for name, kind in block_plan(args.of_block(index)).items():
            plan[f"{block}.{name}"] = kind
    plan["norm"] = "sequence"
    plan["output"] = "head"
    return plan

def _build(args: DeepSeekV3Args) -> nn.Module:
    from titanlite.models.latent_attention import DeepSeekV3

    return DeepSeekV3(args)

SPEC = decoder_spec("deepseek_v3", FLAVORS, build=_build, init_rule=init_rule, tensor_plan=tensor_plan, experts=experts_of)
