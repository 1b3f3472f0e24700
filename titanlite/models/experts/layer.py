"""A mixture of experts in place of a block's feed-forward (Shazeer et al. 2017; Mixtral, Jiang et
al. 2024).

Each token goes to `top_k` of the experts, and no token is dropped (MegaBlocks, Gale et al. 2022).
`grouped.py` has the experts, `router.py` their choice and its losses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from titanlite.models.experts.arguments import experts_of
from titanlite.models.experts.grouped import Combine, Dispatch, Experts, by_expert
from titanlite.models.experts.router import AddLoss, Choice, Routing, router_losses
from titanlite.models.layers import Block, FeedForward, Llama

if TYPE_CHECKING:
    from titanlite.models.experts.arguments import ExpertArgs


class SharedExperts(FeedForward):
    """The experts that every token passes through, as one feed-forward."""

    def __init__(self, args: ExpertArgs) -> None:
        super().__init__(replace(args.without_experts(), ffn_dim=args.shared_width))


class MoE(nn.Module):
    """A router and its experts.

    The router's losses get their gradients here, not in the output. Both are means over a step's
    tokens and layers, as in `transformers`.

    step_tokens: tokens of a step over all ranks and micro-batches. 0: losses are means over a
    call's tokens.
    record: [experts + 3] float64, or None. Training calls add each expert's rows, their tokens, and
    the token sums of load-balancing loss and z-loss. Recomputation adds them again, so only ratios
    mean something.
    load: [experts] int64, or None. Training calls add each expert's rows, in the same way.
    """

    experts_class: type[Experts] = Experts

    def __init__(self, args: ExpertArgs) -> None:
        super().__init__()
        self.routing = Routing(args)
        self.scales_input = args.scales_input
        self.gate = nn.Linear(args.dim, args.n_experts, bias=args.router_bias)
        self.experts = self.experts_class(args.n_experts, args.dim, args.expert_width)
        self.shared = SharedExperts(args) if args.shared_width else None
        # Never rounded: `fully_shard` casts weights, and no buffer.
        bias = torch.empty(args.n_experts, dtype=torch.float32) if args.expert_bias else None
        self.expert_bias: Tensor | None
        self.register_buffer("expert_bias", bias)
        layers = len(experts_of(args))
        self.aux_weight = args.aux_loss / layers
        self.z_weight = args.z_loss / layers
        self.step_tokens = 0
        self.record: Tensor | None = None
        self.load: Tensor | None = None
        self.init_buffers()

    def init_buffers(self) -> None:
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] → [batch, seq, dim]."""
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens).float()
        choice = self.routing.choose(logits, self.expert_bias)
        counts, order, places = by_expert(choice.experts, logits.size(1))
        weights = choice.weights
        if torch.is_grad_enabled():
            weights = self._add_losses(logits, choice, counts)
        rows = Dispatch.apply(tokens, order, places)
        if self.scales_input:
            rows = (rows * weights.flatten()[order, None]).to(rows.dtype)
            weights = torch.ones_like(weights)
        y = Combine.apply(self.experts(rows, counts), weights, order, places).view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def _add_losses(self, logits: Tensor, choice: Choice, counts: Tensor) -> Tensor:
        """Return the weights with the gradients of the router's losses, and record both."""
        weights = choice.weights
        # A loss without a weight is only recorded: no kernel for a gradient of zeros.
        logits = logits if self.z_weight else logits.detach()
        scores = choice.scores if self.aux_weight else choice.scores.detach()
        if self.routing.args.score == "sigmoid":
            # Shares of a token, as probabilities are.
            scores = scores / scores.sum(-1, keepdim=True)
        balance, z = router_losses(logits, scores, counts)
        if self.aux_weight or self.z_weight:
            loss = (self.aux_weight * balance + self.z_weight * z) / (
                self.step_tokens or len(logits)
            )
            weights = AddLoss.apply(weights, loss)
        with torch.no_grad():
            if self.record is not None:
                tokens = balance.new_full((), len(logits))
                self.record.add_(torch.cat([counts, torch.stack([tokens, balance, z])]))
            if self.load is not None:
                self.load.add_(counts)
        return weights


class MoEBlock(Block):
    """A block whose feed-forward is an MoE layer or dense. A subclass names its `moe_class`."""

    moe_class: type[MoE] = MoE

    def feed_forward_class(self, args: ExpertArgs) -> nn.Module:
        return self.moe_class(args) if args.n_experts else FeedForward(args)


class MoEDecoder(Llama):
    """A decoder with experts in some or all blocks."""

    block_class = MoEBlock

    def init_buffers(self) -> None:
        super().init_buffers()
        for module in self.modules():
            if isinstance(module, MoE):
                module.init_buffers()
