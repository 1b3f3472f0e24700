"""titanlite trains Llama-family language models with PyTorch FSDP2 from one TOML file.

    with DistEnv.open() as world:
        Trainer(build(load_config("debug_model.toml", world.size), world)).train()

The names below are public; docs/api.md explains them. `import titanlite` is quick: it loads
neither torch nor any room. A name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:  # for type checkers; the same names as below
    from titanlite.assembly.build import TrainingComponents as TrainingComponents
    from titanlite.assembly.build import build as build
    from titanlite.assembly.datasets import Datasets as Datasets
    from titanlite.assembly.datasets import read_datasets as read_datasets
    from titanlite.assembly.rank_checks import check_ranks as check_ranks
    from titanlite.callbacks import Callback as Callback
    from titanlite.callbacks import Figures as Figures
    from titanlite.callbacks import RunEnd as RunEnd
    from titanlite.checkpoint.loaded import LoadedState as LoadedState
    from titanlite.checkpoint.manager import Checkpointer as Checkpointer
    from titanlite.cli.sample import generate as generate
    from titanlite.config.model_sections import Optimizer as Optimizer
    from titanlite.config.sections import ActivationCheckpoint as ActivationCheckpoint
    from titanlite.config.sections import Checkpoint as Checkpoint
    from titanlite.data.loader import Batch as Batch
    from titanlite.data.loader import to_device as to_device
    from titanlite.dist.dist_env import DistEnv as DistEnv
    from titanlite.dist.signals import StopSignal as StopSignal
    from titanlite.features.context.gathered_attention import apply_cp as apply_cp
    from titanlite.features.float8.convert import apply_float8 as apply_float8
    from titanlite.models.spec import Cost as Cost
    from titanlite.models.spec import Init as Init
    from titanlite.models.spec import ModelSpec as ModelSpec
    from titanlite.models.spec import Size as Size
    from titanlite.optim.adamw import AnyPrecisionAdamW as AnyPrecisionAdamW
    from titanlite.optim.bad_step_errors import BadStepError as BadStepError
    from titanlite.optim.guard import FiniteGuard as FiniteGuard
    from titanlite.parallel.activation_checkpoint import apply_ac as apply_ac
    from titanlite.parallel.compile import apply_compile as apply_compile
    from titanlite.parallel.fsdp import apply_fsdp as apply_fsdp
    from titanlite.parallel.fsdp_groups import groups_by_class as groups_by_class
    from titanlite.parallel.tensor import apply_tp as apply_tp
    from titanlite.resolve.load import load_config as load_config
    from titanlite.run.config import RunConfig as RunConfig
    from titanlite.step import PlainRunner as PlainRunner
    from titanlite.step import ReplicationFactors as ReplicationFactors
    from titanlite.step import StepResult as StepResult
    from titanlite.step import TrainStep as TrainStep
    from titanlite.trainer import Trainer as Trainer
    from titanlite.validation import validate as validate

#: Module → its public names.
_PUBLIC = {
    "assembly.build": ["TrainingComponents", "build"],
    "callbacks": ["Callback", "Figures", "RunEnd"],
    "checkpoint.loaded": ["LoadedState"],
    "checkpoint.manager": ["Checkpointer"],
    "cli.sample": ["generate"],
    "config.model_sections": ["Optimizer"],
    "config.sections": ["ActivationCheckpoint", "Checkpoint"],
    "data.loader": ["Batch", "to_device"],
    "features.context.gathered_attention": ["apply_cp"],
    "features.float8.convert": ["apply_float8"],
    "run.config": ["RunConfig"],
    "resolve.load": ["load_config"],
    "optim.guard": ["FiniteGuard"],
    "optim.bad_step_errors": ["BadStepError"],
    "models.spec": ["Cost", "Init", "ModelSpec", "Size"],
    "optim.adamw": ["AnyPrecisionAdamW"],
    "parallel.activation_checkpoint": ["apply_ac"],
    "parallel.compile": ["apply_compile"],
    "dist.dist_env": ["DistEnv"],
    "parallel.fsdp": ["apply_fsdp"],
    "parallel.tensor": ["apply_tp"],
    "parallel.fsdp_groups": ["groups_by_class"],
    "assembly.rank_checks": ["check_ranks"],
    "assembly.datasets": ["Datasets", "read_datasets"],
    "dist.signals": ["StopSignal"],
    "step": ["PlainRunner", "ReplicationFactors", "StepResult", "TrainStep"],
    "trainer": ["Trainer"],
    "validation": ["validate"],
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'titanlite' has no attribute {name!r}")
    return getattr(importlib.import_module(f"titanlite.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
