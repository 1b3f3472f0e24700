"""The arguments of decoders with a mixture of experts. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlite.models.llama_args import LlamaArgs, block_names
from titanlite.models.spec import Misfit, ShapeError, Size


@dataclass(frozen=True)
class ExpertArgs(LlamaArgs):
    """A decoder's arguments, some or all of whose blocks have experts.

    A block without them has `n_experts` = 0.
    """

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
        if self.n_experts and not 2 <= self.top_k <= self.n_experts:
            reason = (
                "a single expert's weight is always 1, and its router would learn nothing from "
                "the text"
            )
            wrong.append(
                f"top_k must be between 2 and n_experts = {self.n_experts}, got {self.top_k}: "
                f"{reason}"
            )
        for name, share in (("aux_loss", self.aux_loss), ("z_loss", self.z_loss)):
            if not share >= 0:
                wrong.append(f"{name} must not be negative, got {share}")
        # `grouped_mm` takes rows of whole 16 bytes: 8 numbers in bfloat16.
        for name, width in (("dim", self.dim), ("ffn_dim", self.expert_width)):
            if width % 8:
                wrong.append(
                    f"{name} = {width} is not a multiple of 8, which products of experts need"
                )
        if wrong:
            raise ShapeError(*map(Misfit, wrong))

    def deciding(self) -> dict[str, Any]:
        """Add the experts; the weights of the routers' losses change no logit."""
        return {**super().deciding(), "n_experts": self.n_experts, "top_k": self.top_k}

    @property
    def expert_width(self) -> int:
        """Hidden width of each expert."""
        return self.ffn_width

    def feed_forward_linears(self) -> dict[str, Size]:
        """Return none where there are experts: they and their router stay in high precision.

        The router's few outputs decide about tokens, and torch has no float8 training of grouped
        products.
        """
        return {} if self.n_experts else super().feed_forward_linears()

    def feed_forward_parameters(self) -> tuple[int, int]:
        """Return the parameters of a block's experts and router, and those of them that one token
        is multiplied by.
        """
        if not self.n_experts:
            return super().feed_forward_parameters()
        expert = 3 * self.dim * self.expert_width
        router = self.dim * self.n_experts
        return self.n_experts * expert + router, self.top_k * expert + router


def experts_of(args: ExpertArgs) -> dict[str, int]:
    """Return name of each mixture → number of its experts."""
    found = {}
    for index, block in enumerate(block_names(args)):
        number = args.of_block(index).n_experts
        if number:
            found[f"{block}.feed_forward"] = number
    return found
