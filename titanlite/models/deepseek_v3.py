"""The DeepSeek-V3 family (DeepSeek-V2, 2024; DeepSeek-V3, 2024): latent attention, and experts of
which some are shared by all tokens.

No torch here; `titanlite.models.latent_attention` has the modules. `transformers` has two classes:
one scores experts by a sigmoid (V3), the other by a softmax (V2).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.models.argument_fields import argument
from titanlite.models.experts import family
from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.hf_names import entry_of
from titanlite.models.llama_hf import ENTRIES, EXPERT_NAMES, Entry, HFTable
from titanlite.models.rope_scaling import YarnScaling
from titanlite.models.spec import ModelSpec, ShapeError, Size, imported_when_called

#: Epsilon of the norms on latents in `transformers`, whatever `rms_norm_eps` is.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeepSeekV3Args(ExpertArgs):
    """Arguments of DeepSeek-V3 and V2; `ffn_dim` is the width of a dense feed-forward."""

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
    #: Factor of all weights of experts.
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
    #: Epsilon of the norms on latents.
    latent_norm_eps: float = LATENT_NORM_EPS
    #: Epsilon of the norm before the head; None: `norm_eps`.
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
        """The rotated width of a head."""
        return self.qk_rope_head_dim

    is_latent = True
    biases_in_files = True

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def score_factor(self) -> float:
        """A factor of attention's scores: YaRN's `mscale`, squared."""
        scaling = self.rope_scaling
        return scaling.mscale_of_all**2 if isinstance(scaling, YarnScaling) else 1.0

    @property
    def last_eps(self) -> float:
        return self.norm_eps if self.last_norm_eps is None else self.last_norm_eps

    @property
    def best_of_groups(self) -> int | None:
        return self.group_best if self.n_groups > 1 else None

    @property
    def topk_method(self) -> str:
        if self.expert_bias:
            return "noaux_tc"
        return "group_limited_greedy" if self.n_groups > 1 else "greedy"

    @property
    def expert_bias(self) -> bool:
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
    """Return module name in a block → how tensor parallelism divides it."""
    kinds = dict(_ATTENTION)
    for name in ("wq_a", "q_norm", "wq_b") if not args.q_lora_rank else ("wq",):
        del kinds[f"attention.{name}"]
    return {**kinds, **family.feed_forward_plan(args)}


def tensor_sizes(args: DeepSeekV3Args) -> dict[str, int]:
    """Return the numbers that tensor-parallel ranks must divide."""
    sizes = {"n_heads": args.n_heads}
    if args.n_dense_layers:
        sizes["the feed-forward's width"] = args.ffn_width
    return sizes


#: Names of the choices in V2: of all experts, and by groups of which the best expert counts.
_PLAIN = "greedy"
_BY_GROUPS = "group_limited_greedy"
#: Name of the choice with biases of experts, by groups of which the best two experts count.
_WITH_BIASES = "noaux_tc"
_NAMES = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wq_a.weight": "self_attn.q_a_proj.weight",
    "attention.wq_b.weight": "self_attn.q_b_proj.weight",
    "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **EXPERT_NAMES,
}
#: `transformers` does not read `head_dim`, which is here the width of the rotated part.
_COMMON = {
    **{name: entry for name, entry in ENTRIES.items() if name != "head_dim"},
    "q_lora_rank": Entry("q_lora_rank", 1536, lambda args: args.q_lora_rank or None, null=0),
    "kv_lora_rank": Entry("kv_lora_rank", 512),
    "qk_nope_head_dim": Entry("qk_nope_head_dim", 128),
    "qk_rope_head_dim": Entry("qk_rope_head_dim", 64),
    "v_head_dim": Entry("v_head_dim", 128),
    "n_routed_experts": Entry("n_experts", 256),
    "num_experts_per_tok": Entry("top_k", 8),
    "moe_intermediate_size": Entry("expert_width", 2048),
    "n_shared_experts": Entry("n_shared_experts", 1),
    "first_k_dense_replace": Entry("n_dense_layers", 3),
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": Entry("topk_method", only="written"),
    "norm_topk_prob": Entry("norm_topk", True, null=False),
    "routed_scaling_factor": Entry("route_scale", 2.5),
    "n_group": Entry("n_groups", 8),
    "topk_group": Entry("top_groups", 4),
}
_NO_FURTHER = {"num_nextn_predict_layers": Entry(lambda args: 0, only="written")}
_V3 = {
    **_COMMON,
    "rope_interleave": Entry("rope_interleave", True, null=False),
    **_NO_FURTHER,
}
_V2 = {
    **_COMMON,
    "n_routed_experts": Entry("n_experts", 64),
    "num_experts_per_tok": Entry("top_k", 2),
    "moe_intermediate_size": Entry("expert_width", 1407),
    "n_shared_experts": Entry("n_shared_experts", 2),
    "first_k_dense_replace": Entry("n_dense_layers", 0),
    "scoring_func": "softmax",
    "norm_topk_prob": Entry("norm_topk", False, null=False),
    "routed_scaling_factor": Entry("route_scale", 1.0),
    "n_group": Entry("n_groups", 1),
    "topk_group": Entry("top_groups", 1),
    "aux_loss_alpha": Entry("aux_loss", 0.0),
    **_NO_FURTHER,
}
#: `model_type` → the table.
_TABLES = {
    "deepseek_v3": HFTable("deepseek_v3", DeepSeekV3Args, _V3, _NAMES, "DeepseekV3ForCausalLM"),
    "deepseek_v2": HFTable("deepseek_v2", DeepSeekV3Args, _V2, _NAMES, "DeepseekV2ForCausalLM"),
}


def hf_names(args: DeepSeekV3Args) -> dict[str, Any]:
    """Return our parameter name → Hugging Face's."""
    return _TABLES["deepseek_v3"].hf_names(args)


def hf_config(args: DeepSeekV3Args) -> dict[str, Any]:
    """Return config.json, without the z-loss, which `transformers` lacks.

    Raises ValueError for a router or epsilons of norms that it lacks.
    """
    if args.latent_norm_eps != LATENT_NORM_EPS:
        raise ValueError(
            f"latent_norm_eps is {args.latent_norm_eps}, and DeepSeek in `transformers` has "
            f"{LATENT_NORM_EPS} for norms on latents: train with "
            f"model.overrides.latent_norm_eps = {LATENT_NORM_EPS}"
        )
    if args.last_eps != args.norm_eps:
        raise ValueError(
            f"last_norm_eps is {args.last_eps}, and DeepSeek in `transformers` has that of the "
            f"blocks for its last norm: train with model.overrides.last_norm_eps = {args.norm_eps}"
        )
    if args.norm_topk and not args.expert_bias:
        raise ValueError(
            "norm_topk is true, and DeepSeek-V2 in `transformers` does not divide softmax scores "
            "by their sum"
        )
    wanted = 2 if args.expert_bias else 1
    if args.n_groups > 1 and args.group_best != wanted:
        raise ValueError(
            f"group_best is {args.group_best}, and DeepSeek-V{wanted + 1} in `transformers` takes "
            f"the best {wanted} of a group: train with model.overrides.group_best = {wanted}"
        )
    return _TABLES["deepseek_v3" if args.score == "sigmoid" else "deepseek_v2"].hf_config(args)


def why_not(args: DeepSeekV3Args, key: str) -> str:
    """Return why weights cannot be written for `transformers`."""
    if key != "checkpoint.last_save_in_hf" or args.score == "sigmoid" or not args.expert_bias:
        return ""
    return (
        "DeepSeek-V2 in `transformers` has no biases of experts: train with "
        'model.overrides.bias_update = 0, or model.overrides.score = "sigmoid"'
    )


def args_from_hf(config: Mapping[str, Any]) -> DeepSeekV3Args:
    """Return the arguments of a config.json. Raises ValueError for another model or router."""
    table = _TABLES.get(str(config.get("model_type")), _TABLES["deepseek_v3"])
    plain = dict(config)
    more: dict[str, Any] = {"score": "sigmoid", "bias_update": 0.001}
    if table.model_type == "deepseek_v2":
        more = {"score": "softmax", "bias_update": 0.0}
        method = entry_of(config, "topk_method", str, _PLAIN)
        known = (_PLAIN, _BY_GROUPS, _WITH_BIASES)
        if method not in known:
            names = ", ".join(map(repr, known))
            raise ValueError(f"topk_method is {method!r}, and it must be one of {names}")
        if method == _WITH_BIASES:
            more["bias_update"] = 0.001
        elif entry_of(config, "norm_topk_prob", bool, False):
            raise ValueError(
                "norm_topk_prob is true; `transformers` does not heed it in deepseek_v2"
            )
        if method == _PLAIN:
            # Files may name groups all the same, and `transformers` does not heed them.
            plain |= {"n_group": 1, "topk_group": 1}
        elif method == _BY_GROUPS and entry_of(config, "n_group", int, 1) > 1:
            more["group_best"] = 1
    args: DeepSeekV3Args = table.args_from_hf(plain, **more)
    return args


#: A tensor that only a block for further tokens has.
_FURTHER = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
_REASON = "it predicts further tokens (multi-token prediction), which is not trained here"


def left_out(names: Collection[str]) -> dict[str, str]:
    """Return tensors of blocks that predict further tokens → why they are left out."""
    blocks = set()
    for name in names:
        match = _FURTHER.fullmatch(name)
        if match is not None:
            blocks.add(match[1])
    return {name: _REASON for name in names if name.startswith(tuple(blocks))}


SPEC: ModelSpec = family.expert_spec(
    "deepseek_v3",
    FLAVORS,
    build=imported_when_called("titanlite.models.latent_attention:DeepSeekV3"),
    block_plan=block_plan,
    tensor_sizes=tensor_sizes,
    why_not=why_not,
    hf_names=hf_names,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    left_out=left_out,
)
