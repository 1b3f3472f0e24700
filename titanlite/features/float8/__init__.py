"""Matrix products in float8, through torchao: what titanlite knows of them, moment by moment.

    choice.py    which linears, and why not the others    checks.py   other keys, model, machine
    convert.py   the linears of a model                   tensor.py   … shared by ranks
    gathered.py  weights that FSDP gathers in float8      exact.py    … in high precision again
    error.py     the error in the loss, a callback        report.py   rows of the start report
    package.py   torchao                                  search.py   settings that the plan tries
    plan_memory.py, plan_speed.py   what its products keep, need and cost

The keys are `titanlite.config.sections.Float8`. Files that need torch are imported where they are
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.config.rules import broken_rules
from titanlite.features.float8 import checks
from titanlite.features.float8.choice import (
    MULTIPLE,
    Float8Choice,
    choose_linears,
    converted_names,
)
from titanlite.run.features import Feature, Row

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.config.loaded import LoadedConfig
    from titanlite.config.sections import Config
    from titanlite.features.float8.error import Float8ErrorCheck
    from titanlite.models.linears import Linears
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.plan.rank_sizes import RankSizes
    from titanlite.plan.step_sizes import StepSizes
    from titanlite.run.config import RunConfig


class Float8Feature(Feature):
    """float8 in a run that has it on."""

    key = checks.ENABLE
    model_field = "linears"
    #: Of which each dimension of a product must be a multiple.
    multiple = MULTIPLE

    def __init__(self, config: Config) -> None:
        self.section = config.float8

    def choices(self, linears: Linears) -> list[Float8Choice]:
        """Decide for each kind of linear of the whole model."""
        return choose_linears(linears, self.section, self.multiple)

    # Before the ranks start

    def contradictions(self, config: LoadedConfig) -> Iterable[Problem]:
        return broken_rules(config, checks.NEEDS, checks.EXCLUDES)

    def model_problems(self, run: RunConfig, args: Any) -> Iterable[Problem]:
        return checks.problems(run, args, self.choices, self.multiple)

    def warnings(self, run: RunConfig) -> Iterable[str]:
        return checks.wide_filters(run)

    # On the machine

    def machine_problems(self, run: RunConfig, args: Any | None) -> Iterable[Problem]:
        return checks.machine_problems(self.section)

    def report_rows(self, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        from titanlite.features.float8.report import float8_rows

        choices = self.choices(builder.linears)
        return float8_rows(self.section, self.numbers, choices, builder)

    @property
    def numbers(self) -> str:
        """The format of the rounded numbers, in words."""
        emulated = ", emulated in float32 (slow, for tests)" if self.section.emulate else ""
        return f"{self.section.recipe_name}{emulated}"

    # The model: `titanlite.parallel.parallelize` calls these, each at its place

    def convert(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Convert linears, and give inductor the settings for blocks with them."""
        from titanlite.features.float8.convert import COMPILE_OPTIONS, apply_float8

        if builder.run.compile.backend == "inductor":
            options = COMPILE_OPTIONS.get(self.section.recipe_name.partition("_")[0], {})
            builder.compile_options.update(options)
        names = converted_names(self.choices(builder.linears))
        if names:
            apply_float8(
                model,
                names,
                self.section.recipe_name,
                all_gather=self.section.enable_fsdp_float8_all_gather,
                emulate=self.section.emulate,
            )

    def after_sharding(self, builder: ModelBuilder, model: nn.Module) -> None:
        """Let FSDP send float8 weights over a backend that does not know them."""
        from titanlite.features.float8 import gathered, tensor

        gathers = self.section.enable_fsdp_float8_all_gather
        if gathers and not tensor.sends_float8(builder.mesh["dp_shard"]):
            gathered.gather_as_bytes(model)

    # The plan

    def plan_memory(self, sizes: RankSizes) -> None:
        from titanlite.features.float8.plan_memory import Float8Memory, converted_kinds

        names = converted_kinds(self.choices(sizes.linears))
        sizes.products = Float8Memory(names, self.section.enable_fsdp_float8_all_gather)

    def plan_speed(self, step: StepSizes) -> None:
        """Raises ConfigError for a GPU without float8."""
        from titanlite.features.float8.plan_speed import float8_speed

        if not self.section.emulate:
            step.products = float8_speed(self.section, step)

    # The step: `titanlite.assembly` calls these

    def after_update(self, model: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
        """Return what a step calls when the weights are new."""
        from titanlite.features.float8.gathered import ScalePrecompute
        from titanlite.step import do_nothing

        if not self.section.precompute_float8_dynamic_scale_for_fsdp:
            return do_nothing
        return ScalePrecompute(model, mesh)

    def drift_check(
        self, dtype: torch.dtype, write: Callable[[int, Mapping[str, float]], None]
    ) -> Float8ErrorCheck | None:
        """Return the callback that measures the error in the loss; None: it is off.

        dtype: of activations. write: takes a step and a row for metrics.jsonl.
        """
        from titanlite.features.float8.error import Float8ErrorCheck

        if not self.section.drift_check:
            return None
        return Float8ErrorCheck(self.section.drift_check, dtype, write)
