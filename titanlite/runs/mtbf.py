"""How often a run has failed: the mean time between failures of a node, with its uncertainty.

The times between failures are taken as exponential. Then the number of failures in the node hours
of a run is a Poisson number. Its limits are those of Garwood 1936 (Biometrika 28, "Fiducial limits
for the Poisson distribution"), by the chi-square distribution. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from titanlite import exit_codes
from titanlite.runs.attempts import Attempt
from titanlite.runs.goodput import Span, spans_of
from titanlite.runs.read import Run

#: Ends that a node may cause. Wrong configs, a lack of memory, the guard and requested stops are
#: none of them: the same command ends so on any node.
_OF_NODES = (exit_codes.ERROR, exit_codes.LOST_PEER)
#: Probability that the interval holds the true value.
CONFIDENCE = 0.95
_BISECTIONS = 200


@dataclass(frozen=True)
class Observed:
    """Failures of a run."""

    failures: int
    #: Sum over attempts: seconds times nodes.
    node_seconds: float
    #: Median seconds from a failure's end of the attempt to the first step of the next; None: it
    #: was never restarted.
    restart: float | None
    #: Mean seconds of a save: in which no step went on, and all of it; None: none is recorded.
    save_visible: float | None
    save_seconds: float | None

    @property
    def mtbf(self) -> float | None:
        """Mean seconds between two failures of one node; None: it saw none."""
        return self.node_seconds / self.failures if self.failures else None

    @property
    def least(self) -> float:
        """The lower limit of `mtbf`. Without a failure it holds with the whole confidence."""
        beyond = (1 - CONFIDENCE) / (2 if self.failures else 1)
        return self.node_seconds / mean_with(self.failures, beyond)

    @property
    def most(self) -> float:
        """The upper limit of `mtbf`; inf without a failure."""
        if not self.failures:
            return math.inf
        return self.node_seconds / mean_with(self.failures - 1, 1 - (1 - CONFIDENCE) / 2)


def mean_with(count: int, chance: float) -> float:
    """Return the Poisson mean at which a number of at most `count` has this chance.

    Half the chi-square quantile of 1 - chance, with 2 * count + 2 degrees of freedom.
    """
    low = 0.0
    high = 10.0 * (count + 10)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _at_most(count, middle) > chance:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _at_most(count: int, mean: float) -> float:
    """Return the chance of a Poisson number of at most `count`."""
    if mean <= 0:
        return 1.0
    logs = (number * math.log(mean) - mean - math.lgamma(number + 1) for number in range(count + 1))
    return math.fsum(map(math.exp, logs))


def observed(run: Run, nodes_of: Callable[[Attempt], int]) -> Observed:
    """Return what a run tells of failures. nodes_of: attempt → its number of nodes."""
    spans = spans_of(run)
    failures = sum(_failed(run, span) for span in spans)
    seconds = sum((span.ended - span.launched) * nodes_of(span.attempt) for span in spans)
    restarts = []
    for before, after in pairwise(spans):
        if _failed(run, before) and after.spent.trained:
            first = after.spent.seconds.get("first_step", 0.0)
            restarts.append(after.started - before.ended + first)
    visible, whole = _saves(spans)
    return Observed(failures, seconds, median(restarts) if restarts else None, visible, whole)


def _failed(run: Run, span: Span) -> bool:
    """Return whether an attempt ended by what may be a node's fault."""
    if "state" in span.attempt:
        is_of_node = span.attempt.get("exit_code") in _OF_NODES
        return span.attempt["state"] == "failed" and is_of_node
    is_last = span.attempt["attempt"] == run.attempts[-1]["attempt"]
    return not is_last or run.alive is None


def _saves(spans: list[Span]) -> tuple[float | None, float | None]:
    """Return the mean seconds of a save, in which no step went on and in all."""
    count = visible = whole = 0.0
    for span in spans:
        saves = span.attempt.get("saves")
        if saves and saves.get("count"):
            count += saves["count"]
            whole += saves.get("milliseconds", 0) / 1000
            visible += span.spent.seconds.get("save", 0.0)
    if not count:
        return None, None
    return visible / count, max(whole, visible) / count


def nodes_by(gpus_per_node: int) -> Callable[[Attempt], int]:
    """Return how to tell the nodes of an attempt: by its launcher, or else by GPUs of a node."""

    def nodes(attempt: Attempt) -> int:
        environment = attempt.get("environment") or {}
        local = str(environment.get("LOCAL_WORLD_SIZE", ""))
        size = int(local) if local.isdecimal() and 0 < int(local) < 2**31 else gpus_per_node
        return max(math.ceil((attempt.get("ranks") or 1) / size), 1)

    return nodes
