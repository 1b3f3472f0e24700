"""The result of a search as a user sees it: text, and a file to lay over the config."""

from __future__ import annotations

import itertools
import textwrap

from titanlite.cli.plan.search import LEAST_GAIN, Candidate, SearchResult
from titanlite.cli.plan.settings import SHOWN
from titanlite.config.toml import quote
from titanlite.plan.hardware import Cluster
from titanlite.plan.parts import GIB
from titanlite.runs.text_tables import Style, Table, render

_COLUMNS = ("tokens/s per GPU", "MFU", "needed GiB", "layout", "micro-batch", "further changes")


def overlay(result: SearchResult, candidate: Candidate) -> str:
    """Return the changes of a candidate as a file to lay over the config."""
    cluster = result.cluster
    machines = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.key}"
    rate = f"{candidate.rate:,.0f} tokens/s per GPU"
    memory = f"{candidate.needed / GIB:.1f} of {cluster.gpu.memory / GIB:.1f} GiB"
    text = f"# titanlite plan --search, {machines}: {rate}, {memory}.\n"
    for section, names in itertools.groupby(candidate.changes, lambda key: key.split(".")[0]):
        text += f"\n[{section}]\n"
        for name in names:
            text += f"{name.split('.')[1]} = {quote(candidate.changes[name])}\n"
    return text


def fit_text(found: Candidate | None, cluster: Cluster) -> str:
    """Return the settings that make a run fit, as flags."""
    if found is None:
        return "no setting of this mesh makes it fit: try --search, more GPUs or more memory"
    flags = " ".join(f"--{key}={value}" for key, value in found.changes.items())
    memory = f"{found.needed / GIB:.1f} of {cluster.gpu.memory / GIB:.1f} GiB"
    return f"it fits with {flags}: {memory}, {found.rate:,.0f} tokens/s per GPU"


def search_text(result: SearchResult, style: Style) -> str:
    """Return the best settings as a file, with all ranked ones as comments."""
    if not result.ranked:
        return (
            "nothing fits: take more GPUs, GPUs with more memory, or search with "
            "--activation_checkpoint.offload or --training.enable_cpu_offload"
        )
    rows = []
    for candidate in result.ranked:
        changes = candidate.changes
        more = [f"{key.split('.')[1]} = {quote(changes[key])}" for key in changes if key in SHOWN]
        rows.append(
            (
                f"{candidate.rate:,.0f}",
                f"{candidate.speed.mfu:.1%}",
                f"{candidate.needed / GIB:.1f}",
                candidate.layout,
                f"{candidate.run.sequences_at_once}",
                ", ".join(more) or "-",
            )
        )
    table = render(Table(_COLUMNS, rows, left=(3, 5)), style.color)
    table = textwrap.indent(f"{table}\n\n{_otherwise(result, style)}", "# ")
    if result.cluster.note:
        table = f"# {result.cluster.note}\n{table}"
    if result.config_is_best:
        return f"{table}\n\n# the config is best as it is: nothing is faster by {LEAST_GAIN:.0%}"
    best = result.ranked[0]
    gain = f"{best.rate / result.base.rate - 1:+.1%} over the config as it is"
    if not result.base.fits(result.cluster):
        gain += ", which does not fit"
    return f"{table}\n\n# {gain}, with this file laid over it:\n\n{overlay(result, best)}"


def _otherwise(result: SearchResult, style: Style) -> str:
    rows = []
    best = result.ranked[0]
    for (name, key, value), other in result.otherwise.items():
        cells = ["-", "-", "not valid here"]
        if other:
            verdict = "" if other.fits(result.cluster) else "does not fit"
            gain = f"{other.rate:,.0f} ({other.rate / best.rate - 1:+.0%})"
            cells = [gain, f"{other.needed / GIB:.1f}", verdict]
        rows.append((name, f"{key.split('.')[1]} = {quote(value)}", *cells))
    columns = ("the first, but", "with", "tokens/s per GPU", "needed GiB", "")
    return render(Table(columns, rows, left=(0, 1, 4)), style.color)
