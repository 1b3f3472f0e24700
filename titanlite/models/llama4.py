"""The text models of Llama 4 (2025): most blocks attend within chunks, the others have no rotary
positions; experts that a sigmoid chooses, beside a shared one. No torch here.

`titanlite.models.llama4_args` has the arguments, `llama4_layers` the modules, `llama4_hf` the names
of Hugging Face.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from titanlite.models.experts import family
from titanlite.models.llama import linear_init
from titanlite.models.llama4_args import PART_OF, Llama4Args
from titanlite.models.rope_scaling import RopeScaling
from titanlite.models.spec import Init, ModelSpec, imported_when_called

if TYPE_CHECKING:
    pass


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

_JOINED = re.compile(r"layers\.(\d+)\.feed_forward\.experts\.(gate_up|down)")


def init_rule(name: str, args: Llama4Args) -> Init:
    """Return how the parameter of that full name is drawn: matrices as Llama's, gate and up as
    w1.
    """
    match = _JOINED.fullmatch(name)
    if match is None or int(match[1]) >= args.n_layers:
        return family.init_rule(name, args)
    return linear_init(int(match[1]) if match[2] == "down" else None)


SPEC: ModelSpec = family.expert_spec(
    "llama4",
    FLAVORS,
    build=imported_when_called("titanlite.models.llama4_layers:Llama4"),
    init_rule=init_rule,
    hf_names=imported_when_called("titanlite.models.llama4_hf:hf_names"),
    hf_config=imported_when_called("titanlite.models.llama4_hf:hf_config"),
    args_from_hf=imported_when_called("titanlite.models.llama4_hf:args_from_hf"),
    left_out=imported_when_called("titanlite.models.llama4_hf:left_out"),
    part_of=PART_OF,
    part_prefix="language_model.",
)
