"""GPT-OSS (gpt-oss model card, 2025): attention with sinks and biases, windows in every second
block, and experts with biases. No torch here.

`titanlite.models.gpt_oss_layers` has the modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titanlite.models.argument_fields import argument
from titanlite.models.experts import family
from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.hf_names import entry_of, texts_of
from titanlite.models.llama_hf import (
    ATTENTION_NAMES,
    ENTRIES,
    NORM_NAMES,
    Entry,
    HFTable,
    layer_types,
)
from titanlite.models.rope_config_json import FULL
from titanlite.models.rope_scaling import YarnScaling
from titanlite.models.spec import ModelSpec, imported_when_called

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class GptOssArgs(ExpertArgs):
    """A decoder's arguments; `ffn_dim` is the width of each expert."""

    top_k: int = 4
    aux_loss: float = 0.001
    #: Step by which each expert's bias moves after an update; 0: there are no biases.
    bias_update: float = argument(0.0, decides="")
    #: Width of a head; it does not depend on `dim`.
    head_dim: int = 64
    #: Tokens that a token attends to in the first, third, … block, itself and those before it. In
    #: the others, and everywhere if it is None, it attends to all.
    window: int | None = 128

    def of_block(self, index: int) -> Self:
        """Return the arguments of block `index`: every second one has no window."""
        return replace(self, window=None) if index % 2 else self

    score = "softmax_of_chosen"
    router_bias = True
    expert_biases = True
    published_context = 131072

    def attention_extras(self) -> dict[str, int]:
        extras = super().attention_extras()
        for name, size in self.attention_linears().items():
            extras[f"{name}.bias"] = size.out_features
        return {**extras, "attention.sinks": self.n_heads}


#: Scaling of the published models, and of a file that has none.
_LONG = YarnScaling(factor=32.0, original_max_position_embeddings=4096, truncate=False)


def _gpt_oss(dim: int, n_layers: int, n_experts: int, **rest: Any) -> GptOssArgs:
    shape: dict[str, Any] = {
        "n_heads": 64,
        "n_kv_heads": 8,
        "ffn_dim": 2880,
        "vocab_size": 201088,
        "rope_theta": 150000.0,
        "rope_scaling": _LONG,
    }
    return GptOssArgs(dim, n_layers, n_experts=n_experts, **{**shape, **rest})


FLAVORS = {
    "debugmodel": _gpt_oss(
        256, 4, 8, n_heads=8, n_kv_heads=2, ffn_dim=256, head_dim=32, vocab_size=None
    ),
    "20B": _gpt_oss(2880, 24, 32),
    "120B": _gpt_oss(2880, 36, 128),
}


def block_plan(args: GptOssArgs) -> dict[str, str]:
    """Return module name in a block → how tensor parallelism divides it."""
    return {**family.block_plan(args), "attention.sinks": "vector"}


HF = HFTable(
    "gpt_oss",
    GptOssArgs,
    {
        **ENTRIES,
        "rope_theta": Entry("rope_theta", 150000.0),
        "head_dim": Entry("head_dim", 64),
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "num_local_experts": Entry("n_experts", 128),
        "num_experts_per_tok": Entry("top_k", 4),
        # `transformers` has no z-loss.
        "router_aux_loss_coef": Entry("aux_loss", 0.001),
        # `transformers` adds the load-balancing loss only if it is true.
        "output_router_logits": Entry(lambda args: bool(args.aux_loss), only="written"),
        # `transformers` wants a number, also where no block has a window.
        "sliding_window": Entry("window", 128, lambda args: args.window or 128, null=None),
        "layer_types": Entry(layer_types, follows="num_hidden_layers and sliding_window"),
    },
    {
        **ATTENTION_NAMES,
        "feed_forward.gate.weight": "mlp.router.weight",
        "feed_forward.gate.bias": "mlp.router.bias",
        "feed_forward.experts.gate_up": "mlp.experts.gate_up_proj",
        "feed_forward.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
        "feed_forward.experts.down": "mlp.experts.down_proj",
        "feed_forward.experts.down_bias": "mlp.experts.down_proj_bias",
        "attention.sinks.weight": "self_attn.sinks",
        "attention.wq.bias": "self_attn.q_proj.bias",
        "attention.wk.bias": "self_attn.k_proj.bias",
        "attention.wv.bias": "self_attn.v_proj.bias",
        "attention.wo.bias": "self_attn.o_proj.bias",
        **NORM_NAMES,
    },
    "GptOssForCausalLM",
)


def args_from_hf(config: Mapping[str, Any]) -> GptOssArgs:
    """Return the arguments of a config.json. Raises ValueError for one that this family lacks."""
    plain = dict(config)
    if set(texts_of(config, "layer_types")) == {FULL}:
        plain["sliding_window"] = None
    if not entry_of(config, "output_router_logits", bool, False):
        plain["router_aux_loss_coef"] = 0.0
    # Without the entries `transformers` takes its default.
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        plain["rope_scaling"] = {"rope_type": "yarn", **_LONG.as_table()}
    args: GptOssArgs = HF.args_from_hf(plain)
    return args


SPEC: ModelSpec = family.expert_spec(
    "gpt_oss",
    FLAVORS,
    HF,
    build=imported_when_called("titanlite.models.gpt_oss_layers:GptOss"),
    block_plan=block_plan,
    args_from_hf=args_from_hf,
)
