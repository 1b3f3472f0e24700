"""Decoders with windows in most blocks, as OLMo 3 and Gemma 3: arguments, entries of config.json.

No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from titanlite.models.hf_names import entry_of, texts_of
from titanlite.models.llama import LlamaArgs
from titanlite.models.rope_hf import written_rope

if TYPE_CHECKING:
    from typing_extensions import Self

_FULL = "full_attention"
_WINDOW = "sliding_attention"


@dataclass(frozen=True)
class PatternArgs(LlamaArgs):
    """Arguments of a decoder, most of whose blocks have a window.

    A scaling of RoPE is that of the other blocks alone.
    """

    #: Tokens that a token attends to in a block with a window, itself and those before it.
    window: int | None = 4096
    #: Each block of this number attends to all tokens before: 4 is blocks 3, 7, 11, …
    full_every: int = 4

    @property
    def local_theta(self) -> float:
        """Return the base of RoPE in blocks with a window."""
        return self.rope_theta

    def is_full(self, index: int) -> bool:
        """Return whether block `index` attends to all tokens before."""
        return (index + 1) % self.full_every == 0

    def of_block(self, index: int) -> Self:
        """Return the arguments of block `index`: those with a window, or those without."""
        full: Self = _of_kind(self, self.is_full(index))
        return full


@cache
def _of_kind(args: PatternArgs, is_full: bool) -> Any:
    if is_full:
        return replace(args, window=None)
    return replace(args, rope_theta=args.local_theta, rope_scaling=None)


def written_pattern(args: PatternArgs) -> dict[str, Any]:
    """Return the entries of config.json, those of `transformers` 5 and, beside them, of 4."""
    full = written_rope(args.rope_scaling, args.rope_theta)
    local = written_rope(None, args.local_theta)
    kinds = [_FULL if args.is_full(index) else _WINDOW for index in range(args.n_layers)]
    return {
        **full,
        "rope_parameters": {
            _FULL: full["rope_parameters"],
            _WINDOW: local["rope_parameters"],
        },
        "sliding_window": args.window,
        "layer_types": kinds,
    }


def pattern_of(config: Mapping[str, Any], full_every: int) -> dict[str, Any]:
    """Return `window` and `full_every` of a config.json.

    full_every: where it names no layers, or too few to tell. Raises ValueError for a pattern that
    is none here, or no window.
    """
    window = entry_of({"sliding_window": 4096, **config}, "sliding_window", int)
    return {"window": window, "full_every": _full_every(config, full_every)}


def _full_every(config: Mapping[str, Any], default: int) -> int:
    kinds = texts_of(config, "layer_types")
    if not kinds:
        return default
    every = kinds.index(_FULL) + 1 if _FULL in kinds else max(default, len(kinds) + 1)
    for index, kind in enumerate(kinds):
        wanted = _WINDOW if (index + 1) % every else _FULL
        if kind != wanted:
            raise ValueError(
                f"layer_types has {kind!r} at {index}, and a pattern that repeats after {every} "
                f"layers has {wanted!r} there"
            )
    return every


def one_rope(config: Mapping[str, Any], theta: float, local_theta: float) -> dict[str, Any]:
    """Return a config.json with the rotary positions of layers without a window alone.

    theta, local_theta: where the file gives none. Of windows: `local_theta` of the result. Raises
    ValueError for layers with a window that scale RoPE.
    """
    tables: dict[str, Any] = entry_of(config, "rope_parameters", dict, {})
    if tables and not {*tables} <= {_FULL, _WINDOW}:
        raise ValueError(f"rope_parameters needs a table {_FULL!r} and a table {_WINDOW!r}")
    local: dict[str, Any] = entry_of(tables, _WINDOW, dict, {})
    if entry_of(local, "rope_type", str, "default") != "default":
        raise ValueError(
            f"rope_type of {_WINDOW} is {local['rope_type']!r}; here RoPE is scaled in layers "
            "without a window alone"
        )
    older: dict[str, Any] = entry_of(config, "rope_scaling", dict, {})
    full: dict[str, Any] = {**entry_of(tables, _FULL, dict, {}), **older}
    full.setdefault("rope_theta", entry_of(config, "rope_theta", float, theta))
    return {
        **config,
        "rope_scaling": None,
        "rope_parameters": full,
        "local_theta": entry_of(local, "rope_theta", float, local_theta),
    }
