"""Checks of a config against the machine, the model and torch: errors of `parallel/` become problems with their keys.

Importing this module needs no torch; the functions that need it import it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from titanlite.config.errors import ConfigError, Problem, nearest
from titanlite.config.schema import quote
from titanlite.config.sections.model import AUTO_FILTER, ActivationCheckpoint, Compile, Float8
from titanlite.config.sections.training import Training
from titanlite.models.spec import ModelSpec, Size
from titanlite.parallel import ParallelismError
from titanlite.parallel.float8_choice import (
    HEAD,
    MULTIPLE,
    SMALL_SIZES,
    Float8Choice,
    matches,
    split_filters,
    tokens_per_product,
    uneven_for_gather,
)
from titanlite.utils import counted

if TYPE_CHECKING:
    from titanlite.models import LlamaArgs

ENABLE_FLOAT8, FILTERS = "float8.enable_float8_linear", "float8.filter_fqns"


# The machine


def check_machine(training: Training, compile: Compile, float8: Float8) -> None:
    """Check that this machine can compile and has float8 products. Needs no process group. Raises ConfigError."""
    if problems := [*compile_problems(training, compile), *float8_problems(float8)]:
        raise ConfigError(problems)


def compile_problems(training: Training, compile: Compile, device_type: str | None = None) -> list[Problem]:
    """Find what this machine lacks for `torch.compile`, if it is on; else set the folder of compiled code.

    device_type: "cpu" or "cuda"; by default CUDA when this machine has it.
    """
    if not training.compile:
        return []
    from titanlite.parallel.compile import CACHE_VARIABLE, check_backend, use_cache_folder

    hint = "training.compile = false trains without it"
    problems = _problem("compile.backend", hint, lambda: check_backend(compile.backend, device_type))
    if compile.backend == "inductor":
        key = CACHE_VARIABLE if compile.cache_dir is None else "compile.cache_dir"
        problems += _problem(key, "", lambda: use_cache_folder(compile.cache_dir))
    return problems


def float8_problems(float8: Float8) -> list[Problem]:
    """Find what this machine lacks for float8 products, if they are on and not emulated."""
    if not float8.enable_float8_linear or float8.emulate:
        return []
    from titanlite.parallel.float8 import check_float8

    hint = "float8.emulate = true computes with the same rounded numbers in float32, which is slow and for tests"
    return _problem(ENABLE_FLOAT8, f"set it to false; {hint}", check_float8)


def _problem(key: str, hint: str, check: Callable[[], object]) -> list[Problem]:
    try:
        check()
    except ParallelismError as error:
        return [Problem("", key, str(error), hint)]
    return []


def async_tp_problems(tp: int) -> list[Problem]:
    """Find what keeps `tp` tensor-parallel ranks of this machine from async tensor parallelism."""
    import torch

    from titanlite.parallel.dist_env import this_rank
    from titanlite.parallel.tensor import check_async

    if tp == 1:
        return []
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    hint = "set it to false: tensor parallelism works without it, its traffic then waits for the products"
    key = "experimental.enable_async_tensor_parallel"
    return _problem(key, hint, lambda: check_async(tp, device_type, this_rank().local_world_size))


# The model


def fsdp_problems(
    spec: ModelSpec, args: LlamaArgs, training: Training, compile: Compile, activation_checkpoint: ActivationCheckpoint
) -> list[Problem]:
    """Find what keeps the model from being sharded in the groups of `training.fsdp_units`."""
    from titanlite.parallel.activation_checkpoint import is_by_op
    from titanlite.parallel.wrapping import choose_groups

    policy, min_params = training.fsdp_units, training.fsdp_min_params
    if policy in ("block", "root"):
        return []
    try:
        groups = choose_groups(spec.build_on_meta(args), policy, min_params, spec.fsdp_units(args))
    except ParallelismError as error:
        key = "training.fsdp_min_params" if policy == "size" else "training.fsdp_units"
        return [Problem("", key, str(error))]
    blocks = tuple(f"{name}." for name in spec.block_names(args))
    within = next((name for group in groups for name in group if name.startswith(blocks)), None)
    reasons = []
    if training.compile and "model" in compile.components:
        reasons.append("training.compile makes one graph of the block around it")
    if is_by_op(activation_checkpoint):
        # torch matches a block's operators by their order, and the second time weights are gathered at other places.
        reasons.append('activation_checkpoint.selective_ac_option = "op" runs the block around it again, by operator')
    if activation_checkpoint.offload:
        # Weights that stay on the device are listed where the block begins; these are gathered later.
        reasons.append("activation_checkpoint.offload would send its gathered weights to host memory with the block's")
    if within is None or not reasons:
        return []
    message = f"makes {within} an FSDP group, but {' and '.join(reasons)}"
    hint = 'take groups of a block or more: fsdp_units = "block", or a larger fsdp_min_params'
    return [Problem("", "training.fsdp_units", message, hint)]


# Float8


def recipe_problems(float8: Float8) -> list[Problem]:
    """Find a recipe without measured sizes where small linears are to be skipped by size."""
    if AUTO_FILTER not in float8.filter_fqns or float8.recipe_name in SMALL_SIZES:
        return []
    message = (
        f"{quote(AUTO_FILTER)} does not work with float8.recipe_name = {quote(float8.recipe_name)}: torchao has no "
        "sizes for it"
    )
    hint = "leave it out; float8.min_features = 4096 keeps what has fewer input or output features"
    return [Problem("", FILTERS, message, hint)]


def choice_problems(
    linears: Mapping[str, Size], choices: Sequence[Float8Choice], filter_fqns: Sequence[str]
) -> list[Problem]:
    """Find filters without an effect, and a choice that converts nothing."""
    found = []
    for part in split_filters(filter_fqns)[0]:
        if not any(matches(part, name) for name in linears):
            components = list(dict.fromkeys(c for name in linears for c in name.split(".") if not c.isdigit()))
            hint = "".join(f"nearest: {name}; " for name in nearest(part, [*components, AUTO_FILTER]))
            hint += f"parts of names are {', '.join(components)}; the head is {HEAD}, and it always stays"
            found.append(Problem("", FILTERS, f"{quote(part)} is part of no linear's name", hint))
    if not found and not any(choice.converted for choice in choices):
        by_reason: dict[str, list[str]] = {}
        for choice in choices:
            by_reason.setdefault(choice.reason, []).append(choice.kind)
        reasons = "; ".join(f"{', '.join(kinds)} ({reason})" for reason, kinds in by_reason.items())
        message = f"leaves no product in float8: {reasons}"
        found.append(Problem("", ENABLE_FLOAT8, message, "convert something, or set it to false"))
    return found


def token_problems(batch_size: int, seq_len: int, cp: int, microbatches: int) -> list[Problem]:
    """Find a number of tokens M that float8 units cannot take: for the gradient of a weight it is the inner dimension.

    The arguments are those of `tokens_per_product`.
    """
    count = tokens_per_product(batch_size, seq_len, cp=cp, microbatches=microbatches)
    if count % MULTIPLE == 0:
        return []
    length, rows = seq_len // cp, batch_size // microbatches
    by = [counted(rows, "sequences") + (" of a pipeline micro-batch" if microbatches > 1 else "")]
    by.append(f"{length} tokens" + (f" on each of {cp} context-parallel ranks" if cp > 1 else ""))
    fitting = MULTIPLE // math.gcd(MULTIPLE, length) * microbatches
    message = f"needs a multiple of {MULTIPLE} tokens in a product, and there are {' x '.join(by)} = {count}"
    hint = f"these work: training.batch_size = {fitting} or a multiple of it, or another training.seq_len"
    return [Problem("", ENABLE_FLOAT8, message, hint)]


def gather_problems(choices: Sequence[Float8Choice], shards: int) -> list[Problem]:
    """Find weights that cannot be gathered in float8 because their rows do not divide evenly over `shards` ranks."""
    odd = uneven_for_gather(choices, shards)
    if not odd:
        return []
    which = ", ".join(f"{c.kind} has {c.size.out_features}" for c in odd)
    names = ", ".join(quote(c.kind) for c in odd)
    return [
        Problem(
            "",
            "float8.enable_fsdp_float8_all_gather",
            f"needs weights whose rows divide over the {shards} ranks that share them; {which}",
            f"set it to false, keep them with float8.filter_fqns = [{names}], or share weights among fewer ranks",
        )
    ]


def wide_filters(linears: Iterable[str], filter_fqns: Sequence[str]) -> list[str]:
    """Warn of filters that match more than they seem to: `layers.1` also matches `layers.10`."""
    names, found = list(linears), []
    for part in split_filters(filter_fqns)[0]:
        if not part[-1:].isdigit():
            continue
        whole = any(re.search(rf"{re.escape(part)}(?!\d)", name) for name in names)
        cut = [m.group() for name in names if (m := re.search(rf"^.*?{re.escape(part)}\d+", name))]
        others = list(dict.fromkeys(cut))
        if whole and others:
            shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            found.append(
                f"{FILTERS}: {quote(part)} is also part of {shown}, which stay in high precision too; "
                f"{quote(part + '.')} is not"
            )
    return found
