"""The published sizes of Llama 2, 3, 3.1 and 3.2."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import replace

from titanlite.models.llama_args import LlamaArgs
from titanlite.models.rope_scaling import RopeScaling


def _llama2(dim: int, n_layers: int, n_heads: int, **rest: typing.Any) -> LlamaArgs:
    return LlamaArgs(dim, n_layers, n_heads, **{"vocab_size": 32000, "rope_theta": 1e4, **rest})


def _llama3(dim: int, n_layers: int, n_heads: int, **rest: typing.Any) -> LlamaArgs:
    return LlamaArgs(dim, n_layers, n_heads, **{"vocab_size": 128256, "rope_theta": 5e5, **rest})


def _shapes() -> dict[str, Mapping[str, LlamaArgs]]:
    llama2 = {
        "debugmodel": _llama2(256, 8, 16, vocab_size=None),
        "271M": _llama2(1024, 16, 8),
        "1B": _llama2(2048, 18, 16),
        "7B": _llama2(4096, 32, 32),
        "13B": _llama2(5120, 40, 40),
        "26B": _llama2(5120, 80, 40),
        "70B": _llama2(8192, 80, 64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096),
    }
    llama3 = {
        "debugmodel": _llama3(256, 8, 16, vocab_size=None),
        "8B": _llama3(4096, 32, 32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024),
        "70B": _llama3(8192, 80, 64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096),
    }
    for size in ("8B", "70B"):
        llama3[f"3.1-{size}"] = replace(llama3[size], rope_scaling=RopeScaling(factor=8.0))
    llama3["3.1-debugmodel"] = replace(
        llama3["debugmodel"], n_layers=6, rope_scaling=RopeScaling(factor=8.0)
    )
    llama3["3.1-405B"] = llama3["405B"] = _llama3(
        16384,
        126,
        128,
        n_kv_heads=8,
        ffn_dim_multiplier=1.2,
        multiple_of=4096,
        rope_scaling=RopeScaling(factor=8.0),
    )
    llama3["3.2-1B"] = llama3["1B"] = _llama3(
        2048,
        16,
        32,
        n_kv_heads=8,
        ffn_dim_multiplier=1.5,
        rope_scaling=RopeScaling(factor=32.0),
        tied=True,
    )
    llama3["3.2-3B"] = llama3["3B"] = _llama3(
        3072, 28, 24, n_kv_heads=8, rope_scaling=RopeScaling(factor=32.0), tied=True
    )
    return {"llama2": types.MappingProxyType(llama2), "llama3": types.MappingProxyType(llama3)}


#: Family → flavor → arguments. "8B" and "70B" of llama3 are Llama 3; Llama 3.1 and 3.2 say so in
#: their names.
SHAPES: Mapping[str, Mapping[str, LlamaArgs]] = types.MappingProxyType(_shapes())
