"""The tensors of a run by name, and the steps of a save that all ranks take together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as state_dicts
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Shard

from titanlite.checkpoint.loaded import EXPERT_BIAS
from titanlite.checkpoint.manifest import CheckpointError, Manifest, dtype_name
from titanlite.checkpoint.store_paths import AnyPath
from titanlite.dist.dist_env import KEEPS_TIMEOUT, DistEnv, gather_objects, meet
from titanlite.dist.local_parts import local, plain
from titanlite.optim.bad_step_errors import WeightsError, name_ranks
from titanlite.parallel.feature_linear import FeatureLinear, weights_replaced

Tensors = dict[str, torch.Tensor]
T = TypeVar("T")
#: Name of the tensor with all ranks' random generators.
RNG = "rng.torch"
#: Entry of a manifest's `config`: `DistEnv.places` of the ranks that had them.
PLACES = "places"
#: Hyper-parameters belong to the configuration, not to the checkpoint.
_HYPERPARAMETERS = "param_groups."
_OPTIONS = state_dicts.StateDictOptions(flatten_optimizer_state_dict=True)


def gather(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, frozen: bool = False
) -> Tensors:
    """Return the tensors to save or to load into, by name: `model.…`, and `optimizer.…` unless it
    is None.

    Of a model with adapters these are the adapters alone; frozen: all but those. An optimizer
    without a step gets the state of a step without gradients, as a target of the load.
    """
    found = cast(Tensors, state_dicts.get_model_state_dict(model))
    # float8 wraps weights that are gathered in it; a checkpoint holds plain ones.
    weights = {name: plain(tensor) for name, tensor in found.items()}
    adapters = adapter_names(model)
    if adapters:
        weights = {name: one for name, one in weights.items() if (name in adapters) != frozen}
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    if optimizer is None:
        return tensors
    fresh = not optimizer.state
    state: dict[str, Any] = state_dicts.get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    for name, value in state.items():
        if name.startswith(_HYPERPARAMETERS):
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} of {type(optimizer).__name__} is no tensor, and checkpoints hold tensors "
                "only"
            )
        tensors[f"optimizer.{name}"] = value
    if fresh:
        # torch makes the state by a step of size zero, which is counted in it.
        for entry in optimizer.state.values():
            for value in entry.values():
                value.zero_()
    return tensors


def adapter_names(model: nn.Module) -> set[str]:
    """Return the names of all adapters' parameters, without the parts that wrappers add."""
    found = set[str]()
    for name, module in model.named_modules():
        if isinstance(module, FeatureLinear):
            found.update(f"{name}.{leaf}" for leaf in module.adapters)
    return found


def converted(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a tensor in another precision, the same object where it has it already.

    Integers stay, and biases of experts, whose small steps would be lost.
    """
    if name.endswith(EXPERT_BIAS):
        return tensor
    wanted: torch.dtype = getattr(torch, dtype)
    return tensor.to(wanted) if tensor.is_floating_point() else tensor


def scatter(
    tensors: Tensors, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Put loaded tensors (see `gather`) into model and optimizer, but for hyper-parameters."""
    # A checkpoint of adapters holds a part of the model.
    options = state_dicts.StateDictOptions(strict=not adapter_names(model))
    state_dicts.set_model_state_dict(model, _strip(tensors, "model."), options=options)
    weights_replaced(model)
    if optimizer is None:
        return
    state: dict[str, Any] = state_dicts.get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    state.update(_strip(tensors, "optimizer."))
    state_dicts.set_optimizer_state_dict(model, optimizer, state, options=_OPTIONS)


def _strip(tensors: Tensors, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def rng_state(device: torch.device, world_size: int) -> DTensor:
    """Return torch's generators of all ranks, [world_size, bytes] uint8, one row per rank.

    Each rank writes and reads its row of the sharded tensor, whose shape shows another number of
    ranks.
    """
    row = torch.get_rng_state()
    if device.type == "cuda":
        row = torch.cat([row, torch.cuda.get_rng_state(device)])
    mesh = init_device_mesh("cpu", (world_size,))
    return DTensor.from_local(row[None], mesh, [Shard(0)])


def set_rng_state(state: DTensor, device: torch.device) -> None:
    """Give this rank's generators their state. state: [ranks, bytes] uint8, sharded."""
    row = state.to_local()[0]
    size = torch.get_rng_state().numel()
    torch.set_rng_state(row[:size].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(row[size:].clone(), device)


@torch.no_grad()
def find_nonfinite(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> str:
    """Return the first tensor with a NaN or an infinity, and the ranks that have one; "": none has.

    All ranks of `group` call it together and get the same answer. Raises CheckpointError, on all
    ranks, where one cannot search.
    """
    names = gather_objects(on_each_rank(lambda: _first_nonfinite(tensors), group), group)
    ranks = [rank for rank, name in enumerate(names) if name]
    return f"{names[ranks[0]]} on {name_ranks(ranks)}" if ranks else ""


@torch.no_grad()
def _first_nonfinite(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the first of this rank's tensors with a NaN or an infinity. Each device is read
    once.
    """
    devices: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            part = local(tensor)
            devices.setdefault(part.device, {})[name] = part
    mine = ""
    for parts in devices.values():
        # A sum needs no memory and keeps every NaN and infinity. It may also overflow: then the
        # tensor decides.
        sums = torch.stack([part.sum(dtype=torch.float32) for part in parts.values()])
        finite = sums.isfinite().tolist()
        for (name, part), fine in zip(parts.items(), finite, strict=True):
            if not mine and not fine and not part.isfinite().all():
                mine = name
    return mine


@dataclass(frozen=True)
class Save:
    """One save under way."""

    folder: AnyPath
    tensors: Tensors
    #: As it will be published, but for the files, which are not written yet.
    draft: Manifest
    #: Steps since the save before have shown its weights to be good.
    proven: bool = True
    #: By `time.perf_counter`.
    began: float = 0.0


def check_finite(save: Save, group: dist.ProcessGroup) -> None:
    """Raise WeightsError, on all ranks, for a tensor that is not finite; CheckpointError when its
    new type may be why.
    """
    where = find_nonfinite(save.tensors, group)
    if not where:
        return
    if save.draft.dtype == "float16":
        raise CheckpointError(
            f"{where} does not fit float16: choose another checkpoint.export_dtype"
        )
    raise WeightsError(save.draft.step, save.draft.step, where, "No checkpoint is written")


def describe(
    tensors: Mapping[str, torch.Tensor], model: nn.Module | None = None
) -> dict[str, list[Any]]:
    """Return tensor name -> [dtype, global shape], for the manifest.

    model: with a pipeline, of all its ranks, which call this together.
    """
    mine = {name: [dtype_name(t.dtype), list(t.shape)] for name, t in tensors.items()}
    # The ranks that hold the stages of a pipeline. Of another model each rank has the whole.
    group: dist.ProcessGroup | None = getattr(model, "pipeline_group", None)
    if group is None:
        return mine
    return {name: entry for part in gather_objects(mine, group) for name, entry in part.items()}


# Steps of all ranks together


def new_group(timeout: timedelta) -> dist.ProcessGroup:
    """Make a gloo group for agreements around a save. All ranks call it together.

    `timeout` holds after it is made, and is never lowered.
    """
    meet()
    group = dist.new_group(backend="gloo", group_desc=KEEPS_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    _set_pg_timeout(timeout, group)
    return group


def in_words(error: BaseException) -> str:
    """Return an error's message, with its class if it is not meant for users."""
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    return repr(error)


def on_rank_0(world: DistEnv, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run on rank 0 only; all ranks of `group` get its result, or a CheckpointError."""
    result: T | None = None
    problem: str | None = None
    if world.rank == 0:
        try:
            result = action()
        except Exception as error:
            # The other ranks wait for an answer in any case.
            problem = in_words(error)
    answer = [(result, problem)]
    dist.broadcast_object_list(answer, src=0, group=group, device=torch.device("cpu"))
    result, problem = cast("tuple[T, str | None]", answer[0])
    if problem is not None:
        raise CheckpointError(problem)
    return result


def on_each_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run on each rank of `group`; return its result, or raise CheckpointError on all ranks."""
    problem = ""
    try:
        result = action()
    except Exception as error:
        # The other ranks wait for an answer in any case.
        problem = str(error) or repr(error)
    problems = gather_objects(problem, group)
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if found:
        raise CheckpointError("; ".join(found))
    return result


@contextmanager
def dcp_errors(action: str) -> Iterator[None]:
    """Turn DCP's failures into CheckpointErrors: `except Exception` would miss them."""
    try:
        yield
    except CheckpointException as error:
        causes = set()
        for rank, (cause, _) in error.failures.items():
            causes.add(f"rank {rank}: {in_words(cause)}")
        raise CheckpointError(f"{action} failed: {'; '.join(sorted(causes))}") from error
