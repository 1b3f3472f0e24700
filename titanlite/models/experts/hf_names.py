"""Hugging Face's names of experts, as most families have them."""

from __future__ import annotations

from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.hf_names import HFName
from titanlite.models.llama_hf import FEED_FORWARD

#: Ours → theirs, of one SwiGLU.
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def feed_forward_names(args: ExpertArgs) -> dict[str, HFName]:
    """Return our parameter name in a block → Hugging Face's, of its feed-forward.

    args: of that block. A stack of experts has the names of its matrices.
    """
    if not args.n_experts:
        return dict(FEED_FORWARD)
    names: dict[str, HFName] = {"feed_forward.gate.weight": "mlp.gate.weight"}
    if args.expert_bias:
        names["feed_forward.expert_bias"] = "mlp.gate.e_score_correction_bias"
    for ours, theirs in _MATRICES.items():
        every = [f"mlp.experts.{index}.{theirs}.weight" for index in range(args.n_experts)]
        names[f"feed_forward.experts.{ours}"] = tuple(every)
    if args.shared_width:
        for ours, theirs in _MATRICES.items():
            names[f"feed_forward.shared.{ours}.weight"] = f"mlp.shared_experts.{theirs}.weight"
    return names
