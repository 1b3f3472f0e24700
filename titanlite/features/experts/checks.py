"""Checks of experts on several ranks: other keys, ranks, the model. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.config.rules import divisors
from titanlite.features.experts.ranks import in_words, most_ranks

if TYPE_CHECKING:
    from titanlite.run.config import RunConfig

DEGREE = "parallelism.expert_parallel_degree"
_TP = "training.tensor_parallel_degree"


def model_problems(run: RunConfig, args: Any) -> Iterator[Problem]:
    """Check that ranks with different tokens can share the experts."""
    layers = run.spec.moe_layers(args)
    if not layers:
        return
    ranks = run.mesh.expert
    if run.activation_checkpoint.mode == "budget":
        message = (
            'is "budget", which covers compiled code alone, and experts that ranks share are not '
            "compiled"
        )
        yield Problem(
            "conflict", "activation_checkpoint.mode", message, 'take "full" or "selective"'
        )
    experts = math.gcd(*layers.values())
    most = most_ranks(run.mesh)
    if most % ranks or experts % ranks:
        message = (
            f"is {ranks}, which does not divide both {in_words(run.mesh)} = {most} "
            f"and the {experts} experts"
        )
        fitting = ", ".join(map(str, divisors(math.gcd(most, experts))))
        yield Problem("divide", DEGREE, message, f"these work: {fitting}")


def reshard_problems(run: RunConfig, layers: Mapping[str, int]) -> Iterator[Problem]:
    """Check that experts stay over all ranks that cut them inside of matrices, even if no ranks
    share experts.

    torch keeps weights over fewer ranks only where dimension 0 alone is cut, and on one mesh.
    """
    reshard = run.training.reshard_after_forward
    if not isinstance(reshard, int):
        return
    experts = math.gcd(*layers.values())
    ranks = run.mesh.expert
    if most_ranks(run.mesh) % ranks or experts % ranks:
        return
    alike = run.mesh.expert_shards
    is_cut = ranks > 1 or experts % alike
    if reshard == alike or not is_cut:
        return
    message = (
        f"is {reshard}; experts that are cut inside their matrices stay over all their "
        f"{alike} ranks"
    )
    hint = 'take "default", "always" or "never"'
    if alike > 1 and run.mesh.weight_shards % alike == 0:
        hint += f", or {alike}"
    yield Problem("ranks", "training.reshard_after_forward", message, hint)
