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
from titanlite.models.llama_hf import Entry, layer_types
from titanlite.models.rope_config_json import FULL, WINDOW

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class PatternArgs(LlamaArgs):
    """Arguments of a decoder with windows in most blocks; RoPE is scaled in the others."""

    #: Tokens that a token attends to in a block with a window, itself and those before it.
    window: int | None = 4096
    #: Each block of this number attends to all tokens before: 4 is blocks 3, 7, 11, …
    full_every: int = 4

    @property
    def local_theta(self) -> float:
        """The base of RoPE in blocks with a window."""
        return self.rope_theta

    def is_full(self, index: int) -> bool:
        """Whether block `index` has no window."""
        return (index + 1) % self.full_every == 0

    def of_block(self, index: int) -> Self:
        full: Self = _of_kind(self, self.is_full(index))
        return full


@cache
def _of_kind(args: PatternArgs, is_full: bool) -> Any:
    if is_full:
        return replace(args, window=None)
    return replace(args, rope_theta=args.local_theta, rope_scaling=None)


#: Entries of config.json of such decoders.
PATTERN_ENTRIES = {
    "sliding_window": Entry("window"),
    "layer_types": Entry(layer_types, follows="num_hidden_layers and its first full_attention"),
}


def full_every(config: Mapping[str, Any], default: int) -> int:
    """Return the argument of a config.json. default: where it names too few layers."""
    kinds = texts_of(config, "layer_types")
    if FULL in kinds:
        return kinds.index(FULL) + 1
    return max(default, len(kinds) + 1) if kinds else default


def one_rope(config: Mapping[str, Any], theta: float, local_theta: float) -> dict[str, Any]:
    """Return a config.json with the rotary positions of layers without a window.

    theta, local_theta: defaults; the latter is for windows. Raises ValueError for windows that
    scale RoPE.
    """
    tables: dict[str, Any] = entry_of(config, "rope_parameters", dict, {})
    if tables and not {*tables} <= {FULL, WINDOW}:
        raise ValueError(f"rope_parameters needs a table {FULL!r} and a table {WINDOW!r}")
    local: dict[str, Any] = entry_of(tables, WINDOW, dict, {})
    if entry_of(local, "rope_type", str, "default") != "default":
        raise ValueError(
            f"rope_type of {WINDOW} is {local['rope_type']!r}; here RoPE is scaled in layers "
            "without a window alone"
        )
    older: dict[str, Any] = entry_of(config, "rope_scaling", dict, {})
    full: dict[str, Any] = {**entry_of(tables, FULL, dict, {}), **older}
    full.setdefault("rope_theta", entry_of(config, "rope_theta", float, theta))
    return {
        "sliding_window": 4096,
        **config,
        "rope_scaling": None,
        "rope_parameters": full,
        "local_theta": entry_of(local, "rope_theta", float, local_theta),
    }
