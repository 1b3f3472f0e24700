"""A mixture of experts in place of a block's feed-forward (Shazeer et al. 2017; Mixtral, Jiang et
al. 2024).

Each token goes to `top_k` of the experts, and no token is dropped (MegaBlocks, Gale et al. 2022).
`titanlite.models.grouped` has the experts, `titanlite.models.router` the losses of routers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from titanlite.models.grouped import Combine, Dispatch, Experts
from titanlite.models.layers import Block, Llama
from titanlite.models.router import AddLoss

if TYPE_CHECKING:
    from titanlite.models.expert_args import ExpertArgs


class MoE(nn.Module):
    """A router and its experts.

    The router's losses get their gradients here; the model's output does not contain them. Both are
    means over the tokens of a step and over layers, as `transformers` weights them.

    step_tokens: tokens of a step over all ranks and micro-batches, for a loss that is divided by as
    many. 0: the router's losses are means over the tokens of each call.
    record: [experts + 3] float64 on the device, or None. Training calls add to it each expert's
    rows, their tokens, and the sums over tokens of load-balancing loss and z-loss. A block that
    runs again for its backward adds all of them again, so only their ratios mean something.
    """

    def __init__(self, args: ExpertArgs) -> None:
        super().__init__()
        self.top_k = args.top_k
        self.gate = nn.Linear(args.dim, args.n_experts, bias=False)
        self.experts = Experts(args.n_experts, args.dim, args.expert_width)
        self.aux_weight = args.aux_loss / args.n_layers
        self.z_weight = args.z_loss / args.n_layers
        self.step_tokens = 0
        self.record: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens).float()
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, -1)  # [tokens, top_k]
        # Compared and summed: counting by atomic additions is neither deterministic nor faster.
        counts = (chosen.flatten()[:, None] == torch.arange(logits.size(1), device=x.device)).sum(0)
        if torch.is_grad_enabled():
            weights = self._add_losses(weights, logits, probabilities, counts)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        places = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=x.device)
        )
        places = places.view_as(chosen)  # of each token's rows among the sorted ones
        y = self.experts(Dispatch.apply(tokens, order, places), counts)
        return Combine.apply(y, weights, order, places).view_as(x)

    def _add_losses(
        self, weights: Tensor, logits: Tensor, probabilities: Tensor, counts: Tensor
    ) -> Tensor:
        """Return `weights` with the gradients of the router's losses, and record both."""
        # Sums over tokens, like the loss of the run. Load balancing: Switch Transformer (Fedus et
        # al. 2021), equations 4 to 6. It has the shares of all top_k choices: top_k where all
        # experts are equal. z: ST-MoE (Zoph et al. 2022).
        balance = probabilities.sum(0) @ (counts.float() * (counts.numel() / len(logits)))
        z = logits.logsumexp(-1).square().sum()
        if self.aux_weight or self.z_weight:
            loss = (self.aux_weight * balance + self.z_weight * z) / (
                self.step_tokens or len(logits)
            )
            weights = AddLoss.apply(weights, loss)
        if self.record is not None:
            with torch.no_grad():
                tokens = balance.new_full((), len(logits))
                self.record.add_(torch.cat([counts, torch.stack([tokens, balance, z])]))
        return weights


class MixtralBlock(Block):
    """A block whose feed-forward is a mixture of experts."""

    feed_forward_class = MoE


class Mixtral(Llama):
    """The decoder of family mixtral."""

    block_class = MixtralBlock
