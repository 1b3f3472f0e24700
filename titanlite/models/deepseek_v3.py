"""The DeepSeek-V3 family (DeepSeek-V2, 2024; DeepSeek-V3, 2024): latent attention, and experts of
which some are shared by all tokens. No torch here.

`titanlite.models.latent_attention` has the modules, `titanlite.models.deepseek_hf` the names of
Hugging Face.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlite.models import expert_args, llama
from titanlite.models.expert_args import ExpertArgs, expert_spec
from titanlite.models.rope_scaling import YarnScaling
from titanlite.models.spec import Init, Misfit, ModelSpec, ShapeError, Size

if TYPE_CHECKING:
    from torch import nn

#: Of the norms on latents. `transformers` has this number whatever `rms_norm_eps` is.
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
    #: Step by which each expert's bias moves after an update; 0: it stays.
    bias_update: float = 0.001
    #: Biases balance the load, so no loss does.
    aux_loss: float = 0.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = []
        widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for name in widths:
            if getattr(self, name) < 1:
                wrong.append(f"{name} must be positive, got {getattr(self, name)}")
        if self.q_lora_rank < 0:
            wrong.append(f"q_lora_rank must not be negative, got {self.q_lora_rank}")
        if self.v_head_dim > self.qk_head_dim:
            wrong.append(
                f"v_head_dim = {self.v_head_dim} is wider than a query, which has "
                f"qk_nope_head_dim + qk_rope_head_dim = {self.qk_head_dim}"
            )
        if self.score == "softmax_of_chosen":
            wrong.append('score must be "sigmoid" or "softmax"')
        if wrong:
            raise ShapeError(*map(Misfit, wrong))

    def _misfits_of_derived(self) -> list[str]:
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

    @property
    def is_latent(self) -> bool:
        return True

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
    def expert_bias(self) -> bool:
        """Whether each expert has a bias; those of V3 always have."""
        return self.bias_update > 0 or self.score == "sigmoid"

    @property
    def published_context(self) -> int:
        return 4096

    def deciding(self) -> dict[str, Any]:
        """Add the widths of latents and heads, and whether experts have biases."""
        found = super().deciding()
        for name in (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "rope_interleave",
            "expert_bias",
        ):
            found[name] = getattr(self, name)
        return found

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


def _yarn(mscale: float) -> YarnScaling:
    return YarnScaling(
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


def _deepseek(dim: int, n_layers: int, n_heads: int, ffn_dim: int, **rest: Any) -> DeepSeekV3Args:
    v2 = {"score": "softmax", "norm_topk": False, "n_shared_experts": 2, "vocab_size": 102400}
    return DeepSeekV3Args(dim, n_layers, n_heads, ffn_dim=ffn_dim, **{**v2, **rest})


#: Flavor → arguments: "16B" is DeepSeek-V2-Lite, "236B" DeepSeek-V2, "671B" DeepSeek-V3. Experts of
#: all have biases; those of the published V2 were balanced by losses.
FLAVORS = {
    "debugmodel": _deepseek(
        256, 6, 16, 1024, n_experts=8, top_k=3, expert_width=256, vocab_size=None
    ),
    "16B": _deepseek(2048, 27, 16, 10944, n_experts=64, top_k=6, rope_scaling=_yarn(0.707)),
    "236B": _deepseek(
        5120,
        60,
        128,
        12288,
        n_experts=160,
        top_k=6,
        expert_width=1536,
        n_groups=8,
        top_groups=3,
        route_scale=16.0,
        q_lora_rank=1536,
        rope_scaling=_yarn(0.707),
    ),
    "671B": DeepSeekV3Args(
        7168,
        61,
        128,
        ffn_dim=18432,
        vocab_size=129280,
        n_experts=256,
        top_k=8,
        expert_width=2048,
        n_groups=8,
        top_groups=4,
        route_scale=2.5,
        n_dense_layers=3,
        q_lora_rank=1536,
        rope_scaling=_yarn(1.0),
    ),
}

_LATENT = re.compile(r"layers\.(\d+)\.attention\.(?:w(?:q_a|q_b|kv_a|kv_b)|(?:q|kv)_norm)\.weight")


def init_rule(name: str, args: DeepSeekV3Args) -> Init:
    """Return how the parameter of that full name is drawn, as `llama.init_rule`: norms of latents
    are ones, other linears of attention have the standard deviation of wq.
    """
    match = _LATENT.fullmatch(name)
    if match is None or int(match[1]) >= args.n_layers:
        return expert_args.init_rule(name, args)
    return Init("ones") if "norm" in name else llama.linear_init()


#: How attention is divided. Latents are narrower than hidden states, so ranks make those of their
#: part of the sequence, and send these.
_ATTENTION = {
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
#: Each rank has all experts, and they take the rank's part of the sequence.
_MIXTURE = {
    "ffn_norm": "sequence",
    "feed_forward": "tokens",
    "feed_forward.gate": "heads",
    "feed_forward.experts": "whole",
}


def block_plan(args: DeepSeekV3Args) -> dict[str, str]:
    """Return module name in a block → how tensor parallelism divides it. args: of that block."""
    kinds = dict(_ATTENTION)
    for name in ("wq_a", "q_norm", "wq_b") if not args.q_lora_rank else ("wq",):
        del kinds[f"attention.{name}"]
    if args.n_experts:
        kinds |= _MIXTURE
        for name in args.feed_forward_linears():
            kinds[name] = "heads"
        return kinds
    for name, kind in llama.block_plan(args).items():
        if name.startswith(("ffn_norm", "feed_forward")):
            kinds[name] = kind
    return kinds


def tensor_plan(args: DeepSeekV3Args) -> dict[str, str]:
    """Return module name → how tensor parallelism divides it, in the order the modules run."""
    return llama.tensor_plan(args, block_plan)


def tensor_sizes(args: DeepSeekV3Args) -> dict[str, int]:
    """Return the numbers that tensor-parallel ranks must divide, besides the vocabulary."""
    sizes = {"n_heads": args.n_heads}
    if args.n_dense_layers:
        sizes["the feed-forward's width"] = args.ffn_width
    return sizes


def _build(args: DeepSeekV3Args) -> nn.Module:
    from titanlite.models.latent_attention import DeepSeekV3

    return DeepSeekV3(args)


# Most runs read and write no files of Hugging Face's.


def _hf_names(args: DeepSeekV3Args) -> dict[str, Any]:
    from titanlite.models import deepseek_hf

    return deepseek_hf.hf_names(args)


def _hf_config(args: DeepSeekV3Args) -> dict[str, Any]:
    from titanlite.models import deepseek_hf

    return deepseek_hf.hf_config(args)


def _args_from_hf(config: Mapping[str, Any]) -> DeepSeekV3Args:
    from titanlite.models import deepseek_hf

    return deepseek_hf.args_from_hf(config)


def _left_out(names: Collection[str]) -> Mapping[str, str]:
    from titanlite.models import deepseek_hf

    return deepseek_hf.left_out(names)


SPEC: ModelSpec = expert_spec(
    "deepseek_v3",
    FLAVORS,
    build=_build,
    init_rule=init_rule,
    tensor_plan=tensor_plan,
    tensor_sizes=tensor_sizes,
    hf_names=_hf_names,
    hf_config=_hf_config,
    args_from_hf=_args_from_hf,
    left_out=_left_out,
)
