"""Low-rank adapters beside frozen weights (LoRA, Hu et al. 2021, arXiv:2106.09685).

    settings.py  which linears, by what factor           checks.py   other keys, model, ranks
    modules.py   the linears of a model
    base.py      the frozen weights of a run, by hash    digests.py  those hashes
    source.py    adapters and their base as one model    peft.py     PEFT's files
    plan_memory.py  what its products keep and need

The keys are `titanlite.config.sections.Lora`. Files that need torch are imported where they are
used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from titanlite.config.errors import Problem
from titanlite.config.rules import broken_rules
from titanlite.features.lora import checks
from titanlite.features.lora.settings import Adapters, adapters_of
from titanlite.run.features import Feature, Row
from titanlite.utils import counted, human_count

if TYPE_CHECKING:
    from torch import nn

    from titanlite.config.loaded import LoadedConfig
    from titanlite.config.sections import Checkpoint, Config
    from titanlite.dist.dist_env import DistEnv
    from titanlite.features.lora.base import FrozenBase
    from titanlite.models.spec import Init, ModelSpec
    from titanlite.parallel.parallelize import ModelBuilder
    from titanlite.plan.rank_sizes import RankSizes
    from titanlite.plan.step_sizes import StepSizes
    from titanlite.run.config import RunConfig
    from titanlite.run.features import InitRule


class LoraFeature(Feature):
    """Adapters in a run that trains them."""

    key = checks.RANK
    model_field = "linears"
    #: Names the adapters that a new run starts from.
    source_key = "lora.adapter"

    def __init__(self, config: Config) -> None:
        self.section = config.lora

    def adapters(self, spec: ModelSpec, args: Any) -> Adapters:
        return adapters_of(self.section, spec, args)

    # Before the ranks start

    def contradictions(self, config: LoadedConfig) -> Iterable[Problem]:
        return broken_rules(config, checks.NEEDS, checks.EXCLUDES)

    def model_problems(self, run: RunConfig, args: Any) -> Iterable[Problem]:
        return checks.problems(run, args)

    # The model: `titanlite.parallel.parallelize` calls these, each at its place

    def convert(self, builder: ModelBuilder, model: nn.Module) -> None:
        from titanlite.features.lora.modules import add_adapters
        from titanlite.parallel.fsdp import DTYPES

        adapters = self.adapters(builder.spec, builder.args)
        # Products take weights that are not trained in no larger dtype.
        dtypes = (DTYPES[builder.run.training.dtype], builder.param_dtype)
        frozen = min(dtypes, key=lambda dtype: dtype.itemsize)
        add_adapters(model, adapters, self.section.dropout, frozen)

    def distribute(self, builder: ModelBuilder, model: nn.Module) -> None:
        from titanlite.features.lora.modules import freeze

        freeze(model)

    def after_sharding(self, builder: ModelBuilder, model: nn.Module) -> None:
        from titanlite.features.lora.modules import skip_unused_gathers

        skip_unused_gathers(model)

    def init_rule(self, rule: InitRule, spec: ModelSpec, args: Any) -> InitRule:
        adapters = self.adapters(spec, args)

        def with_adapters(name: str) -> Init:
            return adapters.init_rule(name) or rule(name)

        return with_adapters

    # Checkpoints: `titanlite.assembly.saves` and `titanlite eval` call these

    def base(
        self,
        run: RunConfig,
        world: DistEnv,
        args: Any,
        fingerprints: dict[str, str],
        about: dict[str, Any],
    ) -> FrozenBase:
        from titanlite.features.lora.base import FrozenBase

        adapters = self.adapters(run.spec, args)
        return FrozenBase(run.checkpoint, world, adapters, fingerprints, about)

    def checkpoint(self, section: Checkpoint) -> Checkpoint:
        # `initial_load_path` names the frozen weights.
        return replace(section, initial_load_path=self.section.adapter, initial_load_in_hf=False)

    # The start report

    def report_rows(self, builder: ModelBuilder, model: nn.Module) -> Iterable[Row]:
        adapters = self.adapters(builder.spec, builder.args)
        trained = adapters.parameters
        base = builder.spec.build_on_meta(builder.args)
        total = sum(parameter.numel() for parameter in base.parameters()) + trained
        share = f"{human_count(trained)} of {human_count(total)} parameters ({trained / total:.2%})"
        dropout = f", dropout {self.section.dropout:g}" if self.section.dropout else ""
        text = (
            f"rank {adapters.rank}, times {adapters.scale:g}{dropout}, beside "
            f"{counted(len(adapters.sizes), 'linears')} ({', '.join(adapters.kinds)}): {share} are "
            "trained"
        )
        yield "lora", text

    # The plan

    def plan_memory(self, sizes: RankSizes) -> None:
        from titanlite.features.lora.plan_memory import LoraMemory

        adapters = self.adapters(sizes.run.spec, sizes.args)
        sizes.products = LoraMemory(adapters, self.section.dropout > 0)

    def plan_speed(self, step: StepSizes) -> None:
        note = "the time is that of training all weights: frozen ones need no gradients"
        step.products = replace_fields(step.products, assumptions=(note,))
