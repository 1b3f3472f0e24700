"""Matrix products in MXFP8, through torchao: what differs from float8.

    checks.py    other keys, model     convert.py   the linears of a model
    package.py   torchao, and what it needs of the machine
    plan_memory.py   what its products keep and need

It is float8 with its own recipe: `float8.recipe_name = "mxfp8"` or "mxfp8_floor". The keys are
`titanlite.config.sections.Float8`. Files that need torch are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem, unfit
from titanlite.config.rules import broken_rules
from titanlite.features.float8 import Float8Feature
from titanlite.features.float8.choice import converted_names
from titanlite.features.mx import checks

if TYPE_CHECKING:
    from torch import nn

    from titanlite.config.loaded import LoadedConfig
    from titanlite.features.float8.choice import Float8Choice
    from titanlite.models.linears import Linears
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.plan.rank_sizes import RankSizes
    from titanlite.plan.step_sizes import StepSizes
    from titanlite.run.config import RunConfig


#: How the keys of GPUs with MX units begin (`titanlite.plan.hardware.GPUS`).
_GPUS = ("b200", "b300")


class MXFeature(Float8Feature):
    """MXFP8 in a run that has it on.

    Filters and the choice of linears are those of float8.
    """

    multiple = checks.BLOCK

    def choices(self, linears: Linears) -> list[Float8Choice]:
        return [checks.divided(choice, linears) for choice in super().choices(linears)]

    # Before the ranks start

    def contradictions(self, config: LoadedConfig) -> Iterable[Problem]:
        return broken_rules(config, excludes=checks.EXCLUDES)

    def model_problems(self, run: RunConfig, args: Any) -> Iterable[Problem]:
        yield from super().model_problems(run, args)
        yield from checks.high_precision(run)

    # On the machine

    def machine_problems(self, run: RunConfig, args: Any | None) -> Iterable[Problem]:
        from titanlite.features.mx.package import machine_problems

        return machine_problems(self.section)

    @property
    def numbers(self) -> str:
        recipe = self.section.recipe_name
        blocks = f"a scale for each {checks.BLOCK} numbers, rounded {checks.ROUNDED[recipe]}"
        if not self.section.emulate:
            return f"{recipe}, {blocks}"
        return f"{recipe}, {blocks}, emulated in the dtype of activations (slow, for tests)"

    # The model

    def convert(self, builder: ModelBuilder, model: nn.Module) -> None:
        from titanlite.features.mx.convert import apply_mx

        names = converted_names(self.choices(builder.linears))
        apply_mx(model, names, self.section.recipe_name, emulate=self.section.emulate)

    # The plan

    def plan_memory(self, sizes: RankSizes) -> None:
        from titanlite.features.float8.plan_memory import converted_kinds
        from titanlite.features.mx.plan_memory import MXMemory

        sizes.products = MXMemory(converted_kinds(self.choices(sizes.linears)))

    def plan_speed(self, step: StepSizes) -> None:
        """Count products as in bf16, for want of runs.

        Raises ConfigError for a GPU without MX units, unless it emulates them.
        """
        gpu = step.rates.gpu
        if not self.section.emulate and not gpu.key.startswith(_GPUS):
            hint = "take another recipe, or name another GPU"
            raise unfit(checks.RECIPE, f"{gpu.key} has no MXFP8", hint)
        note = "products in MXFP8 count as in bf16: their speed was never measured"
        step.products = replace(step.products, assumptions=(note,))
