"""The router of an MoE layer: which experts a token goes to, with which weights, and the losses
that balance them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.models.autograd import fresh

if TYPE_CHECKING:
    from titanlite.models.experts.arguments import ExpertArgs

#: Keeps a sum of sigmoids from zero, as DeepSeek's code does.
_TINY = 1e-20


class Choice(NamedTuple):
    """The experts of each token."""

    #: [tokens, top_k] float32: what each expert's result is multiplied by.
    weights: Tensor
    #: [tokens, top_k] int64.
    experts: Tensor
    #: [tokens, experts] float32: all scores; softmax of the logits where a weight is no score.
    scores: Tensor


class Routing:
    """How experts are chosen."""

    def __init__(self, args: ExpertArgs) -> None:
        self.args = args

    def choose(self, logits: Tensor, bias: Tensor | None = None) -> Choice:
        """Choose the experts of each token.

        logits: [tokens, experts] float32. bias: [experts] float32, for the choice alone (Wang et
        al. 2024).
        """
        scores = logits.sigmoid() if self.args.score == "sigmoid" else logits.softmax(-1)
        is_plain = bias is None and self.args.n_groups == 1
        if is_plain and self.args.score != "softmax_of_chosen":
            weights, experts = scores.topk(self.args.top_k, -1)
        else:
            experts = self._best(logits, scores, bias)
            values = logits if self.args.score == "softmax_of_chosen" else scores
            weights = values.gather(1, experts)
        if self.args.score == "softmax_of_chosen":
            weights = weights.softmax(-1)
        elif self.args.norm_topk:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + _TINY if self.args.score == "sigmoid" else total)
        if self.args.route_scale != 1.0:
            weights = weights * self.args.route_scale
        return Choice(weights, experts, scores)

    @torch.no_grad()
    def _best(self, logits: Tensor, scores: Tensor, bias: Tensor | None) -> Tensor:
        """Return the experts with the highest scores, [tokens, top_k]."""
        # Different logits may have equal probabilities, so without a bias the logits decide.
        ranking = logits if self.args.score == "softmax_of_chosen" else scores
        if bias is not None:
            ranking = scores + bias
        if self.args.n_groups > 1:
            # A group is as good as its best `group_best` experts together: one (DeepSeek-V2) or
            # two (DeepSeek-V3).
            groups = ranking.unflatten(1, (self.args.n_groups, -1))
            worth = groups.topk(self.args.group_best, -1).values.sum(-1)
            best = worth.topk(self.args.top_groups, -1).indices
            is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
            ranking = groups.masked_fill(is_out[..., None], -torch.inf).flatten(1)
        return ranking.topk(self.args.top_k, -1).indices


def router_losses(logits: Tensor, scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the load-balancing loss and the z-loss, each summed over tokens.

    scores: [tokens, experts]; counts: [experts], rows of each.
    """
    # Load balancing: Switch Transformer (Fedus et al. 2021), equations 4 to 6. It has the shares of
    # all top_k choices: top_k where all experts are equal. z: ST-MoE (Zoph et al. 2022).
    balance = scores.sum(0) @ (counts.float() * (counts.numel() / len(logits)))
    z = logits.logsumexp(-1).square().sum()
    return balance, z


class AddLoss(torch.autograd.Function):
    """Returns x, and gives `loss` the gradient 1, as if it were added to the run's loss.

    So blocks and pipeline stages need not hand the loss on, and recomputation adds it once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return fresh(x.view_as(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())
