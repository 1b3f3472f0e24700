"""Settings that a search has found, and the result of a search."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from titanlite.plan.hardware import Cluster
from titanlite.plan.speed import Speed
from titanlite.run.config import RunConfig


@dataclass(frozen=True)
class Candidate:
    """Settings of a run that are valid, with what the planner predicts of them."""

    #: Key → value, where it differs from the config, in the order of files.
    changes: Mapping[str, Any]
    run: RunConfig
    #: Of a run in phases that of the one with the most tokens.
    speed: Speed
    #: Tokens per second and GPU, of a run in phases the mean over all its steps.
    rate: float
    #: Bytes of the fullest GPU, with what lies outside of tensors, and of a host; 0: not computed
    #: yet.
    needed: int = 0
    host: int = 0

    @property
    def order(self) -> tuple[float, int, int]:
        """Sort the best first: among speeds within half a percent the fewest changes, then the
        least memory.
        """
        return -round(math.log(self.rate) / 0.005), len(self.changes), self.needed

    @property
    def degrees(self) -> str:
        """Dimensions of the mesh with several ranks, as the start report names them."""
        mesh = self.run.mesh
        sizes = {**mesh.dimensions, "ep": mesh.expert}
        several = [f"{name} {degree}" for name, degree in sizes.items() if degree > 1]
        return " x ".join(several) or "1 rank"

    @property
    def dimensions(self) -> str:
        """The same without their sizes."""
        return re.sub(r"\d+", "", self.degrees)

    @property
    def mode(self) -> str:
        """What is recomputed."""
        ac = self.run.activation_checkpoint
        if ac.mode == "selective":
            return f"AC {ac.mode} {ac.selective_ac_option}"
        return f"AC {ac.mode}"

    @property
    def layout(self) -> str:
        """Both."""
        return f"{self.degrees}, {self.mode}"

    @property
    def micro_batch(self) -> int:
        """Sequences that a rank takes at a time."""
        return self.run.sequences_at_once

    def fits(self, cluster: Cluster) -> bool:
        """Return whether GPU and host have the memory, without a margin."""
        host = cluster.host or math.inf
        return self.needed <= cluster.gpu.memory and self.host <= host

    def slower_than(self, winner: Candidate) -> str:
        """Return by how much it is slower, and in which part of a step."""
        parts = dict(self.speed.parts)
        for name in parts:
            parts[name] -= winner.speed.parts.get(name, 0.0)
        name = max(parts, key=lambda name: parts[name])
        share = 1 - self.rate / winner.rate
        return f"{share:.1%} slower: {parts[name]:+.2f} s of a step for {name}"


class Loser(NamedTuple):
    """Settings that were left out, and why."""

    candidate: Candidate
    reason: str = ""
    #: Bytes over the limit with the leanest settings of the same mesh and AC mode.
    missing: int = 0


class SearchResult(NamedTuple):
    """The outcome of a search."""

    cluster: Cluster
    base: Candidate
    #: Those that fit, best first: the best of each mesh and AC mode.
    ranked: tuple[Candidate, ...]
    losers: tuple[Loser, ...]
    #: Valid settings whose speed was predicted.
    tried: int

    @property
    def config_is_best(self) -> bool:
        """Whether the config as it is fits, and nothing is faster by a share that the model can
        tell.
        """
        return bool(self.ranked) and self.ranked[0] is self.base
