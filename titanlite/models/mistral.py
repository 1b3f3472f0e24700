"""The Mistral family: Llama's decoder, in version 0.1 with a sliding window (Jiang et al. 2023). No
torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlite.models.llama import LlamaArgs, decoder_spec
from titanlite.models.llama_hf import ENTRIES, NAMES, Entry, HFTable, layer_types


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


HF = HFTable(
    "mistral",
    MistralArgs,
    {
        **ENTRIES,
        "sliding_window": Entry("window", 4096, null=None),
        # `transformers` makes a Ministral of a config whose layers differ.
        "layer_types": Entry(
            layer_types, only="read", follows="num_hidden_layers and sliding_window"
        ),
    },
    NAMES,
)
SPEC = decoder_spec("mistral", FLAVORS, HF)
