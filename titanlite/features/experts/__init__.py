"""Experts. `MoELayers` is of every run of a model with such layers, `ExpertParallel` (EP) of one
whose ranks share the experts.

    checks.py        other keys, ranks, model
    ranks.py         numbers of ranks that have experts
    sharding.py      experts divided over ranks, and over those that shard them
    exchange.py      rows on their way to the ranks of their experts, and back
    balance.py       biases that balance the load, moved in each step
    figures.py       load of experts and losses of routers, a callback

The layers as modules are in `titanlite.models.experts`. The key is
`parallelism.expert_parallel_degree`; all else are arguments of a model. Files that need torch are
imported where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.dist import ParallelismError
from titanlite.features.experts import checks
from titanlite.parallel import offered
from titanlite.run.features import Feature

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.config.sections import Config
    from titanlite.features.experts.balance import ExpertBalance
    from titanlite.features.experts.figures import ExpertFigures
    from titanlite.models.spec import ModelSpec
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.plan.step_sizes import StepSizes
    from titanlite.run.config import RunConfig


@dataclass(frozen=True)
class MoELayers:
    """The MoE layers of a model, on any number of ranks."""

    #: Name of each in the whole model → number of its experts.
    experts: Mapping[str, int]

    # Before the ranks start

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        return checks.reshard_problems(run, self.experts)

    # The model: `titanlite.assembly.model` calls this, and `titanlite.assembly.phase_resize`

    def set_step_tokens(self, model: nn.Module, tokens: int) -> None:
        """The losses of routers are divided by the tokens of a step."""
        modules: dict[str, Any] = dict(model.named_modules())
        for name in self.experts:
            if name in modules:  # a pipeline stage has some of them
                modules[name].step_tokens = tokens

    # The step: `titanlite.assembly` calls these

    def balance(
        self, run: RunConfig, args: Any, model: nn.Module, device: torch.device
    ) -> ExpertBalance | None:
        """Return what moves the biases of experts after each update; None: they stay."""
        step = getattr(args, "bias_update", 0.0)
        # Beside adapters the biases are frozen, as all that no checkpoint holds.
        if not step or run.lora.rank:
            return None
        from titanlite.features.experts.balance import ExpertBalance

        return ExpertBalance(model, self.experts, step, device)

    def figures(self, spec: ModelSpec, model: nn.Module, device: torch.device) -> ExpertFigures:
        from titanlite.features.experts.figures import ExpertFigures

        # Routers of transformers keep their logits to themselves.
        return ExpertFigures(model, self.experts, device, has_losses=spec.name != "hf")


class ExpertParallel(Feature):
    """Expert parallelism of more than one rank."""

    key = checks.DEGREE
    model_field = "experts"

    def __init__(self, config: Config) -> None:
        self.ranks = config.parallelism.expert_parallel_degree
        self._mesh: DeviceMesh | None = None

    # Before the ranks start

    def fewest_shards(self, others: int) -> int:
        """Return by what the ranks of `data_parallel_shard` must be divisible.

        others: ranks of context and tensor parallelism, which share the experts too.
        """
        return self.ranks // math.gcd(self.ranks, others)

    def model_problems(self, run: RunConfig, args: Any) -> Iterable[Problem]:
        return checks.model_problems(run, args)

    # The model: `titanlite.parallel.parallelize` calls these

    def mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Divide the ranks with different tokens, once: [expert_shard, ep]."""
        from titanlite.features.experts.sharding import expert_mesh

        if self._mesh is None:
            self._mesh = expert_mesh(mesh, self.ranks)
        return self._mesh

    def distribute(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Raises ParallelismError for a layer that cannot be divided."""
        from titanlite.features.experts.sharding import apply_ep, expert_placement
        from titanlite.parallel.activation_checkpoint import exchange_of
        from titanlite.parallel.parallelize import select

        mesh = self.mesh(builder.mesh)
        apply_ep(model, mesh["ep"])
        builder.shard_options["placement"] = expert_placement(mesh)
        layers = select(model, offered(builder.spec, "experts")(builder.args))
        whole = [name for name, layer in layers.items() if exchange_of(layer) is None]
        if whole:
            raise ParallelismError(
                f"ranks cannot share experts without an `exchange`: {', '.join(whole)}"
            )

    # The plan

    def plan_speed(self, step: StepSizes) -> None:
        step.traffic["expert traffic"] = self.traffic

    def traffic(self, step: StepSizes) -> float:
        """Return the seconds of a micro-batch's all-to-alls: a block has two in forward, two in
        backward, and those of recomputation.
        """
        tokens = step.tokens / step.mesh.tensor
        rows = tokens * getattr(step.args, "top_k", 1) * step.itemsize * step.width
        again = 0 if step.by_op else 2 * step.recomputed
        return step.blocks * (4 + again) * step.rates.collective(rows, step.mesh.expert, 1)
