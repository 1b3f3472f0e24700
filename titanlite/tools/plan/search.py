"""`titanlite plan --search`: the fastest settings that fit, as files to lay over a config.

Model, optimizer, global batch and sequence length stay. The search varies how the ranks divide the
work, what is recomputed, the micro-batch, chunks of the loss, compilation, and how often gradients
are reduced; float8 only where the config has it or the user allows it, offload only where nothing
else fits. `titanlite.start.fit` decides what is valid, and the planner's formulas give
memory and speed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from msgspec.structs import replace as replace_fields

from titanlite.config.errors import ConfigError
from titanlite.config.keys import keys
from titanlite.config.load import read
from titanlite.config.loaded import LoadedConfig
from titanlite.config.rules import divisors
from titanlite.config.toml import quote
from titanlite.features.float8 import search as float8
from titanlite.plan.hardware import Cluster
from titanlite.plan.memory import with_vocabulary
from titanlite.plan.parts import GIB, needed_bytes
from titanlite.plan.plan import formula, host_memory
from titanlite.plan.speed import Speed, predict
from titanlite.start.derive import RunConfig
from titanlite.start.fit import check_loaded
from titanlite.utils import Style, Table, counted, render

#: Share of a GPU's memory that must stay free: the formulas are that good at best.
MARGIN = 0.05
#: A gain below this share is none: settings are compared by a model whose own error is larger.
LEAST_GAIN = 0.02
#: Models below so many parameters get no pipeline: FSDP serves them. Most ranks of one.
PIPELINE_PARAMETERS, MOST_STAGES = 20e9, 16
#: Most tokens of a micro-batch, and fewest of a sequence's part on a rank.
MOST_TOKENS, LEAST_TOKENS = 32768, 8192
#: Pieces of the loss where the whole does not fit.
CHUNKS = 8
#: Most combinations of dimensions that the report names.
MOST_KINDS = 8

Changes = dict[str, Any]

_TP, _EP = "training.tensor_parallel_degree", "parallelism.expert_parallel_degree"
_CP, _PP = "experimental.context_parallel_degree", "experimental.pipeline_parallel_degree"
_REPLICATE, _SHARD = (
    "training.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree",
)
_SCHEDULE = "experimental.pipeline_parallel_schedule"
_PIECES = "experimental.pipeline_parallel_microbatches"
_BATCH, _GLOBAL, _CHUNKS = (
    "training.batch_size",
    "training.global_batch_size",
    "training.loss_chunks",
)
_SYNC, _RESHARD, _COMPILE = (
    "training.gradient_sync",
    "training.reshard_after_forward",
    "training.compile",
)
_MODE, _OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
_AC_OFFLOAD, _CPU_OFFLOAD = "activation_checkpoint.offload", "training.enable_cpu_offload"

_FULL = {_MODE: "full"}
#: From what recomputes nothing to what keeps least.
AC_MODES: tuple[Changes, ...] = (
    {_MODE: "none"},
    *({_MODE: "selective", _OPTION: option} for option in ("4", "2", "op")),
    _FULL,
)
#: Keys that the columns of the table do not tell.
_SHOWN = {
    _SCHEDULE,
    _CHUNKS,
    _SYNC,
    _RESHARD,
    _COMPILE,
    _AC_OFFLOAD,
    _CPU_OFFLOAD,
    *float8.SHOWN,
}
#: Tried in turn until something fits.
_OFFLOADS: tuple[tuple[Changes, tuple[Changes, ...]], ...] = (
    ({_AC_OFFLOAD: False, _CPU_OFFLOAD: False}, AC_MODES),
    ({_AC_OFFLOAD: True, _CPU_OFFLOAD: False}, (_FULL,)),
    ({_AC_OFFLOAD: False, _CPU_OFFLOAD: True}, AC_MODES),
    ({_AC_OFFLOAD: True, _CPU_OFFLOAD: True}, (_FULL,)),
)


@dataclass(frozen=True)
class Candidate:
    """Settings of a run that are valid, with what the planner predicts of them."""

    #: Key → value, where it differs from the config, in the order of files.
    changes: Mapping[str, Any]
    run: RunConfig
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
    def degrees(self) -> str:
        """Dimensions of the mesh with several ranks, as the start report names them."""
        mesh = self.run.mesh
        sizes = {**mesh.dimensions, "ep": mesh.expert}
        return (
            " x ".join(f"{name} {degree}" for name, degree in sizes.items() if degree > 1)
            or "1 rank"
        )

    @property
    def mode(self) -> str:
        """What is recomputed."""
        ac = self.run.activation_checkpoint
        return (
            f"AC {ac.mode} {ac.selective_ac_option}" if ac.mode == "selective" else f"AC {ac.mode}"
        )

    @property
    def layout(self) -> str:
        """Both."""
        return f"{self.degrees}, {self.mode}"

    @property
    def micro_batch(self) -> int:
        """Sequences that a rank takes at a time."""
        return self.run.batch.micro_batch_size // self.run.pipeline.microbatches


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


class _Mesh(NamedTuple):
    """Degrees of parallelism."""

    changes: Changes
    #: Ranks that read different data, and tokens of a sequence on one rank.
    readers: int
    part: int
    is_pipeline: bool


class _Search:
    def __init__(self, argv: Sequence[str], cluster: Cluster, allow: Iterable[str]) -> None:
        self.cluster, self.found = cluster, dict[frozenset[tuple[str, Any]], Candidate | None]()
        config, run = check_loaded(*read(argv, defer=True), cluster.gpus, training=False)
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

    def candidate(self, changes: Changes) -> Candidate | None:
        """Return the config with changes; None: it is not valid."""
        given = {
            key: changes[key]
            for key in keys()
            if key in changes and changes[key] != self.config.value(key)
        }
        name = frozenset(given.items())
        if name not in self.found:
            try:
                run = check_loaded(
                    self.config.changed(given),
                    [],
                    self.cluster.gpus,
                    training=False,
                    look_at_text=False,
                )[1]
                self.found[name] = Candidate(given, run, predict(run, self.cluster))
            except ConfigError:
                self.found[name] = None
        return self.found[name]

    def weighed(self, candidate: Candidate) -> Candidate:
        """Return it with its memory."""
        memory = formula(candidate.run)
        host = sum(host_memory(candidate.run, self.cluster, memory).values())
        return replace(candidate, needed=needed_bytes(memory), host=host)

    def missing(self, candidate: Candidate) -> tuple[int, str]:
        """Return the bytes over the limit of the GPU or the host, at most 0 if it fits, and of
        which of both.
        """
        host = self.cluster.host
        over = (
            (candidate.needed - self.limit, ""),
            (candidate.host - host if host else -1, " of host memory"),
        )
        return max(over)

    def meshes(self) -> Iterator[_Mesh]:
        """Yield the config's own degrees of parallelism, then all powers of two that the ranks
        allow.
        """
        mesh, length, total = (
            self.run.mesh,
            self.run.batch.seq_len,
            self.run.batch.global_batch_size,
        )
        yield _Mesh({}, mesh.dp_degree, length // mesh.context, mesh.pipeline > 1)
        spec, args = self.run.spec, self.run.model_args()
        pipelines = (
            _powers(MOST_STAGES) if spec.count_parameters(args) >= PIPELINE_PARAMETERS else [1]
        )
        tensors, contexts = (
            _powers(self.cluster.gpus_per_node),
            _powers(max(length // LEAST_TOKENS, 1)),
        )
        experts = divisors(math.gcd(*spec.experts(args).values())) if spec.experts else [1]
        for pipeline, tensor, context, expert in itertools.product(
            pipelines, tensors, contexts, experts
        ):
            readers, rest = divmod(self.cluster.gpus, pipeline * tensor * context)
            if rest or total % readers:
                continue
            for replicate in [
                n for n in _powers(readers if pipeline == 1 else 1) if readers % n == 0
            ]:
                shard = readers // replicate
                if shard > 1 < replicate and shard * tensor * context < self.cluster.gpus_per_node:
                    # a machine with several copies sends more to the others than one with a single
                    # copy
                    continue
                degrees = {
                    _TP: tensor,
                    _CP: context,
                    _EP: expert,
                    _PP: pipeline,
                    _REPLICATE: replicate,
                    _SHARD: -1,
                }
                for schedule in ("1F1B", "Interleaved1F1B") if pipeline > 1 else ("1F1B",):
                    changes = {
                        **degrees,
                        _SCHEDULE: schedule,
                        "training.data_parallel_type": "fsdp",
                    }
                    yield _Mesh(changes, readers, length // context, pipeline > 1)

    def batches(self, mesh: _Mesh) -> Iterator[Changes]:
        """Yield the micro-batches, the smallest first; the global batch stays."""
        total = self.run.batch.global_batch_size
        share = total // mesh.readers
        for size in [n for n in _powers(max(MOST_TOKENS // mesh.part, 1)) if share % n == 0]:
            if mesh.is_pipeline:
                yield {_BATCH: share, _PIECES: share // size, _GLOBAL: total, _SYNC: "last"}
                continue
            for sync in ("every", "last") if size < share else ("last",):
                yield {_BATCH: size, _GLOBAL: total, _SYNC: sync}

    def variants(self, mesh: _Mesh, ac: Changes, extra: Changes) -> list[Candidate]:
        """Return the valid settings on a mesh with the loss in one piece, the leanest first."""
        reshards = ("default",) if mesh.is_pipeline else ("default", "never")
        product = itertools.product(self.batches(mesh), reshards, self.numerics)
        fixed = {**mesh.changes, **ac, **extra, _COMPILE: True}
        found = (
            self.candidate({**fixed, **batch, _RESHARD: reshard, **more})
            for batch, reshard, more in product
        )
        return [candidate for candidate in found if candidate]

    def in_chunks(self, candidate: Candidate) -> Candidate:
        """Return it with the loss in chunks; itself where the config has chunks, or they are not
        valid.
        """
        chunks = max(self.run.training.loss_chunks, CHUNKS)
        return self.candidate({**candidate.changes, _CHUNKS: chunks}) or candidate

    def lost(self, fastest: Candidate, mesh: _Mesh, ac: Changes, extra: Changes) -> Loser | None:
        """Return what the leanest settings with `ac` on a mesh lack; None: they fit, or none is
        valid.

        fastest: what does not fit for that.
        """
        if not (variants := self.variants(mesh, ac, extra)):
            return None
        leanest = self.weighed(self.in_chunks(variants[0]))
        missing, where = self.missing(leanest)
        least = (
            f"a micro-batch of {leanest.micro_batch} and loss_chunks = "
            f"{leanest.run.training.loss_chunks}"
        )
        if leanest.mode != fastest.mode:
            least = f"{leanest.mode}, {least}"
        reason = (
            f"does not fit: on this mesh even {least} need {missing / GIB:.1f} GiB{where} too much"
        )
        return Loser(fastest, reason, missing) if missing > 0 else None

    def fastest(self, variants: Sequence[Candidate]) -> Candidate | None:
        """Return the fastest settings that fit."""
        for whole in sorted(variants, key=_rate, reverse=True):
            if self.missing(in_chunks := self.weighed(self.in_chunks(whole)))[0] <= 0:
                weighed = self.weighed(whole)
                return weighed if self.missing(weighed)[0] <= 0 else in_chunks
        return None

    def attempt(
        self, extra: Changes, modes: Sequence[Changes], top: int
    ) -> tuple[list[Candidate], list[Loser]]:
        """Return what fits, best first, and what is left out: without a reason if it is slower at
        any rate.
        """
        found, lost = dict[str, Candidate](), list[Loser]()
        meshes = [
            (fast, mesh) for mesh in self.meshes() if (fast := self.variants(mesh, modes[0], extra))
        ]
        bounds = [(max(fast, key=_rate), mesh) for fast, mesh in meshes]
        for bound, mesh in sorted(bounds, key=lambda pair: -pair[0].rate):
            least = sorted(map(_rate, found.values()))[-top] if len(found) >= top else 0.0
            if bound.rate < least:
                lost.append(Loser(bound))
            elif nothing := self.lost(bound, mesh, modes[-1], extra):
                lost.append(nothing)
            else:
                for ac in modes:
                    variants = [one for one in self.variants(mesh, ac, extra) if one.rate > least]
                    if variants and (
                        nothing := self.lost(max(variants, key=_rate), mesh, ac, extra)
                    ):
                        lost.append(nothing)
                    elif variants and (best := self.fastest(variants)):
                        found[best.layout] = min(found.get(best.layout, best), best, key=_order)
        return sorted(found.values(), key=_order), lost


def search(
    argv: Sequence[str], cluster: Cluster, *, top: int = 5, allow: Iterable[str] = ()
) -> SearchResult:
    """Search the settings of a command line's config for a cluster.

    top: how many to rank. allow: "float8": also where the config has none.

    Raises ConfigError for a config that does not fit the ranks of the cluster, and for a model
    without formulas.
    """
    work = _Search(argv, cluster, allow)
    base = work.weighed(Candidate({}, work.run, predict(work.run, cluster)))
    ranked, lost = list[Candidate](), list[Loser]()
    for extra, modes in _OFFLOADS:
        if not ranked:
            ranked, lost = work.attempt(extra, modes, top)
    if fits(base, cluster):
        better = [other for other in ranked if other.rate > base.rate * (1 + LEAST_GAIN)]
        ranked = [
            *better,
            base,
            *(other for other in ranked if other not in better and other.changes),
        ]
    losers = list(_losers(base, ranked, lost, top)) if ranked else []
    return SearchResult(
        cluster, base, tuple(ranked[:top]), tuple(losers), sum(map(bool, work.found.values()))
    )


def fits(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether GPU and host have the memory, without a margin."""
    return candidate.needed <= cluster.gpu.memory and candidate.host <= (cluster.host or math.inf)


def _losers(
    base: Candidate, ranked: Sequence[Candidate], lost: Sequence[Loser], top: int
) -> Iterator[Loser]:
    """Yield the config itself, what would be faster and does not fit, and the best of other kinds
    of meshes.
    """
    winner = ranked[0]
    if base not in ranked[:top]:
        yield Loser(base, slower(base, winner))
    near: dict[str, Loser] = {}
    for loser in sorted(lost, key=lambda loser: loser.missing):
        if loser.missing and loser.candidate.rate > winner.rate:
            near.setdefault(loser.candidate.mode, loser)
    yield from near.values()
    kinds = dict.fromkeys(map(_kind, ranked[:top]), base)
    slow = [
        one
        for one in (*ranked[top:], *(loser.candidate for loser in lost if not loser.missing))
        if one is not base
    ]
    for candidate in sorted(slow, key=_order):
        kinds.setdefault(_kind(candidate), candidate)
    yield from (
        Loser(one, slower(one, winner))
        for one in list(kinds.values())[:MOST_KINDS]
        if one is not base
    )


def slower(loser: Candidate, winner: Candidate) -> str:
    """Return by how much settings are slower, and in which part of a step."""
    parts = {
        name: seconds - winner.speed.parts.get(name, 0.0)
        for name, seconds in loser.speed.parts.items()
    }
    name = max(parts, key=lambda name: parts[name])
    return f"{1 - loser.rate / winner.rate:.1%} slower: {parts[name]:+.2f} s of a step for {name}"


# What a user sees


def overlay(result: SearchResult, candidate: Candidate) -> str:
    """Return the changes of a candidate as a file to lay over the config."""
    cluster = result.cluster
    machines = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.key}"
    memory = f"{candidate.needed / GIB:.1f} of {cluster.gpu.memory / GIB:.1f} GiB"
    text = (
        f"# titanlite plan --search, {machines}: {candidate.rate:,.0f} tokens/s per GPU, "
        f"{memory}.\n"
    )
    for section, changes in itertools.groupby(
        candidate.changes.items(), key=lambda item: item[0].partition(".")[0]
    ):
        text += f"\n[{section}]\n" + "".join(
            f"{key.partition('.')[2]} = {quote(value)}\n" for key, value in changes
        )
    return text


def as_json(result: SearchResult) -> dict[str, Any]:
    """Return the result as JSON has it."""

    def shown(candidate: Candidate) -> dict[str, Any]:
        needed = candidate.needed / GIB if candidate.needed else None
        numbers = {
            "tokens_per_second": candidate.rate,
            "mfu": candidate.speed.mfu,
            "needed_gib": needed,
        }
        return {"layout": candidate.layout, "changes": dict(candidate.changes), **numbers}

    return {
        "config_is_best": result.config_is_best,
        "config": shown(result.base) | {"fits": fits(result.base, result.cluster)},
        "ranked": [
            shown(candidate) | {"overlay": overlay(result, candidate)}
            for candidate in result.ranked
        ],
        "losers": [shown(loser.candidate) | {"reason": loser.reason} for loser in result.losers],
        "tried": result.tried,
    }


def lines(result: SearchResult, style: Style) -> list[str]:
    """Return the ranked settings, the best as a file, and the reasons of the others."""
    found, base, cluster = result.ranked, result.base, result.cluster
    batch, over = base.run.batch, base.needed - cluster.gpu.memory
    head = (
        f"{result.tried:,} settings for {counted(batch.global_batch_size, 'sequences')} of "
        f"{batch.seq_len:,} tokens"
    )
    head += (
        f" a step, on {counted(cluster.nodes, 'machines')} with {cluster.gpus_per_node} "
        f"{cluster.gpu.key}"
    )
    if not found:
        return [
            head,
            "nothing fits, with offload neither: take more GPUs, or GPUs with more memory",
        ]
    rows = []
    for n, c in enumerate(found, 1):
        more = [
            f"{key.partition('.')[2]} = {quote(c.changes[key])}"
            for key in c.changes
            if key in _SHOWN
        ]
        numbers = f"{n}", f"{c.rate:,.0f}", f"{c.speed.mfu:.1%}", f"{c.needed / GIB:.1f}"
        rows.append((*numbers, c.layout, f"{c.micro_batch}", ", ".join(more) or "-"))
    columns = [
        "",
        "tokens/s per GPU",
        "MFU",
        "needed GiB",
        "layout",
        "micro-batch",
        "further changes",
    ]
    out = [head, "", render(Table(columns, rows, left=(4, 6)), style.color), ""]
    if result.config_is_best:
        out.append(
            f"the config is best as it is: nothing that fits is faster by {LEAST_GAIN:.0%} or more"
        )
    else:
        state = f", which does not fit by {over / GIB:.1f} GiB" if over > 0 else ""
        state = state or (
            "" if fits(base, cluster) else ", which needs more host memory than there is"
        )
        gain = f"{found[0].rate / base.rate - 1:+.1%} over the config as it is{state}"
        out += [
            f"{gain}, with this file laid over it:",
            "",
            *overlay(result, found[0]).splitlines(),
        ]
    out += ["", "left out:"] if result.losers else []
    for loser in result.losers:
        out.append(
            f"  {loser.candidate.rate:>6,.0f} tokens/s, {loser.candidate.layout}: {loser.reason}"
        )
    return out


class _Variant(LoadedConfig):
    """A config that nobody reads as a file, which saves half the time of its check."""

    def to_toml(self, defaults: bool = True) -> str:
        return ""


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4, … up to `most`."""
    return [2**n for n in range(most.bit_length())]


def _rate(candidate: Candidate) -> float:
    return candidate.rate


def _order(candidate: Candidate) -> tuple[float, int, int]:
    return candidate.order


def _kind(candidate: Candidate) -> str:
    """Return the dimensions of the mesh without their sizes."""
    return re.sub(r"\d+", "", candidate.degrees)
