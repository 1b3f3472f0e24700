"""The DeepSeek-V3 family (DeepSeek-V2, 2024; DeepSeek-V3, 2024): latent attention, and experts of
which some are shared by all tokens. No torch here.

`titanlite.models.deepseek_args` has the arguments, `titanlite.models.latent_attention` the modules,
`titanlite.models.deepseek_hf` the names of Hugging Face.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from titanlite.models import llama
from titanlite.models.deepseek_args import DeepSeekV3Args
from titanlite.models.experts import family
from titanlite.models.rope_scaling import YarnScaling
from titanlite.models.spec import Init, ModelSpec, imported_when_called

if TYPE_CHECKING:
    pass


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
#: all have biases, and the best two tell how good a group is. Published V2 was balanced by losses,
#: and its groups are as good as their best expert.
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
        return family.init_rule(name, args)
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
    "ffn_norm": "sequence",
}


def block_plan(args: DeepSeekV3Args) -> dict[str, str]:
    """Return module name in a block → how tensor parallelism divides it. args: of that block."""
    kinds = dict(_ATTENTION)
    for name in ("wq_a", "q_norm", "wq_b") if not args.q_lora_rank else ("wq",):
        del kinds[f"attention.{name}"]
    return {**kinds, **family.feed_forward_plan(args)}


def tensor_plan(args: DeepSeekV3Args) -> dict[str, str]:
    """Return module name → how tensor parallelism divides it, in the order the modules run."""
    return llama.tensor_plan(args, block_plan)


def tensor_sizes(args: DeepSeekV3Args) -> dict[str, int]:
    """Return the numbers that tensor-parallel ranks must divide, besides the vocabulary."""
    sizes = {"n_heads": args.n_heads}
    if args.n_dense_layers:
        sizes["the feed-forward's width"] = args.ffn_width
    return sizes


SPEC: ModelSpec = family.expert_spec(
    "deepseek_v3",
    FLAVORS,
    build=imported_when_called("titanlite.models.latent_attention:DeepSeekV3"),
    init_rule=init_rule,
    tensor_plan=tensor_plan,
    tensor_sizes=tensor_sizes,
    why_not=imported_when_called("titanlite.models.deepseek_hf:why_not"),
    hf_names=imported_when_called("titanlite.models.deepseek_hf:hf_names"),
    hf_config=imported_when_called("titanlite.models.deepseek_hf:hf_config"),
    args_from_hf=imported_when_called("titanlite.models.deepseek_hf:args_from_hf"),
    left_out=imported_when_called("titanlite.models.deepseek_hf:left_out"),
)
