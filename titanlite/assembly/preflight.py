"""Checks of a run against the machine, its torch and the model: errors of `parallel/` become
problems with their keys.

Importing this module needs no torch; the functions that need it import it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from titanlite.config.errors import Problem, refuse
from titanlite.dist import ParallelismError
from titanlite.resolve.model_rules import group_problems, tensor_problems
from titanlite.run.config import RunConfig


def check_machine(run: RunConfig) -> None:
    """Check that this machine has what the run needs, before any process group. Raises
    ConfigError.
    """
    refuse(machine_problems(run))


def machine_problems(run: RunConfig) -> list[Problem]:
    """Find what this machine lacks for a run, before the model is known."""
    return [*compile_problems(run), *feature_problems(run, None)]


def check_model(run: RunConfig, tokenizer_size: int) -> None:
    """Check that ranks can divide this model and vocabulary, and that this machine has its
    products.

    Needs no process group. Raises ConfigError.
    """
    args = run.model_args(tokenizer_size)
    refuse([problem for check in _OF_MODEL for problem in check(run, args)])


def feature_problems(run: RunConfig, args: Any | None) -> Iterator[Problem]:
    """Find what this machine lacks for features; `args` may be unknown yet."""
    for feature in run.features.on:
        yield from feature.machine_problems(run, args)


def compile_problems(run: RunConfig) -> Iterator[Problem]:
    """Find what `torch.compile` lacks here, or set the folder of compiled code."""
    if not run.training.compile:
        return
    from titanlite.parallel.compile import CACHE_VARIABLE, check_backend, use_cache_folder

    section = run.compile
    try:
        check_backend(section.backend)
    except (ParallelismError, ValueError) as error:
        hint = "training.compile = false trains without it"
        yield Problem("does-not-fit", "compile.backend", str(error), hint)
    if section.backend != "inductor":
        return
    try:
        use_cache_folder(section.cache_dir)
    except (ParallelismError, ValueError) as error:
        key = CACHE_VARIABLE if section.cache_dir is None else "compile.cache_dir"
        yield Problem("does-not-fit", key, str(error))


def mask_problems(run: RunConfig, args: Any) -> Iterator[Problem]:
    """Find whether the model's attention can stop at documents, if it shall."""
    if not run.data.mask_documents:
        return
    forward = run.spec.build_on_meta(args).forward
    if "doc_ids" not in inspect.signature(forward).parameters:
        message = f"is not supported by the model {run.spec.name}: its forward takes no doc_ids"
        hint = "set it to false, or add doc_ids to the model"
        yield Problem("does-not-fit", "data.mask_documents", message, hint)


def optimizer_problems(run: RunConfig, args: Any) -> Iterator[Problem]:
    """Find patterns of `[[optimizer.groups]]` that match no parameter's name."""
    if not run.optimizer.groups:
        return
    names = [name for name, _ in run.spec.build_on_meta(args).named_parameters()]
    yield from group_problems(run, names)


def fsdp_problems(run: RunConfig, args: Any) -> Iterator[Problem]:
    """Find what keeps `training.fsdp_units` from sharding the model in its groups."""
    policy = run.training.fsdp_units
    if policy in ("block", "root"):
        return
    from titanlite.parallel.fsdp_groups import choose_groups
    from titanlite.run.interactions import needs_whole_groups

    spec = run.spec
    model = spec.build_on_meta(args)
    try:
        groups = choose_groups(model, policy, spec.fsdp_groups(args))
    except ParallelismError as error:
        yield Problem("does-not-fit", "training.fsdp_units", str(error))
        return
    blocks = tuple(f"{name}." for name in spec.block_names(args))
    inside = [name for group in groups for name in group if name.startswith(blocks)]
    reasons = list(needs_whole_groups(run))
    if inside and reasons:
        message = f"makes {inside[0]} an FSDP group, but {' and '.join(reasons)}"
        hint = 'take groups of a block or more: fsdp_units = "block"'
        yield Problem("does-not-fit", "training.fsdp_units", message, hint)


#: The vocabulary, on which the first depends, may be known only since the tokenizer is read.
_OF_MODEL = (tensor_problems, feature_problems, mask_problems, optimizer_problems, fsdp_problems)
