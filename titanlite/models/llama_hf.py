"""Decoders under the names of Hugging Face: a table for each family, of weights and config.json.

This is Llama's; others change some of its rows. No torch here.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlite.models.argument_fields import declared
from titanlite.models.hf_names import HFName, entry_of
from titanlite.models.llama import LlamaArgs
from titanlite.models.rope_config_json import FULL, WINDOW, read_scaling, rope_of, written_rope
from titanlite.models.spec import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

#: Value of an entry that a file must have, and of one whose null is as no entry.
_REQUIRED = object()
_AS_MISSING = object()
#: Most layers of a file that somebody else wrote: lists are made for all of them.
_MOST_LAYERS = 10_000


class Entry(NamedTuple):
    """An entry of config.json that follows from arguments."""

    #: Name of an argument; another attribute, or a function of all arguments, follows from them.
    argument: str | Callable[[Any], Any]
    #: The value in `transformers` without the entry. A function is given the arguments so far.
    default: Any = _REQUIRED
    #: The attribute, or the function of all arguments, that is written in place of the argument.
    written: str | Callable[[Any], Any] = ""
    #: The value of null.
    null: Any = _AS_MISSING
    #: "read" or "written": the other is not done.
    only: str = ""
    #: For messages: what the entry follows from, where it is no argument.
    follows: str = "the other entries"


@dataclass(frozen=True)
class HFTable:
    """A family of decoders at Hugging Face."""

    model_type: str
    args_class: type[LlamaArgs]
    #: Name of an entry of config.json → the argument that it is, or the value that all models have.
    entries: Mapping[str, Any]
    #: Our parameter name in a block → theirs. A block has some of them. "*" is the number of an
    #: expert: ours is the stack of these.
    names: Mapping[str, str]
    #: The class of `transformers`.
    architecture: str = ""

    def hf_names(self, args: Any) -> dict[str, HFName]:
        """Return our parameter name → Hugging Face's, without a tied head.

        Raises ValueError for a model without a form there.
        """
        self._check_form(args)
        found: dict[str, HFName] = {
            "tok_embeddings.weight": "model.embed_tokens.weight",
            "norm.weight": "model.norm.weight",
        }
        for name, block in args.blocks().items():
            own = {*block.parameters()}
            if getattr(block, "n_experts", 0) and block.expert_bias:
                own.add("feed_forward.expert_bias")
            for ours, theirs in self.names.items():
                if ours.removesuffix(".weight") not in own:
                    continue
                full = f"model.{name}.{theirs}"
                found[f"{name}.{ours}"] = full
                if "*" in full:
                    numbers = range(block.n_experts)
                    found[f"{name}.{ours}"] = tuple(full.replace("*", f"{one}") for one in numbers)
        if not args.tied:
            found["output.weight"] = "lm_head.weight"
        return found

    def hf_config(self, args: Any) -> dict[str, Any]:
        """Return config.json for `transformers` 5 and 4.

        Raises ValueError for a model without a form there.
        """
        self._check_form(args)
        name = self.architecture or f"{self.model_type.capitalize()}ForCausalLM"
        found: dict[str, Any] = {"model_type": self.model_type, "architectures": [name]}
        for name, entry in self.entries.items():
            if not isinstance(entry, Entry):
                found[name] = entry
            elif entry.argument == "rope_theta":
                found.update(written_rope(args))
            elif entry.only != "read":
                found[name] = _value(args, entry.written or entry.argument)
        return found

    def args_from_hf(self, config: Mapping[str, Any], **more: Any) -> Any:
        """Return the arguments of a config.json, of `transformers` 5 or older.

        more: arguments that are in no row. Raises ValueError for another family.
        """
        kind = config.get("model_type")
        if kind != self.model_type:
            raise ValueError(f"model_type is {kind!r}, and this family is {self.model_type!r}")
        if entry_of(config, "num_hidden_layers", int) > _MOST_LAYERS:
            raise ValueError(f"num_hidden_layers is more than {_MOST_LAYERS}")
        kinds = typing.get_type_hints(self.args_class)
        given: dict[str, Any] = {"rope_scaling": read_scaling(config)}
        follows: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            if not isinstance(entry, Entry):
                value = config.get(name, entry)
                # An option that is off may be false, zero or null.
                if (value or None) != (entry or None):
                    raise ValueError(f"{name} is {value!r}; the models here have {entry!r}")
            elif entry.argument in kinds and entry.only != "written":
                given[str(entry.argument)] = _read(config, name, entry, kinds, given)
            elif entry.only != "written":
                follows[name] = entry
        try:
            args = self.args_class(**{**given, **more})
        except ShapeError as error:
            raise ValueError(self._in_words_of_files(error)) from error
        for name, entry in follows.items():
            ours = _value(args, entry.argument)
            theirs = entry_of(config, name, type(ours), ours)
            if theirs != ours:
                raise ValueError(
                    f"{name} is {theirs!r:.80}, and here it follows from {entry.follows}: "
                    f"{ours!r:.80}"
                )
        return args

    def _check_form(self, args: Any) -> None:
        """Raise ValueError for what `transformers` lacks."""
        if getattr(args, "expert_bias", False) and not args.biases_in_files:
            raise ValueError(
                f"bias_update is {args.bias_update}, and this family has no biases of experts in "
                "`transformers`"
            )
        known = [one.argument for one in self.entries.values() if isinstance(one, Entry)]
        cls: Any = type(args)
        for one in fields(args):
            value = getattr(args, one.name)
            is_later = declared(cls, one.name)["came_later"]
            if is_later and value != one.default and one.name not in known:
                raise ValueError(
                    f"{one.name} is {value!r}, and {self.model_type} of `transformers` lacks it"
                )

    def _in_words_of_files(self, error: ShapeError) -> str:
        words = {}
        for name, entry in self.entries.items():
            if isinstance(entry, Entry):
                words[str(entry.argument)] = name
        found = [
            re.sub(r"\w+", lambda word: words.get(word[0], word[0]), problem.message)
            for problem in error.problems
        ]
        return "; ".join(found)


def _read(
    config: Mapping[str, Any],
    name: str,
    entry: Entry,
    kinds: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Any:
    annotation = kinds[str(entry.argument)]
    kind = (typing.get_args(annotation) or (annotation,))[0]
    default = entry.default(given) if callable(entry.default) else entry.default
    if entry.argument == "rope_theta":
        default = entry_of(config, name, float, default)
        return entry_of(rope_of(config), name, float, default)
    if name in config and config[name] is None and entry.null is not _AS_MISSING:
        return entry.null
    if config.get(name) is None and default is not _REQUIRED:
        return default
    if hasattr(kind, "parse"):
        return kind.parse(entry_of(config, name, list))
    return entry_of(config, name, kind)


def _value(args: Any, what: str | Callable[[Any], Any]) -> Any:
    return what(args) if callable(what) else getattr(args, what)


def layer_types(args: Any) -> list[str]:
    """Return the kind of each block's attention, as `transformers` names it."""
    kinds = {True: FULL, False: WINDOW}
    return [kinds[block.window is None] for block in args.blocks().values()]


def _context(args: Any) -> int:
    """Return the published context, as some scalings stretch it, or a larger `max_seq_len`."""
    context: int = max(args.max_seq_len, args.published_context)
    return context if args.rope_scaling is None else args.rope_scaling.positions(context)


#: Names of weights in a block, by part; families put them together with their own.
ATTENTION_NAMES = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
FEED_FORWARD_NAMES = {
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
#: Names of a mixture of experts, beside dense blocks.
EXPERT_NAMES = {
    **FEED_FORWARD_NAMES,
    "feed_forward.gate.weight": "mlp.gate.weight",
    "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
    "feed_forward.experts.w1": "mlp.experts.*.gate_proj.weight",
    "feed_forward.experts.w2": "mlp.experts.*.down_proj.weight",
    "feed_forward.experts.w3": "mlp.experts.*.up_proj.weight",
    "feed_forward.shared.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "feed_forward.shared.w2.weight": "mlp.shared_experts.down_proj.weight",
    "feed_forward.shared.w3.weight": "mlp.shared_experts.up_proj.weight",
}
NORM_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
}
NAMES = {**ATTENTION_NAMES, **FEED_FORWARD_NAMES, **NORM_NAMES}

ENTRIES: dict[str, Any] = {
    "hidden_size": Entry("dim"),
    "intermediate_size": Entry("ffn_dim", written="ffn_width"),
    "num_hidden_layers": Entry("n_layers"),
    "num_attention_heads": Entry("n_heads"),
    "num_key_value_heads": Entry("n_kv_heads", itemgetter("n_heads"), "kv_heads"),
    "head_dim": Entry("head_dim", follows="hidden_size / num_attention_heads"),
    "vocab_size": Entry("vocab_size", written="n_vocab"),
    "rms_norm_eps": Entry("norm_eps"),
    "rope_theta": Entry("rope_theta", 10000.0),
    "max_position_embeddings": Entry("max_seq_len", written=_context),
    "tie_word_embeddings": Entry("tied", False),
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
#: By default the row of a padding token would not learn.
NO_PADDING = {"pad_token_id": Entry(lambda args: None, only="written")}
LLAMA = HFTable("llama", LlamaArgs, ENTRIES, NAMES)


def permute(weight: Tensor, n_heads: int) -> Tensor:
    """Bring the rows of a q or k weight [n_heads * head_dim, dim] from Meta's layout to ours.

    Meta rotates the pairs (2 i, 2 i + 1), we (i, i + head_dim / 2): even rows of a head come first.
    """
    heads = weight.unflatten(0, (n_heads, -1, 2))
    return heads.transpose(1, 2).flatten(0, 2)
