"""Expert parallelism (EP), ranks that share the experts of a mixture: what titanlite knows of it,
moment by moment.

    sharding.py   experts divided over ranks, and over those that shard them
    exchange.py   rows on their way to the ranks of their experts, and back

The key is `parallelism.expert_parallel_degree`. Both files need torch and are imported where they
are used. Mixtures themselves are models: `titanlite.models.moe`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titanlite.config.rules import Finding, divisors
from titanlite.features.feature import Feature
from titanlite.parallel import ParallelismError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.plan.step_sizes import StepSizes
    from titanlite.start.derive import RunConfig

_TP = "training.tensor_parallel_degree"


class ExpertParallel(Feature):
    """Expert parallelism of more than one rank."""

    key = "parallelism.expert_parallel_degree"
    model_field = "experts"

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    # Before the ranks start

    def model_misfits(self, run: RunConfig, args: Any) -> Iterator[Finding]:
        """Check that the ranks that share the weights can share the experts too."""
        if run.spec.experts is None:
            return
        if run.mesh.tensor > 1:
            message = (
                f"is {self.ranks}: tensor-parallel ranks hold the same tokens, and would send each "
                "of them more than once"
            )
            yield "conflict", self.key, message, f"set {_TP} = 1, or this key"
        if run.activation_checkpoint.mode == "budget":
            message = (
                'is "budget", which covers compiled code alone, and experts that ranks share are '
                "not compiled"
            )
            yield "conflict", "activation_checkpoint.mode", message, 'take "full" or "selective"'
        experts = math.gcd(*run.spec.experts(args).values())
        shards = run.mesh.weight_shards
        if shards % self.ranks or experts % self.ranks:
            which = run.mesh.weight_shards_in_words
            fitting = ", ".join(map(str, divisors(math.gcd(shards, experts))))
            message = (
                f"is {self.ranks}, which does not divide both {which} = {shards} and the "
                f"{experts} experts"
            )
            yield "divide", self.key, message, f"these work: {fitting}"

    # The model: `titanlite.parallel.parallelize` calls these

    def mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Divide the ranks that share the weights, once: [expert_shard, ep]."""
        from titanlite.features.experts.sharding import expert_mesh

        return expert_mesh(mesh, self.ranks)

    def apply(self, model: nn.Module, mesh: DeviceMesh, mixtures: Sequence[str]) -> None:
        """Divide the experts of a model or pipeline stage on the meta device, in place.

        mesh: of `mesh`. mixtures: names of the mixtures in `model`. Raises ParallelismError for one
        that cannot be divided.
        """
        from titanlite.features.experts.sharding import apply_ep, has_exchange

        apply_ep(model, mesh["ep"])
        whole = [name for name in mixtures if not has_exchange(model.get_submodule(name))]
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

    def traffic(self, step: StepSizes) -> Mapping[str, float]:
        """Rows go to the ranks of their experts and back, and gradients."""
        mesh = step.mesh
        rows = step.tokens * step.experts_per_token * step.itemsize * step.width
        again = 0 if step.by_op else 2 * step.recomputed
        one = step.rates.collective(rows, mesh.expert, mesh.tensor)
        return {"expert traffic": step.blocks * (4 + again) * one}
