"""The arguments of decoders with a mixture of experts. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titanlite.models.argument_fields import argument
from titanlite.models.llama import LlamaArgs
from titanlite.models.spec import ShapeError, Size

if TYPE_CHECKING:
    from typing_extensions import Self

#: Their numbers are keys of 16 bits (`titanlite.models.experts.grouped.EXPERT_KEY`).
MOST_EXPERTS = 32767
#: How a router makes scores of its logits.
SCORES = ("softmax", "softmax_of_chosen", "sigmoid")
_LEARNS_NOTHING = (
    "a single expert's weight is always 1, and its router would learn nothing from the text"
)


@dataclass(frozen=True)
class ExpertArgs(LlamaArgs):
    """Arguments of a decoder whose blocks, some or all, have experts.

    A block without them has `n_experts` = 0 and `top_k` = 0.
    """

    n_experts: int = argument(8, may_be_zero=True)
    #: Experts that each token goes to.
    top_k: int = argument(2, may_be_zero=True)
    #: Weight of the load-balancing loss beside the loss per token; 0: none.
    aux_loss: float = argument(0.02, of_training=True, may_be_zero=True)
    #: Weight of the router's z-loss; 0: none. ST-MoE takes 0.001.
    z_loss: float = argument(0.0, of_training=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_experts == self.top_k == 0:
            return
        wrong = self._problems_of_choice()
        if self.n_dense_layers >= self.n_layers:
            wrong.append(
                f"n_dense_layers must be below n_layers = {self.n_layers}, got "
                f"{self.n_dense_layers}"
            )
        # `grouped_mm` takes rows of whole 16 bytes: 8 numbers in bfloat16.
        own_width = "expert_width" in self.__dataclass_fields__
        widths = {"dim": self.dim, "expert_width" if own_width else "ffn_dim": self.expert_width}
        for name, width in widths.items():
            if width % 8:
                wrong.append(
                    f"{name} = {width} is not a multiple of 8, which products of experts need"
                )
        if wrong:
            raise ShapeError(*wrong)

    def _problems_of_choice(self) -> list[str]:
        wrong = []
        if self.score not in SCORES:
            wrong.append(f"score must be one of {', '.join(SCORES)}, got {self.score!r}")
        is_normed = self.norm_topk or self.score == "softmax_of_chosen"
        least = 2 if is_normed else 1
        if not least <= self.top_k <= self.n_experts:
            reason = f": {_LEARNS_NOTHING}" if is_normed else ""
            wrong.append(
                f"top_k must be between {least} and n_experts = {self.n_experts}, got "
                f"{self.top_k}{reason}"
            )
        if self.n_experts > MOST_EXPERTS:
            wrong.append(f"n_experts must be at most {MOST_EXPERTS}, got {self.n_experts}")
        each, rest = divmod(self.n_experts, self.n_groups)
        if rest:
            wrong.append(f"n_groups = {self.n_groups} does not divide n_experts = {self.n_experts}")
        elif self.n_groups > 1 and self.group_best > each:
            wrong.append(
                f"group_best must be at most {each}, the experts of each of n_groups = "
                f"{self.n_groups}"
            )
        elif self.top_groups > self.n_groups:
            wrong.append(
                f"top_groups must be at most n_groups = {self.n_groups}, got {self.top_groups}"
            )
        elif self.n_groups > 1 and self.top_k > self.top_groups * each:
            wrong.append(
                f"top_k must be at most {self.top_groups * each}, the experts of top_groups = "
                f"{self.top_groups} of n_groups = {self.n_groups}"
            )
        return wrong

    def of_block(self, index: int) -> Self:
        """Return the arguments of block `index`: the first `n_dense_layers` have no experts.

        What tells which blocks have experts stays: MoE layers share the losses by their number.
        """
        return self.without_experts() if index < self.n_dense_layers else self

    def without_experts(self) -> Self:
        return replace(self, n_experts=0, top_k=0)

    @property
    def expert_width(self) -> int:
        return self.ffn_width

    #: Experts that every token passes through, as one feed-forward of their widths together.
    n_shared_experts = 0
    #: First blocks with a dense feed-forward, `ffn_width` wide, in the place of experts.
    n_dense_layers = 0
    #: How a router makes scores of its logits, one of `SCORES`. "softmax" and "sigmoid" are of all
    #: experts. "softmax_of_chosen" chooses by the logits, and is over the chosen ones.
    score = "softmax"
    #: The scores of a token's experts are divided by their sum.
    norm_topk = True
    #: All weights of experts are multiplied by it.
    route_scale = 1.0
    #: Groups of neighbouring experts, and those that each token chooses among.
    n_groups = 1
    top_groups = 1
    #: Best experts of a group whose scores together tell how good it is.
    group_best = 2
    #: The router's linear has a bias, which is learned.
    router_bias = False
    #: Weights multiply the input of an expert instead of its result.
    scales_input = False
    #: Step by which each expert's bias moves after an update; 0: it stays. It balances the load
    #: without a loss (Wang et al. 2024, arXiv:2408.15664).
    bias_update = 0.0
    #: Files of Hugging Face have the biases that `bias_update` moves.
    biases_in_files = False
    #: Experts have biases, as those of `titanlite.models.gpt_oss_layers`.
    expert_biases = False
    #: Gate and up of an expert are one matrix (`titanlite.models.llama4_layers`).
    joined_experts = False

    @property
    def expert_bias(self) -> bool:
        """Whether each expert has a bias, added to its scores for the choice alone."""
        return self.bias_update > 0

    @property
    def shared_width(self) -> int:
        return self.n_shared_experts * self.expert_width

    def feed_forward_linears(self) -> dict[str, Size]:
        """Return the linears of a dense block, or those of the shared experts.

        The router, whose few outputs decide about tokens, and the experts stay in high precision:
        torch has no float8 training of grouped products.
        """
        if not self.n_experts:
            return super().feed_forward_linears()
        if not self.shared_width:
            return {}
        return {
            "feed_forward.shared.w1": Size(self.dim, self.shared_width),
            "feed_forward.shared.w2": Size(self.shared_width, self.dim),
            "feed_forward.shared.w3": Size(self.dim, self.shared_width),
        }

    def feed_forward_extras(self) -> dict[str, Size]:
        if not self.n_experts:
            return {}
        found = {"feed_forward.gate": Size(self.dim, self.n_experts)}
        if self.router_bias:
            found["feed_forward.gate.bias"] = Size(1, self.n_experts)
        stack = "feed_forward.experts"
        width = self.expert_width
        if self.expert_biases:
            found[f"{stack}.gate_up_bias"] = Size(1, 2 * width)
            found[f"{stack}.down_bias"] = Size(1, self.dim)
        if self.expert_biases or self.joined_experts:
            found[f"{stack}.gate_up"] = Size(self.dim, 2 * width)
            found[f"{stack}.down"] = Size(width, self.dim)
            return found
        found[f"{stack}.w1"] = Size(self.dim, width)
        found[f"{stack}.w2"] = Size(width, self.dim)
        found[f"{stack}.w3"] = Size(self.dim, width)
        return found

    def feed_forward_parameters(self) -> tuple[int, int]:
        """Return a block's feed-forward parameters, and those that one token is multiplied by."""
        if not self.n_experts:
            return super().feed_forward_parameters()
        expert = every = 0
        for name, size in {**self.feed_forward_linears(), **self.feed_forward_extras()}.items():
            if name.startswith("feed_forward.experts."):
                expert += size.in_features * size.out_features
            else:
                every += size.in_features * size.out_features
        return self.n_experts * expert + every, self.top_k * expert + every


def experts_of(args: ExpertArgs) -> dict[str, int]:
    """Return name of each MoE layer → number of experts."""
    found = {}
    for name, block in args.blocks().items():
        if block.n_experts:
            found[f"{name}.feed_forward"] = block.n_experts
    return found
