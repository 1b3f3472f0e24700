"""How float8 works here: products of linears are of numbers in float8, by torchao.

1. **Which linears** (`choices`): by name and size, before anything is built. The head stays in high
   precision, as do linears that the config names, small ones, and sizes that the units do not take.
2. **Conversion** (`convert`): on the meta device, each of them becomes torchao's `Float8Linear`.
   The weight keeps its name, shape and dtype, for checkpoints and the optimizer. A forward
   divides input and weight by a scale each, their largest absolute value over that of the format,
   rounds them to E4M3, and multiplies by `torch._scaled_mm`. The backward makes both gradients by
   such products. "tensorwise" has one scale a tensor, and the output's gradient in E5M2; "rowwise"
   has one scale for each row, and all in E4M3.
3. **Gathers in float8** (`enable_fsdp_float8_all_gather`): torchao wraps each weight. `fully_shard`
   asks the wrapper what to send, and gets the rank's rows rounded: a byte a parameter. All ranks
   need the scale of the whole weight, so each gather begins with an all-reduce of a maximum.
4. **Scales after the update** (`precompute_float8_dynamic_scale_for_fsdp`): weights change there
   alone, so one all-reduce finds all scales (`after_update`), and gathers send at once.

Tensor parallelism gathers inputs in float8, too (`tensor_parallel.py`). Beside it lie `checks.py`
(other keys, model, machine), `package.py` (torchao), `report.py`, `plan_memory.py` and
`plan_speed.py`.
MXFP8 is a subclass (`titanlite.features.mx`). The keys are `titanlite.config.sections.Float8`.
Files that need torch are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.config.loaded import LoadedConfig
    from titanlite.config.sections import Config
    from titanlite.models.linears import Linears
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.plan.rank_sizes import RankSizes
    from titanlite.plan.step_sizes import StepSizes
    from titanlite.run.config import RunConfig


class Float8Feature(Feature):
    """float8 in a run that has it on."""

    key = checks.ENABLE
    model_field = "linears"
    #: Each dimension of a product must be a multiple of this number.
    multiple = MULTIPLE

    def __init__(self, config: Config) -> None:
        self.section = config.float8

    def choices(self, linears: Linears) -> list[Float8Choice]:
        return choose_linears(linears, self.section, self.multiple)

    # The model: `titanlite.parallel.parallelize` calls these, each at its place

    def convert(self, builder: ModelBuilder, model: nn.Module) -> None:
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
        from titanlite.features.float8 import gathered, tensor_parallel

        gathers = self.section.enable_fsdp_float8_all_gather
        if gathers and not tensor_parallel.sends_float8(builder.mesh["dp_shard"]):
            gathered.gather_as_bytes(model)

    # The step: `titanlite.assembly` calls this

    def after_update(self, model: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
        """Return what finds the scales of new weights after each step."""
        from titanlite.features.float8.gathered import ScalePrecompute
        from titanlite.step import do_nothing

        if not self.section.precompute_float8_dynamic_scale_for_fsdp:
            return do_nothing
        return ScalePrecompute(model, mesh)

    # Before the ranks start, and on their machine

    def contradictions(self, config: LoadedConfig) -> Iterable[Problem]:
        return broken_rules(config, checks.NEEDS, checks.EXCLUDES)

    def model_problems(self, run: RunConfig, args: Any) -> Iterable[Problem]:
        return checks.problems(run, args, self.choices, self.multiple)

    def machine_problems(self, run: RunConfig, args: Any | None) -> Iterable[Problem]:
        return checks.machine_problems(self.section)

    # The start report

    def report_rows(self, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        from titanlite.features.float8.report import float8_rows

        choices = self.choices(builder.linears)
        return float8_rows(self.section, self.numbers, choices, builder)

    @property
    def numbers(self) -> str:
        emulated = ", emulated in float32 (slow, for tests)" if self.section.emulate else ""
        return f"{self.section.recipe_name}{emulated}"

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
