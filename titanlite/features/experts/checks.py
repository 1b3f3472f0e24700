"""What does not fit experts on several ranks: other keys, ranks, the model. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from titanlite.config.rules import Finding, divisors

if TYPE_CHECKING:
    from titanlite.start.derive import RunConfig

DEGREE = "parallelism.expert_parallel_degree"
_TP = "training.tensor_parallel_degree"


def model_misfits(run: RunConfig, args: Any) -> Iterator[Finding]:
    """Check that the ranks that share the weights can share the experts too."""
    mixtures = run.spec.mixtures(args)
    if not mixtures:
        return
    ranks = run.mesh.expert
    if run.mesh.tensor > 1:
        message = (
            f"is {ranks}: tensor-parallel ranks have all experts each, and cannot share them with "
            "others"
        )
        yield "conflict", DEGREE, message, f"set {_TP} = 1, or this key"
    if run.activation_checkpoint.mode == "budget":
        message = (
            'is "budget", which covers compiled code alone, and experts that ranks share are not '
            "compiled"
        )
        yield "conflict", "activation_checkpoint.mode", message, 'take "full" or "selective"'
    experts = math.gcd(*mixtures.values())
    shards = run.mesh.weight_shards
    if shards % ranks or experts % ranks:
        message = (
            f"is {ranks}, which does not divide both {run.mesh.weight_shards_in_words} = {shards} "
            f"and the {experts} experts"
        )
        yield "divide", DEGREE, message, _fitting(ranks, shards, experts)


def _fitting(ranks: int, shards: int, experts: int) -> str:
    """Return a hint with the degrees that work.

    ranks: the wanted degree. shards: ranks that share the weights.
    """
    on_these = divisors(math.gcd(shards, experts))
    if len(on_these) > 1 or experts % ranks == 0:
        return f"these work: {', '.join(map(str, on_these))}"
    others = divisors(experts)
    below = [number for number in others if number < ranks][-1:]
    above = [number for number in others if number > ranks][:1]
    nearest = " or ".join(map(str, below + above))
    return f"take {nearest}, the nearest that divide the experts, and as many ranks or a multiple"


def reshard_misfits(run: RunConfig, args: Any) -> Iterator[Finding]:
    """Check that experts stay over all ranks that cut them inside of their matrices, also in a run
    whose ranks share no experts.

    torch keeps weights over fewer ranks only where dimension 0 alone is cut, and on one mesh.
    """
    reshard = run.training.reshard_after_forward
    mixtures = run.spec.mixtures(args)
    if not mixtures or not isinstance(reshard, int):
        return
    experts = math.gcd(*mixtures.values())
    ranks, shards = run.mesh.expert, run.mesh.weight_shards
    if shards % ranks or experts % ranks:
        return
    alike = shards // ranks
    is_cut = ranks > 1 or experts % shards
    if reshard == alike or not is_cut:
        return
    message = (
        f"is {reshard}; experts that are cut inside their matrices stay over all their "
        f"{alike} ranks"
    )
    hint = 'take "default", "always" or "never"'
    if alike > 1:
        hint += f", or {alike}"
    yield "ranks", "training.reshard_after_forward", message, hint
