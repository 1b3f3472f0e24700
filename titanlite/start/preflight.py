"""Checks of a config against the machine, the model and torch: errors of `parallel/` become
problems with their keys.

Importing this module needs no torch; the functions that need it import it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from titanlite.config.data_sections import Data
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.model_sections import Optimizer
from titanlite.config.sections import Compile, Config, Training
from titanlite.features import features_of
from titanlite.features.interactions import needs_whole_groups
from titanlite.models.spec import ModelSpec
from titanlite.parallel import ParallelismError

# The machine


def check_machine(config: Config) -> None:
    """Check that this machine can compile and has what the features of a run need.

    Needs no process group. Raises ConfigError.
    """
    problems = machine_problems(config)
    if problems:
        raise ConfigError(problems)


def machine_problems(config: Config) -> list[Problem]:
    """Find what this machine lacks for a run."""
    return [*compile_problems(config.training, config.compile), *feature_problems(config)]


def feature_problems(config: Config, args: Any | None = None) -> list[Problem]:
    """Find what this machine lacks for the features of a run.

    args: the model's, to look at the model too.
    """
    problems: list[Problem] = []
    for feature in features_of(config).on:
        problems += feature.machine_problems(config, args)
    return problems


def compile_problems(
    training: Training, compile: Compile, device_type: str | None = None
) -> list[Problem]:
    """Find what this machine lacks for `torch.compile`, if it is on; else set the folder of
    compiled code.

    device_type: "cpu" or "cuda"; by default CUDA when this machine has it.
    """
    if not training.compile:
        return []
    from titanlite.parallel.compile import CACHE_VARIABLE, check_backend, use_cache_folder

    hint = "training.compile = false trains without it"
    problems = _problem(
        "compile.backend", hint, lambda: check_backend(compile.backend, device_type)
    )
    if compile.backend == "inductor":
        key = CACHE_VARIABLE if compile.cache_dir is None else "compile.cache_dir"
        problems += _problem(key, "", lambda: use_cache_folder(compile.cache_dir))
    return problems


def _problem(key: str, hint: str, check: Callable[[], object]) -> list[Problem]:
    try:
        check()
    except (ParallelismError, ValueError) as error:
        return [Problem("", key, str(error), hint)]
    return []


def async_tp_problems(tp: int) -> list[Problem]:
    """Find what keeps `tp` tensor-parallel ranks of this machine from async tensor parallelism."""
    import torch

    from titanlite.parallel.async_tp import check_async
    from titanlite.parallel.launch_env import this_rank

    if tp == 1:
        return []
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    hint = (
        "set it to false: tensor parallelism works without it, its traffic then waits for the "
        "products"
    )
    key = "experimental.enable_async_tensor_parallel"
    return _problem(key, hint, lambda: check_async(tp, device_type, this_rank().local_world_size))


# The model


def mask_problems(spec: ModelSpec, args: Any, data: Data) -> list[Problem]:
    """Find whether attention of the model can stop at documents, if it shall."""
    import inspect

    if (
        data.mask_documents
        and "doc_ids" not in inspect.signature(spec.build_on_meta(args).forward).parameters
    ):
        message = f"is not offered by the model {spec.name}: its forward takes no doc_ids"
        return [
            Problem(
                "", "data.mask_documents", message, "set it to false, or add doc_ids to the model"
            )
        ]
    return []


def optimizer_problems(spec: ModelSpec, args: Any, optimizer: Optimizer) -> list[Problem]:
    """Find patterns of `[[optimizer.groups]]` that are found in no parameter's name."""
    if not optimizer.groups:
        return []
    names = [name for name, _ in spec.build_on_meta(args).named_parameters()]
    problems = []
    for index, group in enumerate(optimizer.groups):
        key = f"optimizer.groups[{index}].pattern"
        if not any(re.search(group.pattern, name) for name in names):
            remedy = f"names are such as {', '.join(names[:2])}, {names[-1]}"
            problems.append(
                Problem("", key, f"{group.pattern!r} is found in no parameter's name", remedy)
            )
    return problems


def fsdp_problems(spec: ModelSpec, args: Any, config: Config) -> list[Problem]:
    """Find what keeps the model from being sharded in the groups of `training.fsdp_units`."""
    from titanlite.parallel.wrapping import choose_groups

    policy, min_params = config.training.fsdp_units, config.training.fsdp_min_params
    if policy in ("block", "root"):
        return []
    try:
        groups = choose_groups(spec.build_on_meta(args), policy, min_params, spec.fsdp_groups(args))
    except ParallelismError as error:
        key = "training.fsdp_min_params" if policy == "size" else "training.fsdp_units"
        return [Problem("", key, str(error))]
    blocks = tuple(f"{name}." for name in spec.block_names(args))
    within = next((name for group in groups for name in group if name.startswith(blocks)), None)
    reasons = list(needs_whole_groups(config))
    if within is None or not reasons:
        return []
    message = f"makes {within} an FSDP group, but {' and '.join(reasons)}"
    hint = 'take groups of a block or more: fsdp_units = "block", or a larger fsdp_min_params'
    return [Problem("", "training.fsdp_units", message, hint)]
