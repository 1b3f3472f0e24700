"""The dense models of the Qwen3 family (Qwen3 technical report, 2025): Llama's decoder with QK
norm. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.models import llama_hf
from titanlite.models.hf_names import entry_of, texts_of
from titanlite.models.llama import LlamaArgs, decoder_spec


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


def hf_config(args: Qwen3Args) -> dict[str, Any]:
    """Return the content of config.json, the arguments of `transformers.Qwen3Config`."""
    return {**llama_hf.hf_config(args, "qwen3"), "use_sliding_window": False}


def check_no_windows(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a config.json of a model whose attention has windows."""
    other_kinds = {*texts_of(config, "layer_types")} - {"full_attention"}
    if other_kinds:
        raise ValueError(
            f"layer_types has {min(other_kinds)!r}; a Qwen3 here attends to all tokens before"
        )
    if entry_of(config, "use_sliding_window", bool, False):
        raise ValueError("use_sliding_window is true; a Qwen3 here attends to all tokens before")


def args_from_hf(config: Mapping[str, Any]) -> Qwen3Args:
    """Return the arguments that a config.json describes.

    Raises ValueError for another model, or one with windows.
    """
    check_no_windows(config)
    head_dim = entry_of(config, "head_dim", int, 128)
    return llama_hf.args_from_hf(config, "qwen3", Qwen3Args, head_dim=head_dim)


SPEC = decoder_spec("qwen3", FLAVORS, hf_config=hf_config, args_from_hf=args_from_hf)
