"""`titanlite plan --search`: the fastest settings that fit, as files to lay over the config.

`titanlite.cli.plan.settings` has what varies. `titanlite.resolve.load` decides what is valid, and
the planner's formulas give memory and speed.
"""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec.structs import replace as replace_fields

from titanlite.cli.plan.settings import (
    AC_MODES,
    CHOICES,
    CHUNKS,
    COMPILE,
    LOSS_CHUNKS,
    RESHARD,
    Changes,
    Mesh,
    batches,
    meshes,
    remedies,
)
from titanlite.config.errors import ConfigError
from titanlite.config.keys import keys
from titanlite.config.loaded import LoadedConfig
from titanlite.plan.hardware import Cluster
from titanlite.plan.memory import with_vocabulary
from titanlite.plan.parts import needed_bytes
from titanlite.plan.plan import formula, host_memory
from titanlite.plan.speed import Speed, predict
from titanlite.resolve.load import resolve
from titanlite.run.config import RunConfig

#: Share of a GPU's memory that must stay free: the formulas are that good at best.
MARGIN = 0.05
#: A gain below this share is none: settings are compared by a model whose own error is larger.
LEAST_GAIN = 0.02
_rate = attrgetter("rate")
_order = attrgetter("order")


@dataclass(frozen=True)
class Candidate:
    """Settings of a run that are valid, with what the planner predicts of them."""

    #: Key → value, where it differs from the config, in the order of files.
    changes: Mapping[str, Any]
    run: RunConfig
    #: The speed of the run; if it has phases, of the one with the largest steps.
    speed: Speed
    #: Bytes of the fullest GPU, with what lies outside of tensors, and of a host; 0: not computed
    #: yet.
    needed: int = 0
    host: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second and GPU."""
        return self.speed.tokens_per_second

    @property
    def order(self) -> tuple[float, int, int]:
        """Sort the best first: among speeds within half a percent the fewest changes, then the
        least memory.
        """
        return -round(math.log(self.rate) / 0.005), len(self.changes), self.needed

    @property
    def layout(self) -> str:
        """Degrees of parallelism above 1, and what is recomputed."""
        sizes = {**self.run.mesh.dimensions, "ep": self.run.mesh.expert}
        degrees = [f"{name} {degree}" for name, degree in sizes.items() if degree > 1]
        ac = self.run.activation_checkpoint
        option = f" {ac.selective_ac_option}" if ac.mode == "selective" else ""
        return f"{' x '.join(degrees) or '1 rank'}, AC {ac.mode}{option}"

    def fits(self, cluster: Cluster, margin: float = 0.0) -> bool:
        """Return whether GPU and host have the memory. margin: share of the GPU's to stay free."""
        is_on_gpu = self.needed <= round(cluster.gpu.memory * (1 - margin))
        return is_on_gpu and self.host <= (cluster.host or math.inf)


class SearchResult(NamedTuple):
    """The outcome of a search."""

    cluster: Cluster
    base: Candidate
    #: Choices that fit, best first: the best of each layout. The config is first if nothing
    #: is faster by a share that the model can tell.
    ranked: tuple[Candidate, ...]
    #: The first with one choice of `CHOICES` made otherwise, by its name, key and value; None: not
    #: valid.
    otherwise: Mapping[tuple[str, str, Any], Candidate | None]

    @property
    def config_is_best(self) -> bool:
        return bool(self.ranked) and self.ranked[0] is self.base


def search(config: LoadedConfig, run: RunConfig, cluster: Cluster, top: int = 5) -> SearchResult:
    """Search the settings of a config, which `resolve` returned with its run, for a cluster.

    top: how many to rank. Raises ConfigError for a model without formulas.
    """
    work = _Search(config, run, cluster)
    base = work.weighed(Candidate({}, work.run, work.speed(work.run)))
    bounds = []
    for mesh in meshes(work.run, cluster):
        # The first mode recomputes least.
        variants = work.variants(mesh, AC_MODES[0])
        if variants:
            bounds.append((max(map(_rate, variants)), mesh))
    found: dict[str, Candidate] = {}
    for bound, mesh in sorted(bounds, key=lambda pair: -pair[0]):
        least = 0.0
        if len(found) >= top:
            least = sorted(map(_rate, found.values()))[-top]
        if bound < least:
            break
        for one in work.best(mesh, least):
            found[one.layout] = min(found.get(one.layout, one), one, key=_order)
    ranked = sorted(found.values(), key=_order)
    if base.fits(cluster):
        better = [other for other in ranked if other.rate > base.rate * (1 + LEAST_GAIN)]
        others = [other for other in ranked if other not in better and other.changes]
        ranked = [*better, base, *others]
    otherwise = work.otherwise(ranked[0]) if ranked else {}
    return SearchResult(cluster, base, tuple(ranked[:top]), otherwise)


def cheapest_fit(config: LoadedConfig, run: RunConfig, cluster: Cluster) -> Candidate | None:
    """Return the settings that make a run fit at the least loss of speed; None: none do."""
    work = _Search(config, run, cluster)
    best = work.weighed(Candidate({}, work.run, work.speed(work.run)))
    chosen: list[Changes] = []
    for remedy in remedies(work.run):
        candidate = work.with_all([*chosen, remedy])
        if candidate and candidate.needed < best.needed:
            chosen.append(remedy)
            best = candidate
        if best.fits(cluster):
            break
    else:
        return None
    # A later one may have made it needless.
    for remedy in reversed(chosen[:-1]):
        fewer = [one for one in chosen if one is not remedy]
        candidate = work.with_all(fewer)
        if candidate and candidate.fits(cluster):
            chosen = fewer
            best = candidate
    return best


class _Search:
    def __init__(self, config: LoadedConfig, run: RunConfig, cluster: Cluster) -> None:
        self.cluster = cluster
        self.run = with_vocabulary(run)
        sections = replace_fields(config.sections, model=self.run.model)
        self.config = _Variant(sections, config.sources)
        #: Plans by changes; None: not valid.
        self._found: dict[frozenset[tuple[str, Any]], Candidate | None] = {}

    def speed(self, run: RunConfig) -> Speed:
        first = max(run.legs, key=lambda first: run.legs[first].tokens_per_step)
        return predict(run.steady_at(first), self.cluster)

    def candidate(self, changes: Mapping[str, Any]) -> Candidate | None:
        given: Changes = {}
        for key in keys():
            if key in changes and changes[key] != self.config.value(key):
                given[key] = changes[key]
        name = frozenset(given.items())
        if name not in self._found:
            self._found[name] = None
            with suppress(ConfigError):
                run = resolve(self.config.changed(given), self.cluster.gpus)[1]
                self._found[name] = Candidate(given, run, self.speed(run))
        return self._found[name]

    def with_all(self, changes: Sequence[Changes]) -> Candidate | None:
        """Return the candidate with changes, later ones over earlier ones; None: not valid."""
        candidate = self.candidate(dict(ChainMap(*reversed(changes))))
        return candidate and self.weighed(candidate)

    def otherwise(self, best: Candidate) -> dict[tuple[str, str, Any], Candidate | None]:
        found = {}
        for name, (key, values) in CHOICES.items():
            chosen = best.changes.get(key, self.config.value(key))
            value = next(value for value in values if value != chosen)
            found[name, key, value] = self.with_all([dict(best.changes), {key: value}])
        return found

    def in_chunks(self, candidate: Candidate) -> Candidate:
        """Return the candidate itself where chunks of the loss are not valid."""
        chunks = max(self.run.training.loss_chunks, CHUNKS)
        changes = {**candidate.changes, LOSS_CHUNKS: chunks}
        return self.weighed(self.candidate(changes) or candidate)

    def weighed(self, candidate: Candidate) -> Candidate:
        memory = formula(candidate.run)
        host = sum(host_memory(candidate.run, self.cluster, memory).values())
        return replace(candidate, needed=needed_bytes(memory), host=host)

    def variants(self, mesh: Mesh, ac: Changes) -> list[Candidate]:
        """Return valid settings with the loss in one piece, the leanest first."""
        reshards = ("default",) if mesh.is_pipeline else ("default", "never")
        found = []
        for batch, reshard in itertools.product(batches(self.run, mesh), reshards):
            changes = {**mesh.changes, **ac, COMPILE: True, **batch, RESHARD: reshard}
            candidate = self.candidate(changes)
            if candidate:
                found.append(candidate)
        return found

    def best(self, mesh: Mesh, least: float) -> list[Candidate]:
        """Return the fastest settings that fit, of each AC mode, beyond a rate."""
        found = []
        # The last mode keeps least.
        for ac in reversed(AC_MODES):
            variants = self.variants(mesh, ac)
            if not variants or not self._fits(self.in_chunks(variants[0])):
                break
            for whole in sorted(variants, key=_rate, reverse=True):
                in_chunks = self.in_chunks(whole)
                if whole.rate > least and self._fits(in_chunks):
                    weighed = self.weighed(whole)
                    found.append(weighed if self._fits(weighed) else in_chunks)
                    break
        return found

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.fits(self.cluster, MARGIN)


class _Variant(LoadedConfig):
    """A config that is never a file, which saves half the time of its check."""

    def to_toml(self, defaults: bool = True) -> str:
        return ""
