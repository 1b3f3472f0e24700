"""Expert parallelism (EP), ranks that share the experts of an MoE layer: what titanlite knows of
it, moment by moment.

    checks.py        other keys, ranks, model
    ranks.py         numbers of ranks that have experts
    sharding.py      experts divided over ranks, and over those that shard them
    exchange.py      rows on their way to the ranks of their experts, and back
    figures.py       load of experts and losses of routers, a callback
    plan_memory.py   what MoE layers keep, need and hold
    plan_speed.py    what their products and the exchange of rows cost

The key is `parallelism.expert_parallel_degree`. Files that need torch are imported where they are
used. The layers themselves are in models: `titanlite.models.moe`. Every run of one has the figures,
the terms of the plan, and the check of what is resharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from titanlite.config.rules import Finding
from titanlite.features.experts import checks
from titanlite.features.feature import Feature
from titanlite.parallel import ParallelismError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.plan.step_sizes import StepSizes
    from titanlite.start.derive import RunConfig


class ExpertParallel(Feature):
    """Expert parallelism of more than one rank."""

    key = checks.DEGREE
    model_field = "experts"

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    # Before the ranks start

    def model_misfits(self, run: RunConfig, args: Any) -> Iterable[Finding]:
        return checks.model_misfits(run, args)

    # The model: `titanlite.parallel.parallelize` calls these

    def mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Divide the ranks with different tokens, once: [expert_shard, ep]."""
        from titanlite.features.experts.sharding import expert_mesh

        return expert_mesh(mesh, self.ranks)

    def apply(self, model: nn.Module, mesh: DeviceMesh, names: Iterable[str]) -> None:
        """Divide the experts of a model or pipeline stage on the meta device, in place.

        mesh: of `mesh`. names: of the MoE layers in the whole model. Raises ParallelismError for
        one that cannot be divided.
        """
        from titanlite.features.experts.sharding import apply_ep, has_exchange

        apply_ep(model, mesh["ep"])
        modules = dict(model.named_modules())
        here = [name for name in names if name in modules]
        whole = [name for name in here if not has_exchange(modules[name])]
        if whole:
            raise ParallelismError(
                f"ranks cannot share experts without an `exchange`: {', '.join(whole)}"
            )

    def compiled(self, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Return the modules that `torch.compile` can make one graph: those without shared
        experts.
        """
        from titanlite.features.experts.sharding import has_exchange

        return {name: module for name, module in modules.items() if not has_exchange(module)}

    # The plan

    def rows_to_each(self, run: RunConfig, args: Any) -> int:
        """Return the rows that a layer sends to each of its ranks, for a trace.

        Raises ConfigError if they do not divide.
        """
        from titanlite.features.experts.plan_memory import rows_to_each

        return rows_to_each(run, args)

    def traffic(self, step: StepSizes) -> Mapping[str, float]:
        """Rows go to the ranks of their experts and back, and gradients."""
        from titanlite.features.experts.plan_speed import exchange_seconds

        return {"expert traffic": exchange_seconds(step)}
