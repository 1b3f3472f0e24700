"""Maximal update parametrization (muP; Yang et al. 2022, arXiv:2203.03466): initial
weights and rates of a narrow base model for a wide one.

    base.py      the base model       rules.py   what each parameter has beside it
    checks.py    other keys, model

The keys are `titanlite.config.sections.Mup`. No torch here: muP changes initial values, rates and
epsilons, and no forward pass. `titanlite mup check` compares activations over widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.config.rules import broken_rules
from titanlite.features.mup import checks
from titanlite.features.mup.base import base_args
from titanlite.features.mup.rules import Rules
from titanlite.run.features import Feature, Row

if TYPE_CHECKING:
    from torch import nn

    from titanlite.config.loaded import LoadedConfig
    from titanlite.config.sections import Config
    from titanlite.models.spec import ModelSpec
    from titanlite.optim.groups import Scales
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.run.config import RunConfig
    from titanlite.run.features import InitRule


class MupFeature(Feature):
    """Initial weights and rates, scaled from those of a base model."""

    key = checks.KEY

    def __init__(self, config: Config) -> None:
        self.section = config.mup

    # Before the ranks start

    def contradictions(self, config: LoadedConfig) -> Iterator[Problem]:
        optimizer = config.sections.optimizer
        yield from broken_rules(config, excludes=checks.EXCLUDES)
        yield from checks.adam_decays(optimizer.name, optimizer.weight_decay)

    def model_problems(self, run: RunConfig, args: Any) -> Iterable[Problem]:
        return checks.problems(run, args)

    # Initial weights

    def rules(self, spec: ModelSpec, args: Any) -> Rules:
        return Rules(spec, args, base_args(args, self.section.base_dim, self.section.base))

    def init_rule(self, rule: InitRule, spec: ModelSpec, args: Any) -> InitRule:
        return self.rules(spec, args).init

    # The optimizer: `titanlite.assembly.model` calls it

    def scales(self, spec: ModelSpec, args: Any) -> Scales:
        return scales_of(self.rules(spec, args))

    # The start report

    def report_rows(self, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        yield "mup", summary(self.rules(builder.spec, builder.args))


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


def scales_of(rules: Rules) -> Scales:
    """Return the scale of each parameter's rate and epsilon."""
    from titanlite.optim.groups import Scale

    def scale(name: str, is_muon: bool) -> Scale:
        factors = rules.factors(name, is_muon)
        # Muon has no epsilon.
        return Scale(factors.rate, 1.0 if is_muon else factors.eps)

    return scale
