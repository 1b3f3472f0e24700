"""Checks of a run against the machine, its torch and the model: errors of `parallel/` become
problems with their keys.

Importing this module needs no torch; the functions that need it import it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from titanlite.config.data_sections import Data
from titanlite.config.errors import Problem, refuse
from titanlite.config.model_sections import Optimizer
from titanlite.config.sections import Compile, Config, Training
from titanlite.dist import ParallelismError
from titanlite.models.spec import ModelSpec
from titanlite.resolve.model_rules import tensor_problems
from titanlite.run.config import RunConfig
from titanlite.run.interactions import needs_whole_groups


def check_machine(run: RunConfig) -> None:
    """Check that this machine can compile and has what the features of a run need.

    Needs no process group. Raises ConfigError.
    """
    refuse(machine_problems(run))


def check_model(run: RunConfig, tokenizer_size: int) -> None:
    """Check that ranks can divide this model and vocabulary, and that this machine has its
    products.

    tokenizer_size: entries of the tokenizer. Needs no process group. Raises ConfigError.
    """
    args = run.model_args(tokenizer_size)
    # Its vocabulary may be known only since the tokenizer is read.
    problems = list(tensor_problems(run, args))
    for feature in run.features.on:
        problems += feature.machine_problems(run, args)
    problems += mask_problems(run.spec, args, run.data)
    problems += optimizer_problems(run.spec, args, run.optimizer)
    problems += fsdp_problems(run.spec, args, run)
    refuse(problems)


# The machine


def machine_problems(run: RunConfig) -> list[Problem]:
    """Find what this machine lacks for a run, before the model is known."""
    problems = compile_problems(run.training, run.compile)
    for feature in run.features.on:
        problems += feature.machine_problems(run, None)
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

    def look() -> None:
        check_backend(compile.backend, device_type)

    def make_folder() -> None:
        use_cache_folder(compile.cache_dir)

    problems = _tried("compile.backend", look, "training.compile = false trains without it")
    if compile.backend == "inductor":
        key = CACHE_VARIABLE if compile.cache_dir is None else "compile.cache_dir"
        problems += _tried(key, make_folder)
    return problems


def _tried(key: str, check: Callable[[], None], hint: str = "") -> list[Problem]:
    """Return the error of a check as a problem of a key."""
    try:
        check()
    except (ParallelismError, ValueError) as error:
        return [Problem("does-not-fit", key, str(error), hint)]
    return []


# The model


def mask_problems(spec: ModelSpec, args: Any, data: Data) -> Iterator[Problem]:
    """Find whether attention of the model can stop at documents, if it shall."""
    if not data.mask_documents:
        return
    forward = spec.build_on_meta(args).forward
    if "doc_ids" not in inspect.signature(forward).parameters:
        message = f"is not supported by the model {spec.name}: its forward takes no doc_ids"
        hint = "set it to false, or add doc_ids to the model"
        yield Problem("does-not-fit", "data.mask_documents", message, hint)


def optimizer_problems(spec: ModelSpec, args: Any, optimizer: Optimizer) -> Iterator[Problem]:
    """Find patterns of `[[optimizer.groups]]` that are found in no parameter's name."""
    if not optimizer.groups:
        return
    names = [name for name, _ in spec.build_on_meta(args).named_parameters()]
    for index, group in enumerate(optimizer.groups):
        if any(re.search(group.pattern, name) for name in names):
            continue
        message = f"{group.pattern!r} is found in no parameter's name"
        hint = f"names are such as {', '.join(names[:2])}, {names[-1]}"
        yield Problem("does-not-fit", f"optimizer.groups[{index}].pattern", message, hint)


def fsdp_problems(spec: ModelSpec, args: Any, d: Config) -> Iterator[Problem]:
    """Find what keeps the model from being sharded in the groups of `training.fsdp_units`."""
    policy = d.training.fsdp_units
    if policy in ("block", "root"):
        return
    from titanlite.parallel.wrapping import choose_groups

    model = spec.build_on_meta(args)
    try:
        groups = choose_groups(model, policy, d.training.fsdp_min_params, spec.fsdp_groups(args))
    except ParallelismError as error:
        key = "training.fsdp_min_params" if policy == "size" else "training.fsdp_units"
        yield Problem("does-not-fit", key, str(error))
        return
    blocks = tuple(f"{name}." for name in spec.block_names(args))
    inside = [name for group in groups for name in group if name.startswith(blocks)]
    reasons = list(needs_whole_groups(d))
    if inside and reasons:
        message = f"makes {inside[0]} an FSDP group, but {' and '.join(reasons)}"
        hint = 'take groups of a block or more: fsdp_units = "block", or a larger fsdp_min_params'
        yield Problem("does-not-fit", "training.fsdp_units", message, hint)
