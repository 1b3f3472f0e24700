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
from titanlite.config.sections import ActivationCheckpoint, Compile, Float8, Training
from titanlite.models.spec import ModelSpec
from titanlite.parallel import ParallelismError

ENABLE_FLOAT8, FILTERS = "float8.enable_float8_linear", "float8.filter_fqns"


# The machine


def check_machine(training: Training, compile: Compile, float8: Float8) -> None:
    """Check that this machine can compile and has float8 products.

    Needs no process group. Raises ConfigError.
    """
    if problems := [*compile_problems(training, compile), *float8_problems(float8)]:
        raise ConfigError(problems)


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


def float8_problems(float8: Float8) -> list[Problem]:
    """Find what this machine lacks for float8 products, if they are on and not emulated."""
    if not float8.enable_float8_linear or float8.emulate:
        return []
    from titanlite.parallel.float8 import check_float8

    hint = (
        "float8.emulate = true computes with the same rounded numbers in float32, which is slow "
        "and for tests"
    )
    return _problem(ENABLE_FLOAT8, f"set it to false; {hint}", check_float8)


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


def loss_problems(spec: ModelSpec, args: Any, training: Training) -> list[Problem]:
    """Find what keeps the model from computing its loss in chunks, if it shall."""
    from titanlite.loss_chunks import chunk_head

    if training.loss_chunks == 1:
        return []
    model = spec.build_on_meta(args)
    return _problem(
        "training.loss_chunks",
        "set it to 1",
        lambda: chunk_head(model, training.loss_chunks, spec.head),
    )


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


def fsdp_problems(
    spec: ModelSpec,
    args: Any,
    training: Training,
    compile: Compile,
    activation_checkpoint: ActivationCheckpoint,
) -> list[Problem]:
    """Find what keeps the model from being sharded in the groups of `training.fsdp_units`."""
    from titanlite.parallel.activation_checkpoint import is_by_op
    from titanlite.parallel.wrapping import choose_groups

    policy, min_params = training.fsdp_units, training.fsdp_min_params
    if policy in ("block", "root"):
        return []
    try:
        groups = choose_groups(spec.build_on_meta(args), policy, min_params, spec.fsdp_groups(args))
    except ParallelismError as error:
        key = "training.fsdp_min_params" if policy == "size" else "training.fsdp_units"
        return [Problem("", key, str(error))]
    blocks = tuple(f"{name}." for name in spec.block_names(args))
    within = next((name for group in groups for name in group if name.startswith(blocks)), None)
    reasons = []
    if training.compile and "model" in compile.components:
        reasons.append("training.compile makes one graph of the block around it")
    if is_by_op(activation_checkpoint):
        # torch matches a block's operators by their order, and the second time weights are gathered
        # at other places.
        reasons.append(
            'activation_checkpoint.selective_ac_option = "op" runs the block around it again, by '
            "operator"
        )
    if activation_checkpoint.offload:
        # Weights that stay on the device are listed where the block begins; these are gathered
        # later.
        reasons.append(
            "activation_checkpoint.offload would send its gathered weights to host memory with "
            "the block's"
        )
    if within is None or not reasons:
        return []
    message = f"makes {within} an FSDP group, but {' and '.join(reasons)}"
    hint = 'take groups of a block or more: fsdp_units = "block", or a larger fsdp_min_params'
    return [Problem("", "training.fsdp_units", message, hint)]
