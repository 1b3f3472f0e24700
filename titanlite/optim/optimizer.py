"""The optimizer of section `[optimizer]`, its parameter groups, and steps that a flag on the device
can hold back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from titanlite.config.errors import ConfigError, Problem
from titanlite.config.extensions import load_optimizer
from titanlite.config.model_sections import Optimizer
from titanlite.parallel.local import local
from titanlite.utils import is_dotted


class Adam(torch.optim.Adam):
    """torch's Adam, which steps on this rank's parts; its state keeps the sharding of the
    parameters.

    All its operators are elementwise, so the numbers are the same. DTensor would take 2 s of the
    first step to find out how each operator divides. It also dispatches every later one more
    slowly.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        is_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return bool(is_complex)


class AdamW(Adam, torch.optim.AdamW):
    """torch's AdamW, in the same way."""


def build_optimizer(
    parameters: dict[str, nn.Parameter],
    settings: Optimizer,
    device: torch.device,
    blocks: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Build the optimizer of section `[optimizer]`.

    `gated_step` sets its learning rates at every step.

    parameters: all of a model, by name. blocks: names of the model's blocks; Muon takes their
    matrices. Without groups all parameters have one weight decay, norms included, as in Llama 2's
    and torchtitan's training.

    Raises TypeError for an object that is no optimizer, and ConfigError for a class that refuses
    its arguments.
    """
    if is_dotted(settings.name):
        maker, is_class = load_optimizer(settings.name, settings.args)
        if is_class:
            optimizer = _of_class(maker, parameter_groups(parameters, settings), settings)
        else:
            optimizer = maker(parameters, settings, device)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer.name = {settings.name!r} returned {optimizer!r:.80}, and no torch "
                "optimizer"
            )
        return keep_ratios(optimizer, settings.peak_lr)
    optimizer = _built_in(parameter_groups(parameters, settings, blocks), settings, device)
    return keep_ratios(optimizer, settings.peak_lr)


def _built_in(
    groups: list[dict[str, Any]], settings: Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer of a name that is no dotted path."""
    common: dict[str, Any] = {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "AdamW8bit":
        from titanlite.optim.adamw import AdamW8bit

        dtype = getattr(torch, settings.compensation_dtype)
        return AdamW8bit(groups, **common, kahan=settings.kahan, compensation_dtype=dtype)
    if settings.name == "AnyPrecisionAdamW":
        from titanlite.optim.adamw import AnyPrecisionAdamW

        dtypes = {name: getattr(torch, getattr(settings, name)) for name in _STATE_DTYPES}
        return AnyPrecisionAdamW(groups, **common, kahan=settings.kahan, **dtypes)
    if settings.name == "Muon":
        from titanlite.optim.muon import Muon

        return Muon(groups, **common, momentum=settings.momentum)
    kind = {"AdamW": AdamW, "Adam": Adam}[settings.name]
    how = settings.implementation or ("fused" if device.type == "cuda" else "foreach")
    return kind(groups, **common, fused=how == "fused", foreach=how == "foreach")


def _of_class(
    maker: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], settings: Optimizer
) -> torch.optim.Optimizer:
    """Return an optimizer of a class that knows nothing of titanlite.

    Arrays of the config become tuples, which is what torch's own classes take.
    Raises ConfigError where it refuses its arguments, or lacks an option that a group sets.
    """
    args = dict(settings.args)
    for name, value in args.items():
        if isinstance(value, list):
            args[name] = tuple(value)
    try:
        optimizer = maker(groups, lr=settings.lr, **args)
    except (TypeError, ValueError) as error:
        message = f"{settings.name!r} refuses them: {error}"
        raise ConfigError([Problem("", "optimizer.args", message)]) from error
    for group in groups:
        unknown = [name for name in group if name not in ("params", *optimizer.defaults)]
        if unknown:
            message = (
                f"{settings.name!r} knows no {' and no '.join(unknown)}, which a group of "
                "parameters sets"
            )
            remedy = "remove it from [[optimizer.groups]], or optimizer.no_decay_on_norms"
            raise ConfigError([Problem("", "optimizer.groups", message, remedy)])
    return optimizer


def state_bytes(
    parameters: dict[str, nn.Parameter],
    settings: Optimizer,
    dtype: torch.dtype,
    blocks: Collection[str] = (),
) -> float | None:
    """Return bytes of state per parameter of the optimizer of `build_optimizer`; None for a dotted
    path.

    dtype: of the weights; `parameters` may have another one.
    """
    if is_dotted(settings.name):
        return None
    groups = parameter_groups(parameters, settings, blocks)
    state = 0.0
    for group in groups:
        for parameter in group["params"]:
            each = _bytes_each(parameter, settings, dtype, is_muon="muon" in group)
            state += parameter.numel() * each
    return state / sum(parameter.numel() for parameter in parameters.values())


def _bytes_each(
    parameter: nn.Parameter, settings: Optimizer, dtype: torch.dtype, is_muon: bool
) -> float:
    """Return bytes of state for each number of a parameter."""
    if settings.name == "Muon":
        return 4 if is_muon else 8
    if settings.name not in ("AnyPrecisionAdamW", "AdamW8bit"):
        return 2 * dtype.itemsize
    momentum, variance, compensation = (
        getattr(torch, getattr(settings, name)).itemsize for name in _STATE_DTYPES
    )
    if not settings.kahan:
        compensation = 0
    if settings.name == "AnyPrecisionAdamW":
        return float(momentum + variance + compensation)
    from titanlite.optim.adamw import block_of

    block = block_of(parameter.shape)
    moments = 2 + 8 / block if block else 8
    return float(moments + compensation)


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_STATE_DTYPES = ("momentum_dtype", "variance_dtype", "compensation_dtype")


def parameter_groups(
    parameters: dict[str, nn.Parameter], settings: Optimizer, blocks: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Divide parameters into the groups of `[[optimizer.groups]]`, and one more group of all
    others.

    The first pattern that is found in a name decides. Groups without parameters on this rank are
    left out.
    """
    found: dict[_Kind, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        kind = _kind_of(plain_name(name), parameter, settings, blocks)
        found.setdefault(kind, []).append(parameter)
    groups = []
    for kind, members in found.items():
        group: dict[str, Any] = {"params": members, **_options(settings, kind)}
        if kind.is_muon:
            group["muon"] = True
        groups.append(group)
    return groups


class _Kind(NamedTuple):
    """What decides to which group a parameter belongs."""

    #: Of the first pattern that is found in its name; one further for a parameter without any.
    pattern: int
    without_decay: bool
    is_muon: bool


def _kind_of(
    name: str, parameter: nn.Parameter, settings: Optimizer, blocks: Collection[str]
) -> _Kind:
    pattern = len(settings.groups)
    for index, group in enumerate(settings.groups):
        if re.search(group.pattern, name):
            pattern = index
            break
    in_block = name.startswith(tuple(f"{block}." for block in blocks))
    return _Kind(
        pattern,
        without_decay=settings.no_decay_on_norms and parameter.ndim < 2,
        is_muon=settings.name == "Muon" and parameter.ndim > 1 and in_block,
    )


def _options(settings: Optimizer, kind: _Kind) -> dict[str, Any]:
    """Return the options of a group that differ from the section's."""
    options: dict[str, Any] = {}
    if kind.pattern < len(settings.groups):
        group = settings.groups[kind.pattern]
        for key in ("lr", "weight_decay", "eps"):
            if getattr(group, key) is not None:
                options[key] = getattr(group, key)
        if group.beta1 is not None or group.beta2 is not None:
            beta1 = settings.beta1 if group.beta1 is None else group.beta1
            beta2 = settings.beta2 if group.beta2 is None else group.beta2
            options["betas"] = (beta1, beta2)
    if kind.without_decay:
        options["weight_decay"] = 0.0
    return options


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that torch's wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def keep_ratios(optimizer: torch.optim.Optimizer, base: float) -> torch.optim.Optimizer:
    """Note in each parameter group as `lr_scale` the ratio of its learning rate to `base`, unless
    it has one.

    The ratios belong to the configuration, as all hyper-parameters: a resumed run has those of its
    own optimizer.
    """
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", group["lr"] / base if base else 1.0)
    return optimizer


def set_rates(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each parameter group to `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def divides_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `gated_step` can divide this optimizer's gradients, which saves a pass over
    them.
    """
    return isinstance(optimizer, Adam) and _selects(optimizer)


def _selects(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's kernels take a step by a flag on the device."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def to_host(norm: torch.Tensor, ok: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two 0-dim tensors of a GPU, float32 and bool, in host memory; waits once for both."""
    copy = torch.empty(2, pin_memory=True)
    event = torch.cuda.Event()
    copy.copy_(torch.stack([norm, ok]), non_blocking=True)
    event.record()
    event.synchronize()
    return copy[0], copy[1] > 0


def gated_step(
    optimizer: torch.optim.Optimizer,
    ok: torch.Tensor,
    lr: float,
    divisor: torch.Tensor | None = None,
) -> None:
    """Take one optimizer step at learning rate `lr` if the flag `ok` (0-dim bool) is set, else
    change nothing.

    A parameter group with `lr_scale` steps at `lr * lr_scale`. Fused kernels of torch's select on
    the device, so the host does not wait (`found_inf` is the protocol that gradient scalers use).
    The other optimizers have no such selection. The host reads the flag, which costs nothing on a
    CPU and one synchronization on a GPU.

    ok and divisor are on the weights' device. divisor: of all gradients (0-dim float32), for an
    optimizer that `divides_gradients`.
    """
    set_rates(optimizer, lr)
    if _selects(optimizer):
        optimizer.found_inf = (~ok).to(torch.float32)  # type: ignore[attr-defined]
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(ok):
        optimizer.step()
