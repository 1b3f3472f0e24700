"""Sizes of activations while models of several widths take their first steps.

This is the coordinate check of Yang et al. 2022 (arXiv:2203.03466, appendix D.1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.config.model_sections import Optimizer
from titanlite.features.mup import scales_of
from titanlite.features.mup.rules import Rules
from titanlite.loss import count_valid, cross_entropy_sum
from titanlite.models.spec import ModelSpec
from titanlite.optim.optimizer import build_optimizer, set_rates
from titanlite.parallel.init import init_weights

#: Kind of activation → the modules that give it, by the end of their names in a block. A family's
#: norm behind attention belongs to its output; without one it is an identity.
_IN_BLOCKS = {
    "attention": "attention_post_norm",
    "feed-forward": "ffn_post_norm",
    "router": "feed_forward.gate",
}
#: The kinds in their order; only MoE layers have a router.
KINDS = ("embedding", "attention", "feed-forward", "router", "residual", "target logits")


@dataclass(frozen=True)
class Task:
    """Settings that all models of a check have in common."""

    spec: ModelSpec
    optimizer: Optimizer
    #: (tokens, labels) of each step, [batch, seq] int64; the first are those that are measured.
    batches: Sequence[tuple[Tensor, Tensor]]
    device: torch.device

    def measure(self, args: Any, base: Any | None, seed: int = 0) -> dict[str, float]:
        """Train a model; return the mean absolute change of its activations by kind.

        base: arguments of the base model; None: no muP.
        """
        model, optimizer = self._begin(args, base, seed)
        caught = _catch(model)
        first = self._activations(model, caught)
        for tokens, labels in self.batches:
            loss = cross_entropy_sum(model(tokens), labels) / count_valid(labels)
            loss.backward()
            set_rates(optimizer, self.optimizer.peak_lr)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        last = self._activations(model, caught)
        changes = {}
        for kind, tensors in first.items():
            pairs = zip(tensors, last[kind], strict=True)
            means = [(now - then).abs().mean() for then, now in pairs]
            changes[kind] = torch.stack(means).mean().item()
        return changes

    def _begin(
        self, args: Any, base: Any | None, seed: int
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        spec = self.spec
        model = spec.build_on_meta(args).to_empty(device=self.device)
        scales = None
        if base is None:
            init_weights(model, lambda name: spec.init_rule(name, args), seed)
        else:
            rules = Rules(spec, args, base)
            init_weights(model, rules.init, seed)
            scales = scales_of(rules)
        model.init_buffers()  # type: ignore[operator]
        parameters = dict(model.named_parameters())
        blocks = spec.block_names(args)
        return model, build_optimizer(parameters, self.optimizer, self.device, blocks, scales)

    @torch.no_grad()
    def _activations(
        self, model: nn.Module, caught: dict[str, list[Tensor]]
    ) -> dict[str, list[Tensor]]:
        caught.clear()
        logits = model(self.batches[0][0]).float()
        # Logits of the targets. The rest of a vocabulary moves by chance, and less in wide models:
        # that would hide what is learned.
        targets = self.batches[0][1].unsqueeze(-1)
        caught["target logits"] = [logits.gather(-1, targets)]
        return {kind: caught.pop(kind) for kind in KINDS if kind in caught}


def _catch(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return where each forward pass adds its activations, by kind."""
    found: dict[str, list[Tensor]] = defaultdict(list)

    def catch(kind: str) -> Any:
        return lambda _, inputs, output: found[kind].append(output.detach().float())

    layers: Mapping[str, nn.Module] = model.layers  # type: ignore[assignment]
    blocks = list(layers.values())
    # The input of the first block: some families multiply embeddings.
    blocks[0].register_forward_pre_hook(
        lambda _, inputs: found["embedding"].append(inputs[0].detach().float())
    )
    for block in blocks:
        modules = dict(block.named_modules())
        for kind, name in _IN_BLOCKS.items():
            if name in modules:
                modules[name].register_forward_hook(catch(kind))
        block.register_forward_hook(catch("residual"))
    return found
