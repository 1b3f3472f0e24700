"""Tensor parallelism with whole activations (Shoeybi et al. 2019), for modules of other people.

    # on the meta device, before everything that wraps modules
    apply_whole_tp(model, spec.tensor_plan(args), mesh["tp"])

Between the products each rank does the same work on the same activations. An all-reduce follows
attention, another the feed-forward. So it is with the gradients of their inputs. Nothing is asked
of a module but that its linears can be narrower. While it runs, it sees plain tensors, and this
rank's part of its weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from titanlite.dist import ParallelismError
from titanlite.parallel.own_linear import OwnLinear
from titanlite.parallel.tensor import check_all_divided, shared_parameters, tie


def apply_whole_tp(
    model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, shard_logits: bool = True
) -> None:
    """Divide the weights of `model` over the ranks of `mesh` in place.

    plan: name of a module → how it is divided. Activations are whole but for those of this rank's
    features between a "colwise" and a "rowwise".
        embedding: rows of the table.
        colwise:   a linear's outputs; output this rank's features.
        gathered:  as colwise; the output is made whole.
        rowwise:   a linear's inputs, which are this rank's features; the output is summed.
        split:     as rowwise, from a whole input.
        heads:     weights whole, input and output this rank's heads; their gradient is summed.
        whole:     weights whole, and the same work on every rank.
        input:     no weights of its own; the gradient of its input is summed once for all linears
                   inside, and not for each.
        head:      as colwise; logits are a DTensor for `tensor_loss`.
    mesh: one-dimensional. shard_logits: logits stay divided by vocabulary; else every rank gets all
    of them.

    Modules that shared a parameter still do. Raises ParallelismError for a parameter that no module
    of the plan covers.
    """
    shared = shared_parameters(model)
    modules = dict(model.named_modules())
    inputs = tuple(f"{name}." for name, kind in plan.items() if kind == "input")
    for name, kind in plan.items():
        if kind == "head":
            _divide_head(modules[name], mesh, Shard(-1) if shard_logits else Replicate())
        else:
            _distribute(modules[name], mesh, kind)
    for first, *others in shared:
        for name in others:
            tie(model, first, name)
    check_all_divided(model)
    for name, kind in plan.items():
        if kind != "head":
            _change_class(modules[name], mesh, kind, not name.startswith(inputs))


def _distribute(module: nn.Module, mesh: DeviceMesh, kind: str) -> None:
    """Make the parameters of a module DTensors, in place."""
    if isinstance(module, OwnLinear):
        raise ParallelismError(f"ranks with whole activations cannot divide {type(module)}")
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement: Placement = Replicate()
        if kind in ("colwise", "gathered", "embedding"):
            placement = Shard(0)
        elif kind in ("rowwise", "split") and name == "weight":
            placement = Shard(1)
        divided = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


# What moves between ranks; in the backward the opposite does


def _summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Add up the ranks' tensors; the gradient is whole already."""
    whole = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return whole.redistribute(placements=[Replicate()]).to_local()


def _sums_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return x; the ranks' gradients are added up."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def _gathered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Make features [..., features / ranks] whole; of a whole gradient this rank's part is left."""
    part = DTensor.from_local(x, mesh, [Shard(-1)], run_check=False)
    return part.redistribute(placements=[Replicate()]).to_local()


def _split(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's features; the gradient is made whole."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(-1)]).to_local()


def _local(parameter: Any) -> Any:
    return parameter if parameter is None else parameter.to_local()


# One class for all blocks: `torch.compile` compiles each class again


@functools.cache
def _colwise(cls: type[nn.Linear], sums: bool = False) -> type[nn.Module]:
    class Colwise(cls):  # type: ignore[valid-type,misc]
        def forward(self, x: Tensor) -> Tensor:
            if sums:
                x = _sums_gradient(x, self.weight.device_mesh)
            return F.linear(x, _local(self.weight), _local(self.bias))

    return _named(Colwise, cls)


@functools.cache
def _gathers(cls: type[nn.Linear], sums: bool = False) -> type[nn.Module]:
    class Gathers(_colwise(cls, sums)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return _gathered(super().forward(x), self.weight.device_mesh)

    return _named(Gathers, cls)


@functools.cache
def _rowwise(cls: type[nn.Linear]) -> type[nn.Module]:
    class Rowwise(cls):  # type: ignore[valid-type,misc]
        def forward(self, x: Tensor) -> Tensor:
            mesh = self.weight.device_mesh
            y = _summed(F.linear(x, _local(self.weight)), mesh)
            return y if self.bias is None else y + _local(self.bias)

    return _named(Rowwise, cls)


@functools.cache
def _splits(cls: type[nn.Linear]) -> type[nn.Module]:
    class Splits(_rowwise(cls)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_split(x, self.weight.device_mesh))

    return _named(Splits, cls)


@functools.cache
def _with_plain_weights(cls: type[nn.Module], partial: bool) -> type[nn.Module]:
    """Return a subclass whose parameters are plain tensors while it runs.

    A graph may not exchange attributes where it is recomputed. There activations become DTensors
    instead, which costs a graph nothing.

    partial: the ranks' gradients add up to that of a parameter.
    """

    class PlainWeights(cls):  # type: ignore[valid-type,misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                # The rows of another rank are other heads: as if the batch were divided.
                layout = Shard(0) if partial else Replicate()

                def share(item: Any) -> Any:
                    if not isinstance(item, Tensor) or not item.is_floating_point():
                        return item
                    return DTensor.from_local(item, self.tensor_mesh, [layout], run_check=False)

                given = {name: share(item) for name, item in kwargs.items()}
                return super().forward(*map(share, args), **given).to_local()
            kept = dict(self._parameters)
            for name, parameter in kept.items():
                if parameter is not None:
                    gradients = [Partial()] if partial else parameter.placements
                    self._parameters[name] = parameter.to_local(grad_placements=gradients)
            try:
                return super().forward(*args, **kwargs)
            finally:
                self._parameters.update(kept)

    return _named(PlainWeights, cls)


@functools.cache
def _input(cls: type[nn.Module]) -> type[nn.Module]:
    class SumsInput(cls):  # type: ignore[valid-type,misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if args:
                x = _sums_gradient(args[0], self.tensor_mesh)
                return super().forward(x, *args[1:], **kwargs)
            x = _sums_gradient(kwargs["hidden_states"], self.tensor_mesh)
            return super().forward(**{**kwargs, "hidden_states": x})

    return _named(SumsInput, cls)


@functools.cache
def _embedding(cls: type[nn.Embedding]) -> type[nn.Module]:
    """Return a subclass that holds some rows, and adds up what the ranks find."""

    class Rows(_with_plain_weights(cls, False)):  # type: ignore[misc]
        def forward(self, tokens: Tensor) -> Tensor:
            rows = self.weight.to_local().size(0)
            place = tokens - self.first_row
            mine = (place >= 0) & (place < rows)
            found = super().forward(place.where(mine, 0))
            return _summed(found.where(mine.unsqueeze(-1), 0.0), self.tensor_mesh)

    return _named(Rows, cls)


def _place_rows(module: Any, mesh: DeviceMesh) -> None:
    """Tell an embedding which rows are this rank's."""
    rows = module.num_embeddings // mesh.size()
    module.first_row = mesh.get_local_rank() * rows
    if module.padding_idx is not None:
        place = module.padding_idx - module.first_row
        module.padding_idx = place if 0 <= place < rows else None


_LINEARS: dict[str, Any] = {
    "colwise": _colwise,
    "gathered": _gathers,
    "rowwise": _rowwise,
    "split": _splits,
}


def _change_class(module: Any, mesh: DeviceMesh, kind: str, sums: bool) -> None:
    """Let a module work with its part of the weights.

    sums: it sums the gradient of its input by itself.
    """
    cls: Any = type(module)
    if kind in ("colwise", "gathered"):
        module.__class__ = _LINEARS[kind](cls, sums)
        return
    if kind in _LINEARS:
        module.__class__ = _LINEARS[kind](cls)
        return
    module.tensor_mesh = mesh
    if kind == "embedding":
        module.__class__ = _embedding(cls)
        _place_rows(module, mesh)
    elif kind == "input":
        module.__class__ = _input(cls)
    else:
        module.__class__ = _with_plain_weights(cls, kind == "heads")


def _named(made: type, cls: type) -> type[nn.Module]:
    made.__name__, made.__qualname__ = cls.__name__, cls.__qualname__
    return cast("type[nn.Module]", made)


def _divide_head(module: nn.Module, mesh: DeviceMesh, logits: Placement) -> None:
    style = None
    if isinstance(module, OwnLinear):
        style = module.tensor_style("head", logits, mesh)
        if style is None:
            raise ParallelismError(f"a {type(module).__name__} cannot compute divided logits")

        def make_whole(_: nn.Module, args: Any) -> Any:
            return (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False), *args[1:])

        module.register_forward_pre_hook(make_whole)
    if style is None:
        style = ColwiseParallel(
            input_layouts=Replicate(), output_layouts=logits, use_local_output=False
        )
    parallelize_module(module, mesh, style)
