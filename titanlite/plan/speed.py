"""How long a step takes: a roofline over products, memory and links. No torch here.

FORMULAS.md derives each formula. Times are seconds on the rank that the others wait for.
`StepSizes` has the sizes that all terms read; each term is a function of `computing` or `traffic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from titanlite.plan.computing import computing, launches, update
from titanlite.plan.hardware import Cluster
from titanlite.plan.rates import CONSTANTS, Constants, Directions
from titanlite.plan.step_sizes import StepSizes
from titanlite.plan.traffic import (
    host_transfers,
    sharding_traffic,
    tensor_traffic,
)
from titanlite.run.config import RunConfig

#: Parts of a step, in the order of reports. Traffic is what computing does not hide.
PARTS = (
    "matrix products",
    "attention",
    "memory traffic",  # norms, RoPE, SwiGLU, residuals, loss
    "float8 casts",
    "recomputation",
    "sharding traffic",  # all-gathers and reduce-scatters of FSDP, all-reduces of copies
    "tensor traffic",
    "context traffic",
    "expert traffic",
    "host transfers",  # offload
    "pipeline bubble",
    "optimizer",
    "launches",  # the GPU waits for the host
)
#: Parts of a `Pass`, in its order.
_COMPUTED = PARTS[:4]


@dataclass(frozen=True)
class Speed:
    """A predicted step."""

    #: Per GPU.
    tokens_per_second: float
    #: The range that the calibration's error leaves.
    low: float
    high: float
    #: Share of the peak in bf16, by the model FLOPs that logs show.
    mfu: float
    step_seconds: float
    #: Name of `PARTS` → seconds of a step; their sum is `step_seconds`.
    parts: Mapping[str, float]
    assumptions: tuple[str, ...]


#: Largest relative error on the runs of the fit, each left out once, see FORMULAS.md.
ERROR = 0.15
#: Published rates over predicted ones, least and most, of runs that the fit has not seen: `low` and
#: `high`.
UNSEEN = (0.83, 1.22)


def predict(run: RunConfig, cluster: Cluster, constants: Constants = CONSTANTS) -> Speed:
    """Return the speed of a run. Raises ConfigError for float8 on a GPU without it."""
    step = StepSizes(run, cluster, constants)
    parts = _parts(step)
    seconds = sum(parts.values())
    rate = run.batch.tokens_per_step / seconds / run.mesh.world_size
    flops = run.flops_per_token(step.args, run.batch.seq_len)
    mfu = rate * flops / cluster.gpu.bf16
    least, most = UNSEEN
    links = f"links {cluster.gpu.link / 1e9:.0f} GB/s"
    if cluster.nodes > 1:
        links += f", network {cluster.network * 8 / 1e9:.0f} Gbit/s for each machine"
    peak = f"{cluster.gpu.key}: peak {cluster.gpu.bf16 / 1e12:.0f} TFLOPS in bf16, {links}"
    assumptions = (peak, *step.products.assumptions)
    if cluster.note:
        assumptions += (cluster.note,)
    return Speed(rate, rate * least, rate * most, mfu, seconds, parts, assumptions)


def _parts(step: StepSizes) -> dict[str, float]:
    parts = dict.fromkeys(PARTS, 0.0)
    # Micro-batches of the whole model that this rank's part amounts to.
    share = step.stage_share
    times = step.micro_batches * share
    work = computing(step)
    for name, forward, backward in zip(_COMPUTED, work.forward, work.backward, strict=True):
        parts[name] = times * (forward + backward)
    parts["recomputation"] = times * sum(work.again)
    parts["tensor traffic"] = times * tensor_traffic(step)
    for name, seconds in step.traffic.items():
        parts[name] = times * seconds(step)
    beside = Directions(
        share * sum(work.forward) * step.micro_batches,
        share * (sum(work.backward) + sum(work.again)) * step.micro_batches,
    )
    parts["sharding traffic"] = sharding_traffic(step, beside)
    parts["host transfers"] = host_transfers(step, beside)
    busy = sum(parts.values())
    parts["launches"] = max(0.0, launches(step) - busy)
    idle = step.idle * (busy + parts["launches"])
    parts["pipeline bubble"] = idle / step.micro_batches
    parts["optimizer"] = update(step)
    return {name: seconds * step.rates.cluster.slower for name, seconds in parts.items()}
