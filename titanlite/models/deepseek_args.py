"""The arguments of DeepSeek-V3's decoder, and of DeepSeek-V2's. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.fields import argument
from titanlite.models.rope_scaling import YarnScaling
from titanlite.models.spec import ShapeError, Size

#: Epsilon of the norms on latents in `transformers`, whatever `rms_norm_eps` is.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeepSeekV3Args(ExpertArgs):
    """Arguments of DeepSeek-V3's decoder, and of DeepSeek-V2's.

    `ffn_dim` is the width of a dense feed-forward.
    """

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
    #: First blocks with a dense feed-forward.
    n_dense_layers: int = 1
    #: Hidden width of each expert.
    expert_width: int = 1408
    #: Experts that every token passes through.
    n_shared_experts: int = 1
    #: How scores are made of the router's logits: "sigmoid" (V3) or "softmax" (V2).
    score: str = "sigmoid"
    #: Whether the scores of a token's experts are divided by their sum.
    norm_topk: bool = True
    #: What all weights of experts are multiplied by.
    route_scale: float = 1.0
    #: Groups of experts, and those that a token chooses among.
    n_groups: int = 1
    top_groups: int = 1
    #: Best experts of a group whose scores together tell how good it is: 2 (V3), or 1 (V2).
    group_best: int = argument(2, decides="best_of_groups")
    #: Step by which each expert's bias moves after an update; 0: it stays.
    bias_update: float = argument(0.001, decides="expert_bias")
    #: Biases balance the load, so no loss does.
    aux_loss: float = 0.0
    norm_eps: float = 1e-6
    #: Of the norms on latents.
    latent_norm_eps: float = LATENT_NORM_EPS
    #: Of the norm before the head; None: `norm_eps`.
    last_norm_eps: float | None = argument(None, decides="last_eps")

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = []
        if self.v_head_dim > self.qk_head_dim:
            wrong.append(
                f"v_head_dim = {self.v_head_dim} is wider than a query, which has "
                f"qk_nope_head_dim + qk_rope_head_dim = {self.qk_head_dim}"
            )
        if self.score == "softmax_of_chosen":
            wrong.append('score must be "sigmoid" or "softmax"')
        if wrong:
            raise ShapeError(*wrong)

    def _problems_of_derived(self) -> list[str]:
        wrong = []
        if self.ffn_width < 1:
            wrong.append(f"ffn_width must be positive, got {self.ffn_width}")
        if self.qk_rope_head_dim % 2:
            wrong.append(
                f"qk_rope_head_dim = {self.qk_rope_head_dim} is no even number: RoPE rotates pairs"
            )
        if self.kv_heads != self.n_heads:
            wrong.append(
                f"n_kv_heads = {self.kv_heads} is not n_heads = {self.n_heads}: each head has keys "
                "and values of its own"
            )
        return wrong

    @property
    def head_dim(self) -> int:
        """Return the width of the rotated part of a head."""
        return self.qk_rope_head_dim

    is_latent = True

    @property
    def qk_head_dim(self) -> int:
        """Return the width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def score_factor(self) -> float:
        """Return what attention's scores are multiplied by, beside the root of the width: YaRN's
        `mscale`, squared.
        """
        scaling = self.rope_scaling
        return scaling.mscale_of_all**2 if isinstance(scaling, YarnScaling) else 1.0

    @property
    def last_eps(self) -> float:
        """Return the epsilon of the norm before the head."""
        return self.norm_eps if self.last_norm_eps is None else self.last_norm_eps

    @property
    def best_of_groups(self) -> int | None:
        """Return `group_best`; None: there are no groups."""
        return self.group_best if self.n_groups > 1 else None

    @property
    def expert_bias(self) -> bool:
        """Whether each expert has a bias; those of V3 always have."""
        return self.bias_update > 0 or self.score == "sigmoid"

    published_context = 4096

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
