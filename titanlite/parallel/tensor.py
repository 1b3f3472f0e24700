"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022), by
torch's styles.

    # on the meta device, before everything that wraps modules
    apply_tp(model, spec.tensor_plan(args), mesh["tp"])
    loss = tensor_loss(cross_entropy_sum)                # for the logits of that model

Heads, the feed-forward's width and the vocabulary are divided over the ranks of a mesh. Between the
products each rank would do the same work on the same activations. So the sequence is divided there:
an all-gather before attention and feed-forward, a reduce-scatter after each. Together they move as
many bytes as one all-reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from titanlite.dist import ParallelismError
from titanlite.loss import LossFunction
from titanlite.parallel.divided_loss import divided_cross_entropy
from titanlite.parallel.feature_linear import FeatureLinear
from titanlite.regularized_loss import objective_of

#: Dimension of the sequence in activations [batch, seq, …].
_SEQUENCE = Shard(1)
#: Kinds of modules that have none of their own.
_WITHOUT_WEIGHTS = ("gather", "shared", "tokens")


#: Takes an input and a linear that it is for; returns what is gathered in place of the input.
_Cast = Callable[[Tensor, nn.Module], Tensor]


def apply_tp(
    model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, shard_logits: bool = True
) -> None:
    """Divide the weights of `model` over the ranks of `mesh` in place, and its activations with
    them.

    plan: name of a module, in the order they run → how it is divided; names of other pipeline
    stages are skipped.
        embedding: rows of the table; tokens whole, output divided by sequence.
        sequence:  a normalisation, or a linear of few features; weights whole, input and output
                   divided by sequence, the output a DTensor. It is plain if it is the model's last
                   module, since a pipeline stage sends plain tensors.
        added:     as sequence, but the output, added to the residual stream, is plain.
        heads:     a normalisation of each head, or a linear; weights whole, input and output this
                   rank's rows, plain tensors.
        all heads: a normalisation over all heads together; weights divided as the heads, input and
                   output as of heads.
        gather:    no weights of its own; the first argument comes from a `sequence` module and is
                   made whole.
        colwise:   a linear's outputs; input whole, output a plain tensor of this rank's features.
        gathered:  as colwise, from an input divided by sequence, which no other linear takes.
        shared:    no weights of its own; the first argument, divided by sequence, is made whole, a
                   plain tensor that the heads of all ranks take.
        tokens:    no weights of its own; the first argument is made a plain tensor, this rank's
                   part of the sequence, and so is the output.
        whole:     weights whole; input and output as they are.
        vector:    one number for each head, of which a rank has those of its heads; no input.
        rowwise:   a linear's inputs; input as colwise leaves it, output divided by sequence.
        head:      as colwise, from an input divided by sequence to logits, a DTensor for
                   `tensor_loss`.
    mesh: one-dimensional. shard_logits: logits stay divided by vocabulary; else every rank gets all
    of them.

    Modules that shared a parameter still do. Raises ParallelismError for another mesh, an unknown
    kind, or a parameter that no module of the plan covers.
    """
    if mesh.ndim != 1:
        raise ParallelismError(
            f'apply_tp takes one dimension, as mesh["tp"] of DistEnv.build_mesh, not {mesh.ndim}'
        )
    shared = shared_parameters(model)
    modules = dict(model.named_modules())
    kinds = {name: kind for name, kind in plan.items() if name in modules}
    parallelize_module(model, mesh, _styles(modules, kinds, mesh, shard_logits))
    _hook(modules, kinds, mesh)
    for first, *others in shared:
        for name in others:
            tie(model, first, name)
    check_all_divided(model)


def _styles(
    modules: Mapping[str, nn.Module], kinds: dict[str, str], mesh: DeviceMesh, shard_logits: bool
) -> dict[str, ParallelStyle]:
    last = next(reversed(kinds), "")
    logits = Shard(-1) if shard_logits else Replicate()
    styles: dict[str, ParallelStyle] = {}
    for name, kind in kinds.items():
        if kind in _WITHOUT_WEIGHTS:
            continue
        module = modules[name]
        style = None
        if isinstance(module, FeatureLinear):
            style = module.tensor_style(kind, logits if kind == "head" else _SEQUENCE, mesh)
        styles[name] = style or style_of(kind, logits, last=name == last)
    return styles


def _hook(modules: Mapping[str, nn.Module], kinds: dict[str, str], mesh: DeviceMesh) -> None:
    last = next(reversed(kinds), "")
    colwise = [name for name, kind in kinds.items() if kind == "colwise"]
    for name, kind in kinds.items():
        if kind == "gather":
            # The linears inside that take its first argument, which is made whole; and the cast
            # before the all-gather that all of them have in common.
            takers = [taker for taker in colwise if taker.startswith(f"{name}.")]
            casts = set[_Cast | None]()
            for taker in takers:
                found = modules[taker]
                casts.add(found.input_cast(mesh) if isinstance(found, FeatureLinear) else None)
            cast = casts.pop() if len(casts) == 1 else None
            linear = "" if cast is None else takers[0].removeprefix(f"{name}.")
            cls: Any = type(modules[name])
            modules[name].__class__ = _gathering(cls, cast, linear)
        elif kind == "shared":
            modules[name].register_forward_pre_hook(_share_input)
        elif kind == "tokens":
            modules[name].register_forward_pre_hook(_plain_input)
        elif kind == "embedding" or (kind == "sequence" and name == last):
            # The plain tensor is a view of a DTensor, and `fully_shard` warns of modules that
            # return views.
            modules[name].register_forward_hook(lambda module, args, output: output.clone())


def check_all_divided(model: nn.Module) -> None:
    """Raise ParallelismError for a parameter that no plan has made a DTensor."""
    parameters = model.named_parameters()
    left = [name for name, parameter in parameters if not isinstance(parameter, DTensor)]
    if left:
        raise ParallelismError(
            f"the plan of tensor parallelism covers no module with {', '.join(left)}"
        )


def style_of(kind: str, logits: Placement = _SEQUENCE, last: bool = False) -> ParallelStyle:
    """Return torch's style of a kind of `apply_tp`.

    logits: how a head leaves them. last: no module of the model follows.
    """
    if kind == "all heads":
        from titanlite.parallel.tensor_norm import DividedNorm

        return DividedNorm()
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=_SEQUENCE),
        "sequence": SequenceParallel(sequence_dim=_SEQUENCE.dim, use_local_output=last),
        "added": SequenceParallel(sequence_dim=_SEQUENCE.dim, use_local_output=True),
        # It works on rows, and the rows of another rank are other heads: as if the batch were
        # divided.
        "heads": SequenceParallel(sequence_dim=0, use_local_output=True),
        "colwise": ColwiseParallel(),
        "whole": _Placed(Replicate()),
        "vector": _Placed(Shard(0)),
        "gathered": ColwiseParallel(input_layouts=_SEQUENCE),
        "rowwise": RowwiseParallel(output_layouts=_SEQUENCE),
        "head": ColwiseParallel(
            input_layouts=_SEQUENCE, output_layouts=logits, use_local_output=False
        ),
    }
    if kind not in styles:
        known = ", ".join([*_WITHOUT_WEIGHTS, "all heads", *styles])
        raise ParallelismError(
            f"tensor parallelism cannot divide a module as {kind!r}; its kinds are {known}"
        )
    return styles[kind]


# One class for all blocks: `torch.compile` compiles each class again.
@functools.cache
def _gathering(cls: type[nn.Module], cast: _Cast | None, linear: str) -> type[nn.Module]:
    """Return a subclass that gathers its first argument. cast: called before, with the linear of
    that name.

    With a hook, which `torch.compile` compiles apart, the gradient's reduce-scatter would become an
    all-reduce.
    """

    class Gathering(cls):  # type: ignore[valid-type,misc]
        def forward(self, x: DTensor, *args: Any, **kwargs: Any) -> Any:
            if cast is not None:
                x = cast(x, self.get_submodule(linear))  # type: ignore[assignment]
            # A DTensor to the end: with plain copies each product would reduce its own gradient
            # over the ranks.
            return super().forward(x.redistribute(placements=[Replicate()]), *args, **kwargs)

    Gathering.__name__ = cls.__name__
    Gathering.__qualname__ = cls.__qualname__
    return Gathering


# Plain functions: with a hook of its own each block would be compiled again.
def _share_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Parts of the gradient, from each rank's heads, are added up."""
    x, *others = args
    whole = x.redistribute(placements=[Replicate()])
    return (whole.to_local(grad_placements=[Partial()]), *others)


def _plain_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = args
    return (x.to_local(), *others)


class _Placed(ParallelStyle):
    """Every rank has all of the weights, or a part of them; inputs and outputs are as they are."""

    def __init__(self, placement: Shard | Replicate) -> None:
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(module.named_parameters(recurse=False)):
                placed = distribute_tensor(parameter, mesh, [self.placement], src_data_rank=None)
                setattr(module, key, nn.Parameter(placed, parameter.requires_grad))

        return distribute_module(module, device_mesh, place)


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has more than one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(model: nn.Module, first: str, name: str) -> None:
    """Make parameter `name` be parameter `first` again: each module has got a divided one of its
    own.
    """
    source = model.get_parameter(first)
    parameter = model.get_parameter(name)
    ways = [getattr(p, "placements", "undivided") for p in (source, parameter)]
    if ways[0] != ways[1]:
        raise ParallelismError(
            f"{first} and {name} are one parameter, but the plan divides them as {ways}"
        )
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, source)


def tensor_loss(loss: LossFunction) -> LossFunction:
    """Return `loss` for logits [batch, seq, vocab] that are a DTensor; divided ones are never
    gathered.

    `divided_cross_entropy` computes `cross_entropy_sum` and results of `regularized`. Others must
    be made of `cross_entropy`, for torch's `loss_parallel`. The result is a plain scalar, the same
    on every rank of the mesh.
    """
    objective = objective_of(loss)

    def divided(logits: Tensor, labels: Tensor) -> Tensor:
        if not isinstance(logits, DTensor):
            raise TypeError(
                "logits of a model under tensor parallelism are a DTensor, these are a plain tensor"
            )
        if all(placement.is_replicate() for placement in logits.placements):
            return loss(logits.to_local(), labels)
        if objective is not None:
            return divided_cross_entropy(logits, labels, objective)
        result: torch.Tensor = _ShardedLoss.apply(logits, labels, loss)
        return result

    return divided


class _ShardedLoss(torch.autograd.Function):
    """Enters torch's `loss_parallel`, which replaces operators, around both passes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, loss: LossFunction) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        with loss_parallel(), torch.set_grad_enabled(wanted):
            inner = logits.detach().requires_grad_(wanted)
            result = loss(inner, labels)
        if wanted:
            ctx.inner = inner
            ctx.result = result
        return (result.to_local() if isinstance(result, DTensor) else result).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        inner, result = ctx.inner, ctx.result
        del ctx.inner, ctx.result  # the graph inside holds the probabilities
        if isinstance(result, DTensor):
            gradient = DTensor.from_local(
                gradient, result.device_mesh, [Replicate()], run_check=False
            )
        with loss_parallel():
            (of_logits,) = torch.autograd.grad(result, inner, gradient)
        return of_logits, None, None
