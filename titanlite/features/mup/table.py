"""The rules of muP in numbers. No torch here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from titanlite.features.mup.rules import Factors, Rules
from titanlite.models.linears import kind_of
from titanlite.models.spec import Init, ShapeError

if TYPE_CHECKING:
    from titanlite.config.model_sections import Optimizer
    from titanlite.config.sections import Config

_HEADINGS = ("weight", "size", "base model", "initial", "rate", "decay", "eps")


def summary(rules: Rules) -> str:
    """Return what muP does to a model, in one line of the start report."""
    rates = sorted({rules.factors(name).rate for name in rules.names()})
    if rates == [1.0]:
        return f"the base model itself, dim {rules.base.dim}"
    depth = ""
    if rules.args.n_layers != rules.base.n_layers:
        depth = f", {rules.base.n_layers} blocks"
    shown = ", ".join(f"{rate:.4g}" for rate in rates)
    return f"from a base model of dim {rules.base.dim}{depth}: rates of AdamW times {shown}"


def explain(config: Config) -> list[str]:
    """Return the table for a config with muP, or a line that says why there is none."""
    from titanlite.features.mup.base import base_args
    from titanlite.models.args import model_args
    from titanlite.models.families import get_spec
    from titanlite.models.llama import LlamaArgs

    try:
        args = model_args(config.model, config.training.seq_len)
        if not isinstance(args, LlamaArgs):
            return [f"no rules for the matrices of model.name = {config.model.name!r}"]
        base = base_args(args, config.mup.base_dim, config.mup.base)
    except ShapeError as error:
        return [f"no table: {error}"]
    rules = Rules(get_spec(config.model.name), args, base)
    return lines(rules, config.optimizer)


def lines(rules: Rules, optimizer: Optimizer) -> list[str]:
    """Return a line for each kind of weight, and what the numbers are."""
    rows = [_HEADINGS, *_rows(rules, optimizer)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        table.append("  ".join(cells).rstrip())
    decays = "decay times rate stays" if optimizer.weight_decay else "there is no weight decay"
    return [
        *table,
        f"initial: standard deviation, or value, in the first block that has the weight; {decays}.",
    ]


def _rows(rules: Rules, optimizer: Optimizer) -> list[tuple[str, ...]]:
    firsts: dict[str, str] = {}
    for name in rules.names():
        firsts.setdefault(kind_of(name), name)
    return [_row(rules, optimizer, name) for name in firsts.values()]


def _row(rules: Rules, optimizer: Optimizer, name: str) -> tuple[str, ...]:
    is_muon = optimizer.name == "Muon" and _is_matrix_in_block(rules, name)
    factors = rules.factors(name, is_muon)
    shown_eps = "" if is_muon else _number(optimizer.eps * factors.eps)
    return (
        kind_of(name).removesuffix(".weight"),
        _size(rules, name),
        _size(replace(rules, args=replace(rules.base, n_layers=rules.args.n_layers)), name),
        _initial(rules.init(name), factors),
        _number(optimizer.lr * factors.rate) + _times(factors.rate),
        _number(optimizer.weight_decay / factors.rate),
        shown_eps,
    )


def _is_matrix_in_block(rules: Rules, name: str) -> bool:
    return name.startswith("layers.") and rules.size(name).in_features > 1


def _size(rules: Rules, name: str) -> str:
    size = rules.size(name)
    if name == "tok_embeddings.weight":
        return f"vocab x {size.out_features}"
    if name == "output.weight":
        return f"{size.in_features} x vocab"
    if size.in_features == 1:
        return str(size.out_features)
    return f"{size.in_features} x {size.out_features}"


def _initial(rule: Init, factors: Factors) -> str:
    fixed = {"ones": 1.0, "zeros": 0.0, "constant": rule.value}
    value = fixed.get(rule.kind, rule.std)
    return _number(value) + _times(factors.init)


def _times(factor: float) -> str:
    return "" if factor == 1 else f" (x {factor:.4g})"


def _number(value: float) -> str:
    return f"{value:.4g}"
