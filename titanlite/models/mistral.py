"""The Mistral family: Llama's decoder, in version 0.1 with a sliding window (Jiang et al. 2023). No
torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.models import llama_hf
from titanlite.models.hf_names import entry_of, texts_of
from titanlite.models.llama import LlamaArgs, decoder_spec


@dataclass(frozen=True)
class MistralArgs(LlamaArgs):
    """Arguments of Mistral's decoder."""

    #: Tokens that a token attends to, itself and those before it; None: all.
    window: int | None = None

    published_context = 32768


def _mistral(dim: int = 4096, n_layers: int = 32, n_heads: int = 32, **rest: Any) -> MistralArgs:
    shape = {"n_kv_heads": 8, "ffn_dim": 14336, "vocab_size": 32768, "rope_theta": 1e6}
    return MistralArgs(dim, n_layers, n_heads, **{**shape, **rest})


_V03 = _mistral()
FLAVORS = {
    # Four groups of query heads, and a window shorter than the sequences of its config.
    "debugmodel": _mistral(
        256, 8, 16, n_kv_heads=4, ffn_dim=768, vocab_size=None, rope_theta=1e4, window=64
    ),
    "7B-v0.1": _mistral(vocab_size=32000, rope_theta=1e4, window=4096),
    "7B-v0.3": _V03,
    "7B": _V03,
    "mathstral-7B": _mistral(window=4096),
}


def hf_config(args: MistralArgs) -> dict[str, Any]:
    """Return the content of config.json, the arguments of `transformers.MistralConfig`."""
    return {**llama_hf.hf_config(args, "mistral"), "sliding_window": args.window}


def args_from_hf(config: Mapping[str, Any]) -> MistralArgs:
    """Return the arguments that a config.json describes. Raises ValueError for another model."""
    # Without the entry `transformers` takes its default; null is a model without a window.
    is_null = "sliding_window" in config and config["sliding_window"] is None
    window = None if is_null else entry_of(config, "sliding_window", int, 4096)
    # `transformers` makes a Ministral of such a config, whose layers differ.
    if (kinds := {*texts_of(config, "layer_types")}) - {
        "sliding_attention" if window else "full_attention"
    }:
        raise ValueError(
            f"layer_types has {', '.join(sorted(kinds))}; a Mistral here has layers of one kind"
        )
    return llama_hf.args_from_hf(config, "mistral", MistralArgs, window=window)


SPEC = decoder_spec("mistral", FLAVORS, hf_config=hf_config, args_from_hf=args_from_hf)
