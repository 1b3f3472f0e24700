"""The result of a search as a user sees it: text, JSON, a file to lay over the config."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from titanlite.cli.plan.candidates import Candidate, SearchResult
from titanlite.cli.plan.search import LEAST_GAIN
from titanlite.cli.plan.settings import SHOWN
from titanlite.config.toml import quote
from titanlite.plan.parts import GIB
from titanlite.utils import Style, Table, counted, render

_COLUMNS = (
    "",
    "tokens/s per GPU",
    "MFU",
    "needed GiB",
    "layout",
    "micro-batch",
    "further changes",
)


def overlay(result: SearchResult, candidate: Candidate) -> str:
    """Return the changes of a candidate as a file to lay over the config."""
    cluster = result.cluster
    machines = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.key}"
    rate = f"{candidate.rate:,.0f} tokens/s per GPU"
    memory = f"{candidate.needed / GIB:.1f} of {cluster.gpu.memory / GIB:.1f} GiB"
    text = f"# titanlite plan --search, {machines}: {rate}, {memory}.\n"
    for section, names in itertools.groupby(candidate.changes, key=_section):
        text += f"\n[{section}]\n"
        for name in names:
            text += f"{_field(name)} = {quote(candidate.changes[name])}\n"
    return text


def _section(key: str) -> str:
    return key.partition(".")[0]


def _field(key: str) -> str:
    return key.partition(".")[2]


def as_json(result: SearchResult) -> dict[str, Any]:
    """Return the result as JSON has it."""
    config = _shown(result.base)
    config["fits"] = result.base.fits(result.cluster)
    ranked = []
    for candidate in result.ranked:
        ranked.append({**_shown(candidate), "overlay": overlay(result, candidate)})
    losers = []
    for loser in result.losers:
        losers.append({**_shown(loser.candidate), "reason": loser.reason})
    return {
        "config_is_best": result.config_is_best,
        "config": config,
        "ranked": ranked,
        "losers": losers,
        "tried": result.tried,
    }


def _shown(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": candidate.layout,
        "changes": dict(candidate.changes),
        "tokens_per_second": candidate.rate,
        "mfu": candidate.speed.mfu,
        "needed_gib": candidate.needed / GIB if candidate.needed else None,
    }


def lines(result: SearchResult, style: Style) -> list[str]:
    """Return the ranked settings, the best as a file, and the reasons of the others."""
    head = _head(result)
    if not result.ranked:
        return [
            head,
            "nothing fits, with offload neither: take more GPUs, or GPUs with more memory",
        ]
    out = [head, "", _table(result.ranked, style), ""]
    if result.config_is_best:
        out.append(
            f"the config is best as it is: nothing that fits is faster by {LEAST_GAIN:.0%} or more"
        )
    else:
        best = result.ranked[0]
        gain = f"{best.rate / result.base.rate - 1:+.1%} over the config as it is{_misfit(result)}"
        out += [f"{gain}, with this file laid over it:", ""]
        out += overlay(result, best).splitlines()
    if result.losers:
        out += ["", "left out:"]
    for loser in result.losers:
        candidate = loser.candidate
        out.append(f"  {candidate.rate:>6,.0f} tokens/s, {candidate.layout}: {loser.reason}")
    return out


def _head(result: SearchResult) -> str:
    cluster = result.cluster
    batch = result.base.run.batch
    sequences = counted(batch.global_batch_size, "sequences")
    machines = counted(cluster.nodes, "machines")
    head = (
        f"{result.tried:,} settings for {sequences} of {batch.seq_len:,} tokens a step, "
        f"on {machines} with {cluster.gpus_per_node} {cluster.gpu.key}"
    )
    phases = len(result.base.run.legs)
    if phases == 1:
        return head
    return f"{head}; speeds are means over all {phases} phases, MFU is that of the longest"


def _table(ranked: Sequence[Candidate], style: Style) -> str:
    rows = []
    for number, candidate in enumerate(ranked, 1):
        changes = candidate.changes
        more = [f"{_field(key)} = {quote(changes[key])}" for key in changes if key in SHOWN]
        rows.append(
            (
                f"{number}",
                f"{candidate.rate:,.0f}",
                f"{candidate.speed.mfu:.1%}",
                f"{candidate.needed / GIB:.1f}",
                candidate.layout,
                f"{candidate.micro_batch}",
                ", ".join(more) or "-",
            )
        )
    return render(Table(_COLUMNS, rows, left=(4, 6)), style.color)


def _misfit(result: SearchResult) -> str:
    """Return what the config lacks as it is; empty if it fits."""
    over = result.base.needed - result.cluster.gpu.memory
    if over > 0:
        return f", which does not fit by {over / GIB:.1f} GiB"
    if not result.base.fits(result.cluster):
        return ", which needs more host memory than there is"
    return ""
