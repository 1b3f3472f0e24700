"""`titanlite plan --search`: the fastest settings that fit, as files to lay over a config.

Model, optimizer, global batch and sequence length stay. The search varies how the ranks divide the
work, what is recomputed, the micro-batch, chunks of the loss, compilation, and how often gradients
are reduced. It takes float8 only where the config has it or the user allows it, and offload only
where nothing else fits. `titanlite.resolve.load` decides what is valid, and the planner's formulas
give memory and speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from msgspec.structs import replace as replace_fields

from titanlite.cli.plan.candidates import Candidate, Loser, SearchResult
from titanlite.cli.plan.settings import (
    COMPILE,
    LOSS_CHUNKS,
    OFFLOADS,
    RESHARD,
    Changes,
    Mesh,
    Offload,
    batches,
    meshes,
)
from titanlite.config.errors import ConfigError
from titanlite.config.keys import keys
from titanlite.config.loaded import LoadedConfig
from titanlite.features.float8 import search as float8
from titanlite.plan.hardware import Cluster
from titanlite.plan.memory import with_vocabulary
from titanlite.plan.parts import GIB, needed_bytes
from titanlite.plan.plan import formula, host_memory, steps_of_legs
from titanlite.plan.speed import predict
from titanlite.resolve.load import check_config, resolve
from titanlite.run.config import RunConfig

#: Share of a GPU's memory that must stay free: the formulas are that good at best.
MARGIN = 0.05
#: A gain below this share is none: settings are compared by a model whose own error is larger.
LEAST_GAIN = 0.02
#: Pieces of the loss where the whole does not fit.
CHUNKS = 8
#: Most combinations of dimensions that the report names.
MOST_KINDS = 8


def search(
    argv: Sequence[str], cluster: Cluster, *, top: int = 5, allow: Iterable[str] = ()
) -> SearchResult:
    """Search the settings of a command line's config for a cluster.

    top: how many to rank. allow: "float8": also where the config has none.

    Raises ConfigError for a config that does not fit the ranks of the cluster, and for a model
    without formulas.
    """
    work = _Search(argv, cluster, allow)
    base = work.base()
    outcome = _Outcome([], [])
    for offload in OFFLOADS:
        if not outcome.ranked:
            outcome = work.attempt(offload, top)
    ranked = outcome.ranked
    if base.fits(cluster):
        better = [other for other in ranked if other.rate > base.rate * (1 + LEAST_GAIN)]
        others = [other for other in ranked if other not in better and other.changes]
        ranked = [*better, base, *others]
    losers = list(_losers(base, ranked, outcome.lost, top)) if ranked else []
    return SearchResult(cluster, base, tuple(ranked[:top]), tuple(losers), work.tried())


class _Outcome(NamedTuple):
    """What fits, best first, and what does not or is slower at any rate."""

    ranked: list[Candidate]
    lost: list[Loser]


class _Over(NamedTuple):
    """Bytes over a limit, at most 0 where settings fit, and of which memory."""

    missing: int
    where: str


class _Work(NamedTuple):
    """A mesh to search, with its fastest settings if memory were no matter."""

    fastest: Candidate
    mesh: Mesh


class _Search:
    def __init__(self, argv: Sequence[str], cluster: Cluster, allow: Iterable[str]) -> None:
        self.cluster = cluster
        config, run = check_config(argv, cluster.gpus, training=False, defer=True)
        self.run = with_vocabulary(run)
        sections = replace_fields(config.sections, model=self.run.model)
        self.config = _Variant(
            sections, config.sources, config.files, config.notes, config.deferred
        )
        #: Changes of numerics to try.
        self.numerics: list[Changes] = [{}]
        if "float8" in allow:
            self.numerics += float8.settings(cluster.gpu)
        self.limit = round(cluster.gpu.memory * (1 - MARGIN))
        #: By changes; None: not valid.
        self._found: dict[frozenset[tuple[str, Any]], Candidate | None] = {}

    def tried(self) -> int:
        """Return the number of valid settings so far."""
        return sum(candidate is not None for candidate in self._found.values())

    # Single settings

    def base(self) -> Candidate:
        """Return the config as it is."""
        return self.weighed(self._predicted({}, self.run))

    def _predicted(self, changes: Changes, run: RunConfig) -> Candidate:
        """Return settings with their speed."""
        legs = []
        for first, steps in steps_of_legs(run):
            steady = run.steady_at(first)
            # Without a length all legs count as one step of theirs.
            tokens = (1 if steps is None else steps) * steady.batch.tokens_per_step
            if tokens:
                legs.append((tokens, predict(steady, self.cluster)))
        longest = max(legs, key=lambda leg: leg[0])
        if len(legs) == 1:
            return Candidate(changes, run, longest[1], longest[1].tokens_per_second)
        total = sum(tokens for tokens, _ in legs)
        seconds = sum(tokens / speed.tokens_per_second for tokens, speed in legs)
        return Candidate(changes, run, longest[1], total / seconds)

    def candidate(self, changes: Mapping[str, Any]) -> Candidate | None:
        """Return the config with changes; None: it is not valid."""
        given: Changes = {}
        for key in keys():
            if key in changes and changes[key] != self.config.value(key):
                given[key] = changes[key]
        name = frozenset(given.items())
        if name not in self._found:
            self._found[name] = self._checked(given)
        return self._found[name]

    def _checked(self, changes: Changes) -> Candidate | None:
        config = self.config.changed(changes)
        try:
            return self._predicted(changes, resolve(config, self.cluster.gpus)[1])
        except ConfigError:
            return None

    def in_chunks(self, candidate: Candidate) -> Candidate:
        """Return it with the loss in chunks; itself where the config has chunks, or they are not
        valid.
        """
        chunks = max(self.run.training.loss_chunks, CHUNKS)
        return self.candidate({**candidate.changes, LOSS_CHUNKS: chunks}) or candidate

    def weighed(self, candidate: Candidate) -> Candidate:
        """Return it with its memory."""
        memory = formula(candidate.run)
        host = sum(host_memory(candidate.run, self.cluster, memory).values())
        return replace(candidate, needed=needed_bytes(memory), host=host)

    def over(self, candidate: Candidate) -> _Over:
        """Return what a weighed candidate lacks, of the GPU's memory or of the host's."""
        host = self.cluster.host
        on_host = candidate.host - host if host else -1
        return max(_Over(candidate.needed - self.limit, ""), _Over(on_host, " of host memory"))

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a weighed candidate fits with a margin."""
        return self.over(candidate).missing <= 0

    # A mesh

    def variants(self, mesh: Mesh, ac: Changes, offload: Offload) -> list[Candidate]:
        """Return the valid settings on a mesh with the loss in one piece, the leanest first."""
        reshards = ("default",) if mesh.is_pipeline else ("default", "never")
        fixed = {**mesh.changes, **ac, **offload.changes, COMPILE: True}
        found = []
        for batch, reshard, numerics in itertools.product(
            batches(self.run, mesh), reshards, self.numerics
        ):
            candidate = self.candidate({**fixed, **batch, RESHARD: reshard, **numerics})
            if candidate:
                found.append(candidate)
        return found

    def lost(self, fastest: Candidate, mesh: Mesh, ac: Changes, offload: Offload) -> Loser | None:
        """Return what the leanest settings with `ac` on a mesh lack; None: they fit, or none is
        valid.

        fastest: what does not fit for that.
        """
        variants = self.variants(mesh, ac, offload)
        if not variants:
            return None
        leanest = self.weighed(self.in_chunks(variants[0]))
        missing, where = self.over(leanest)
        if missing <= 0:
            return None
        chunks = leanest.run.training.loss_chunks
        least = f"a micro-batch of {leanest.micro_batch} and loss_chunks = {chunks}"
        if leanest.mode != fastest.mode:
            least = f"{leanest.mode}, {least}"
        reason = (
            f"does not fit: on this mesh even {least} need {missing / GIB:.1f} GiB{where} too much"
        )
        return Loser(fastest, reason, missing)

    def fastest(self, variants: Sequence[Candidate]) -> Candidate | None:
        """Return the fastest settings that fit."""
        for whole in sorted(variants, key=_rate, reverse=True):
            in_chunks = self.weighed(self.in_chunks(whole))
            if self.fits(in_chunks):
                weighed = self.weighed(whole)
                return weighed if self.fits(weighed) else in_chunks
        return None

    # All meshes

    def attempt(self, offload: Offload, top: int) -> _Outcome:
        """Return what fits with an offload, and what is left out.

        A loser without a reason is slower at any rate.
        """
        found: dict[str, Candidate] = {}
        lost: list[Loser] = []
        for bound, mesh in self._fastest_first(offload):
            least = 0.0
            if len(found) >= top:
                least = sorted(map(_rate, found.values()))[-top]
            if bound.rate < least:
                lost.append(Loser(bound))
                continue
            # The last mode keeps least.
            nothing = self.lost(bound, mesh, offload.modes[-1], offload)
            if nothing:
                lost.append(nothing)
                continue
            for ac in offload.modes:
                one = self._best_of(mesh, ac, offload, least)
                if isinstance(one, Loser):
                    lost.append(one)
                elif one:
                    found[one.layout] = min(found.get(one.layout, one), one, key=_order)
        return _Outcome(sorted(found.values(), key=_order), lost)

    def _fastest_first(self, offload: Offload) -> list[_Work]:
        """Return the meshes with valid settings, the fastest first."""
        found = []
        for mesh in meshes(self.run, self.cluster):
            # The first mode recomputes least.
            variants = self.variants(mesh, offload.modes[0], offload)
            if variants:
                found.append(_Work(max(variants, key=_rate), mesh))
        return sorted(found, key=lambda work: -work.fastest.rate)

    def _best_of(
        self, mesh: Mesh, ac: Changes, offload: Offload, least: float
    ) -> Candidate | Loser | None:
        """Return the fastest settings on a mesh that fit, or what its leanest lack.

        None: none is faster than `least`.
        """
        variants = [one for one in self.variants(mesh, ac, offload) if one.rate > least]
        if not variants:
            return None
        nothing = self.lost(max(variants, key=_rate), mesh, ac, offload)
        return nothing or self.fastest(variants)


def _losers(
    base: Candidate, ranked: Sequence[Candidate], lost: Sequence[Loser], top: int
) -> Iterator[Loser]:
    """Yield the config itself, what would be faster and does not fit, and the best of other kinds
    of meshes.
    """
    winner = ranked[0]
    if base not in ranked[:top]:
        yield Loser(base, base.slower_than(winner))
    near: dict[str, Loser] = {}
    for loser in sorted(lost, key=lambda loser: loser.missing):
        if loser.missing and loser.candidate.rate > winner.rate:
            near.setdefault(loser.candidate.mode, loser)
    yield from near.values()
    slow = list(ranked[top:])
    slow += [loser.candidate for loser in lost if not loser.missing]
    # A kind that is ranked needs no loser: the base stands for it, and is left out.
    kinds = {candidate.dimensions: base for candidate in ranked[:top]}
    for candidate in sorted(slow, key=_order):
        if candidate is not base:
            kinds.setdefault(candidate.dimensions, candidate)
    for candidate in list(kinds.values())[:MOST_KINDS]:
        if candidate is not base:
            yield Loser(candidate, candidate.slower_than(winner))


class _Variant(LoadedConfig):
    """A config that is never a file, which saves half the time of its check."""

    def to_toml(self, defaults: bool = True) -> str:
        return ""


def _rate(candidate: Candidate) -> float:
    return candidate.rate


def _order(candidate: Candidate) -> tuple[float, int, int]:
    return candidate.order
