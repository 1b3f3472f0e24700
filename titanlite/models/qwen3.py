"""The dense models of the Qwen3 family (Qwen3 technical report, 2025): Llama's decoder with QK
norm. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlite.models.llama import LlamaArgs, decoder_spec
from titanlite.models.llama_hf import ENTRIES, NAMES, Entry, HFTable, layer_types


@dataclass(frozen=True)
class Qwen3Args(LlamaArgs):
    """Arguments of Qwen3's decoder."""

    #: Width of a head; it does not depend on `dim`.
    head_dim: int = 128

    qk_norm = True
    published_context = 40960


def _qwen3(dim: int, n_layers: int, n_heads: int, ffn_dim: int, **rest: Any) -> Qwen3Args:
    shape = {"n_kv_heads": 8, "vocab_size": 151936, "norm_eps": 1e-6, "rope_theta": 1e6}
    return Qwen3Args(dim, n_layers, n_heads, ffn_dim=ffn_dim, **{**shape, **rest})


FLAVORS = {
    "debugmodel": _qwen3(256, 8, 8, 768, n_kv_heads=4, head_dim=64, vocab_size=None),
    "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "8B": _qwen3(4096, 36, 32, 12288),
    "14B": _qwen3(5120, 40, 40, 17408),
    "32B": _qwen3(5120, 64, 64, 25600),
}


#: Entries of config.json: attention has no windows.
NO_WINDOWS = {
    "use_sliding_window": False,
    "layer_types": Entry(layer_types, only="read", follows="num_hidden_layers"),
}
HF = HFTable(
    "qwen3", Qwen3Args, {**ENTRIES, "head_dim": Entry("head_dim", 128), **NO_WINDOWS}, NAMES
)
SPEC = decoder_spec("qwen3", FLAVORS, HF)
