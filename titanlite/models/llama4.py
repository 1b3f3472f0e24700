"""The text models of Llama 4 (2025).

Most blocks attend within chunks, and the others have no rotary positions. Experts that a sigmoid
chooses stand beside a shared one.

No torch here; `titanlite.models.llama4_layers` has the modules. Published files are of models that
read images, too. Their text part is read, and written alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from titanlite.models.argument_fields import argument
from titanlite.models.experts import family
from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.hf_names import entry_of, texts_of
from titanlite.models.llama import Rotary
from titanlite.models.llama_hf import (
    ATTENTION_NAMES,
    ENTRIES,
    NO_PADDING,
    NORM_NAMES,
    Entry,
    HFTable,
)
from titanlite.models.rope_config_json import FULL
from titanlite.models.rope_scaling import RopeScaling
from titanlite.models.spec import ModelSpec, ShapeError, imported_when_called

if TYPE_CHECKING:
    from typing_extensions import Self

#: Hugging Face's `model_type` of the model that reads images, too; this one is its text part.
PART_OF = "llama4"


@dataclass(frozen=True)
class Llama4Args(ExpertArgs):
    """Arguments of Llama 4's decoder; `ffn_dim` is the width of a dense feed-forward.

    A block has `nope_every` = 1 without rotary positions, else 0.
    """

    n_experts: int = 16
    top_k: int = 1
    #: `transformers` has none for these models; 0.001 is in their config.json.
    aux_loss: float = 0.001
    #: Step by which each expert's bias moves after an update; 0: there are no biases.
    bias_update: float = argument(0.0, decides="")
    #: Hidden width of each expert, the shared one too.
    expert_width: int = 8192
    #: Every so many blocks one has experts; the others are dense.
    sparse_step: int = 1
    #: How scores are made of the router's logits: "sigmoid", or "softmax".
    score: str = "sigmoid"
    #: Every so many blocks one has no rotary positions and attends to all; 0: none.
    nope_every: int = argument(4, may_be_zero=True)
    #: Tokens of a chunk, counted from the beginning of a document. In blocks with rotary positions
    #: a token attends to those of its chunk; 0: to all.
    chunk: int = argument(8192, may_be_zero=True)
    #: Whether q and k of blocks with rotary positions are divided by their root mean square, after
    #: the rotation.
    unit_qk: bool = True
    #: q of blocks without rotary positions grows by this share of log(1 + position // floor); 0:
    #: it does not.
    temperature: float = argument(0.1, may_be_zero=True)
    temperature_floor: int = 8192
    # No fields: these are the same for all.
    norm_topk = False
    scales_input = True
    n_shared_experts = 1
    joined_experts = True
    neighbours_rotate = True

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = []
        if self.n_experts and self.sparse_step > self.n_layers:
            wrong.append(
                f"sparse_step = {self.sparse_step} is more than n_layers = {self.n_layers}: no "
                "block has experts"
            )
        if self.score == "softmax_of_chosen":
            wrong.append('score must be "sigmoid" or "softmax"')
        if wrong:
            raise ShapeError(*wrong)

    def of_block(self, index: int) -> Self:
        has_rope = not self.nope_every or (index + 1) % self.nope_every != 0
        is_sparse = (index + 1) % self.sparse_step == 0
        block: Self = _of_kind(self, has_rope, is_sparse)
        return block

    @property
    def rotary(self) -> Rotary | None:
        return None if self.nope_every == 1 else super().rotary

    published_context = 262144

    def attention_flops(self, seq_len: int) -> int:
        return super().attention_flops(min(seq_len, self.chunk or seq_len))


@cache
def _of_kind(args: Llama4Args, has_rope: bool, is_sparse: bool) -> Any:
    kind = replace(args, nope_every=0) if has_rope else replace(args, nope_every=1, chunk=0)
    return kind if is_sparse else kind.without_experts()


def _llama4(n_experts: int, **rest: Any) -> Llama4Args:
    shape: dict[str, Any] = {
        "dim": 5120,
        "n_layers": 48,
        "n_heads": 40,
        "n_kv_heads": 8,
        "ffn_dim": 16384,
        "vocab_size": 202048,
        "rope_theta": 500000.0,
    }
    return Llama4Args(n_experts=n_experts, **{**shape, **rest})


#: 8 experts in every second block, and chunks shorter than the sequences of its config.
_DEBUG: dict[str, Any] = {
    "dim": 256,
    "n_layers": 6,
    "n_heads": 16,
    "n_kv_heads": 16,
    "ffn_dim": 768,
    "expert_width": 512,
    "sparse_step": 2,
    "chunk": 256,
    "vocab_size": None,
}
#: Wavelengths longer than the original context are multiplied, others stay.
_LONG = RopeScaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0)
#: Flavor → arguments: "17Bx16E" is Scout, "17Bx128E" Maverick.
FLAVORS = {
    "debugmodel": _llama4(8, rope_scaling=_LONG, **_DEBUG),
    "17Bx16E": _llama4(16, rope_scaling=_LONG),
    "17Bx128E": _llama4(128, sparse_step=2, unit_qk=False),
}


def _has_rope(args: Llama4Args) -> list[int]:
    """Return 1 for each block with rotary positions, else 0, as `transformers` writes it."""
    return [int(block.rotary is not None) for block in args.blocks().values()]


def _layer_types(args: Llama4Args) -> list[str]:
    return ["chunked_attention" if rotates and args.chunk else FULL for rotates in _has_rope(args)]


HF = HFTable(
    "llama4_text",
    Llama4Args,
    {
        **{name: entry for name, entry in ENTRIES.items() if name != "mlp_bias"},
        "rope_theta": Entry("rope_theta", 500000.0),
        "intermediate_size": Entry("expert_width", 8192),
        "no_rope_layer_interval": Entry("nope_every"),
        "intermediate_size_mlp": Entry("ffn_dim", 16384, "ffn_width"),
        "num_local_experts": Entry("n_experts", 16),
        "num_experts_per_tok": Entry("top_k", 1),
        "interleave_moe_layer_step": Entry("sparse_step", 1),
        "moe_layers": Entry(
            lambda args: list(range(args.sparse_step - 1, args.n_layers, args.sparse_step)),
            only="read",
            follows="num_hidden_layers and interleave_moe_layer_step",
        ),
        "no_rope_layers": Entry(
            _has_rope, follows="num_hidden_layers, no_rope_layer_interval and its first 0"
        ),
        # `transformers` wants a number, also where no layer has chunks.
        "attention_chunk_size": Entry("chunk", written=lambda args: args.chunk or 8192),
        "layer_types": Entry(
            _layer_types, follows="num_hidden_layers, no_rope_layers and attention_chunk_size"
        ),
        "use_qk_norm": Entry("unit_qk", True),
        "attn_temperature_tuning": Entry(lambda args: bool(args.temperature), only="written"),
        "attn_scale": Entry("temperature", 0.1, lambda args: args.temperature or 0.1),
        "floor_scale": Entry("temperature_floor", 8192),
        # `transformers` has no losses of the router.
        "router_aux_loss_coef": Entry("aux_loss", 0.001),
        "output_router_logits": Entry(lambda args: False, only="written"),
        **NO_PADDING,
    },
    {
        **ATTENTION_NAMES,
        "feed_forward.w1.weight": "feed_forward.gate_proj.weight",
        "feed_forward.w2.weight": "feed_forward.down_proj.weight",
        "feed_forward.w3.weight": "feed_forward.up_proj.weight",
        "feed_forward.shared.w1.weight": "feed_forward.shared_expert.gate_proj.weight",
        "feed_forward.shared.w2.weight": "feed_forward.shared_expert.down_proj.weight",
        "feed_forward.shared.w3.weight": "feed_forward.shared_expert.up_proj.weight",
        "feed_forward.gate.weight": "feed_forward.router.weight",
        "feed_forward.experts.gate_up": "feed_forward.experts.gate_up_proj",
        "feed_forward.experts.down": "feed_forward.experts.down_proj",
        **NORM_NAMES,
    },
    "Llama4ForCausalLM",
)


def hf_names(args: Llama4Args) -> dict[str, Any]:
    """Return our parameter name → theirs. Raises ValueError for a router without a form there."""
    if args.score != "sigmoid":
        raise ValueError(f"score is {args.score!r}, and Llama 4 in `transformers` has 'sigmoid'")
    return HF.hf_names(args)


def hf_config(args: Llama4Args) -> dict[str, Any]:
    """Return config.json, for `transformers.Llama4TextConfig`."""
    hf_names(args)
    config = HF.hf_config(args)
    if not args.nope_every:
        del config["no_rope_layer_interval"]
    return config


def args_from_hf(config: Mapping[str, Any]) -> Llama4Args:
    """Return the arguments of a config.json, of text alone or with images.

    Raises ValueError for another model, or one that this family lacks.
    """
    if config.get("model_type") == PART_OF:
        config = {"model_type": "llama4_text", **entry_of(config, "text_config", dict)}
    plain = {"head_dim": 128, "num_hidden_layers": 48, "attention_chunk_size": 8192, **config}
    for name in ("use_qk_norm", "attn_temperature_tuning"):
        # Published files have a number for true.
        if type(config.get(name)) is int:
            plain[name] = bool(config[name])
    if not entry_of(plain, "attn_temperature_tuning", bool, True):
        plain["attn_scale"] = 0.0
    every = entry_of(config, "no_rope_layer_interval", int, 4)
    has_rope = entry_of(config, "no_rope_layers", list, [])
    if has_rope:
        # Every so many layers, also where a shape was cut to fewer.
        every = every if every > len(has_rope) else 0
        every = has_rope.index(0) + 1 if 0 in has_rope else every
    else:
        # An empty list stands for the default, too.
        plain.pop("no_rope_layers", None)
    kinds = texts_of(config, "layer_types")
    if kinds and set(kinds) == {FULL}:
        plain["attention_chunk_size"] = 0
    args: Llama4Args = HF.args_from_hf({**plain, "no_rope_layer_interval": every})
    return args


#: Prefixes of the names of tensors that read images.
_OF_IMAGES = ("vision_model.", "multi_modal_projector.")
_REASON = "they read images, and the text model alone is trained here"


def left_out(names: Collection[str]) -> dict[str, str]:
    """Return the tensors that read images → why they are left out."""
    return {name: _REASON for name in names if name.startswith(_OF_IMAGES)}


SPEC: ModelSpec = family.expert_spec(
    "llama4",
    FLAVORS,
    build=imported_when_called("titanlite.models.llama4_layers:Llama4"),
    hf_names=hf_names,
    hf_config=hf_config,
    args_from_hf=args_from_hf,
    left_out=left_out,
    part_of=PART_OF,
    part_prefix="language_model.",
)
