"""Mixtral (Jiang et al. 2024): a Llama whose feed-forward is a mixture of experts. No torch here.

`titanlite.models.moe` has the modules.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.models.llama import LlamaArgs
from titanlite.models.spec import Misfit, ShapeError


@dataclass(frozen=True)
class MixtralArgs(LlamaArgs):
    """A decoder's arguments; `ffn_dim` is the width of each expert."""

    n_experts: int = 8
    #: Experts that each token goes to.
    top_k: int = 2
    #: Weight of the load-balancing loss beside the loss per token; 0: none.
    aux_loss: float = 0.02
    #: Weight of the router's z-loss; 0: none. ST-MoE takes 0.001.
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = []
        if not 1 <= self.top_k <= self.n_experts:
            wrong.append(f"top_k must be between 1 and n_experts = {self.n_experts}, got {self.top_k}")
        wrong += [
            f"{name} must not be negative, got {value}"
            for name, value in (("aux_loss", self.aux_loss), ("z_loss", self.z_loss))
            if not value >= 0
        ]
        # `grouped_mm` takes rows of whole 16 bytes: 8 numbers in bfloat16.
        wrong += [
            f"{name} = {value} is not a multiple of 8, which products of experts need"
            for name, value in (("dim", self.dim), ("ffn_dim", self.ffn_width))
            if value % 8
        ]
        if wrong:
            raise ShapeError(*map(Misfit, wrong))
