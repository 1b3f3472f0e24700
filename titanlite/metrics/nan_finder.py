"""Where a loss or gradient that is not finite came from: the step is run again, and every module is watched.

Costs one more step, and nothing before it is needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from titanlite.loss import count_valid, cross_entropy_sum
from titanlite.optim.gradients import local_gradients, total_norm
from titanlite.step import PlainRunner

if TYPE_CHECKING:
    from titanlite.data.loader import Batch
    from titanlite.parallel.compile import LossFunction

Stage = Literal["weights", "forward", "loss", "backward", "reduction", "norm", "nowhere"]

#: Weights that are named in full.
_NAMED = 5


@dataclass(frozen=True)
class Finding:
    """What was the first to be not finite (NaN or an infinity) when a step was run again; equal on all ranks."""

    #: weights: it was there before the step. forward, backward: a module made it. loss: all activations are finite, the
    #: loss is not. reduction: gradients became so when they were summed over micro-batches and ranks.
    #: norm: all gradients are finite, the sum of their squares is not. nowhere: the second time all was finite.
    stage: Stage
    #: Name of the module; "" is the model itself. None where no single module is to blame.
    module: str | None = None
    #: Ranks on which it happened.
    ranks: tuple[int, ...] = ()
    #: Number of the micro-batch, from 0; None where all of them are involved.
    micro_batch: int | None = None
    #: "output": what the module gives. "inside": what it hands to one of its own modules, named in `before`.
    kind: Literal["output", "inside"] = "output"
    before: str | None = None
    #: The parameters that are not finite (weights), or whose gradients are not (reduction), or the one with the largest
    #: gradient (norm), by name.
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"rank{'s' * (len(self.ranks) != 1)} {', '.join(map(str, self.ranks))}"
        if self.micro_batch is not None:
            where += f", micro-batch {self.micro_batch + 1}"
        named = ", ".join(self.parameters[:_NAMED])
        if len(self.parameters) > _NAMED:
            named += f" and {len(self.parameters) - _NAMED} more"
        module, before = self.module or "the model", self.before or "the model"
        if self.stage == "forward" and self.kind == "inside":
            return f"first not finite: what {module} hands to {before}, in the forward pass ({where})"
        if self.stage == "backward" and self.kind == "inside":
            return f"first not finite: the gradient that {module} hands to {before} ({where})"
        return {
            "weights": f"not finite before the step: the weights {named} ({where})",
            "forward": f"first not finite: the output of {module}, in the forward pass ({where})",
            "loss": f"first not finite: the loss itself; every module's output is finite ({where})",
            "backward": f"first not finite: the gradient with respect to the input of {module} ({where})",
            "reduction": f"first not finite: the gradients of {named}, when they were summed ({where})",
            "norm": "every gradient is finite, but the sum of their squares overflows; "
            f"the largest is that of {named} ({where})",
            "nowhere": "run a second time, the step is finite everywhere: it is not reproducible, as with a fault of "
            "the hardware",
        }[self.stage]


def diagnose_nonfinite(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    *,
    sync_every: bool = False,
    loss_function: LossFunction = cross_entropy_sum,
) -> Finding:
    """Run the step of these micro-batches again, without an update, and name what was not finite first.

    micro_batches: this rank's, on the model's device, as `train_step` took them; the weights must be those of then.
    All ranks call it together, and all get the same finding. Compiled parts run uncompiled. Gradients that the model
    holds are lost.
    """
    model.zero_grad(set_to_none=True)
    spoilt = tuple(name for name, p in model.named_parameters() if not _finite(p))
    if (found := _agree("weights", spoilt)) is not None:
        return found
    tokens = torch.stack([count_valid(batch.labels) for batch in micro_batches]).sum()
    dist.all_reduce(tokens)
    tokens.clamp_(min=1)
    watch = _Watch(model)
    with watch.hooks(), torch.compiler.set_stance("force_eager"):
        share = PlainRunner(model, loss_function, sync_every).forward_backward(micro_batches, tokens)
    try:
        return _first(model, watch, bool(share.isfinite()))
    finally:
        model.zero_grad(set_to_none=True)


def _first(model: nn.Module, watch: _Watch, loss_is_finite: bool) -> Finding:
    # Every rank runs the same modules in the same order, so the number of an event means the same on all.
    shared: list[dict[Stage, _Event]] = _gather(watch.first())
    stages: tuple[Stage, ...] = ("forward", "backward")
    for stage in stages:
        events = {rank: found[stage] for rank, found in enumerate(shared) if stage in found}
        if events:
            first = min(events.values(), key=lambda event: (event.micro_batch, event.number))
            same = (first.micro_batch, first.number)
            ranks = tuple(rank for rank, event in events.items() if (event.micro_batch, event.number) == same)
            return Finding(stage, first.module, ranks, first.micro_batch, first.kind, first.before)
        if stage == "forward":
            losses: list[bool] = _gather(loss_is_finite)
            if not all(losses):
                return Finding("loss", None, tuple(rank for rank, finite in enumerate(losses) if not finite))
    gradients = {name: local_gradients([p]) for name, p in model.named_parameters()}
    spoilt = tuple(name for name, found in gradients.items() if not all(map(_finite, found)))
    if (finding := _agree("reduction", spoilt)) is not None:
        return finding
    largest = max(((_peak(found), name) for name, found in gradients.items()), default=(0.0, ""))
    square = sum(total_norm(found).square().item() for found in gradients.values())
    others: list[tuple[tuple[float, str], float]] = _gather((largest, square))
    # In float32, as the step itself adds them up.
    if not math.isfinite(torch.tensor(sum(square for _, square in others), dtype=torch.float32).item()):
        rank = max(range(len(others)), key=lambda r: others[r][0])
        return Finding("norm", None, (rank,), parameters=(others[rank][0][1],))
    return Finding("nowhere")


def _peak(tensors: Sequence[torch.Tensor]) -> float:
    return max((t.abs().max().item() for t in tensors if t.numel()), default=0.0)


def _agree(stage: Stage, mine: tuple[str, ...]) -> Finding | None:
    """A finding about parameters, if any rank has some."""
    names: list[tuple[str, ...]] = _gather(mine)
    ranks = tuple(rank for rank, found in enumerate(names) if found)
    if not ranks:
        return None
    order = dict.fromkeys(name for found in names for name in found)
    return Finding(stage, None, ranks, parameters=tuple(order))


def _gather(value: Any) -> list[Any]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _finite(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(local.detach().isfinite().all())


@dataclass(frozen=True)
class _Event:
    """Something of this rank's run that was not finite."""

    stage: Stage
    micro_batch: int
    #: How many were noted before it in this stage of the micro-batch.
    number: int
    module: str
    kind: Literal["output", "inside"]
    before: str | None


@dataclass
class _Passing:
    """A tensor on its way: the modules that gave it and that took it, innermost and outermost in the order of time."""

    givers: list[str] = field(default_factory=list)
    takers: list[str] = field(default_factory=list)

    def event(self, stage: Stage, micro_batch: int, number: int) -> _Event:
        """What it means that this tensor (backward: its gradient) was the first that is not finite."""
        if stage == "forward":
            if self.givers:
                return _Event(stage, micro_batch, number, self.givers[0], "output", None)
            taker = self.takers[0]
            return _Event(stage, micro_batch, number, _parent(taker), "inside", taker)
        if self.takers:
            # Modules inside others take it too, and made the gradient; several side by side add theirs up.
            inner = [name for name in self.takers if not any(_holds(name, other) for other in self.takers)]
            return _Event(stage, micro_batch, number, ", ".join(dict.fromkeys(inner)), "output", None)
        giver = self.givers[-1]
        return _Event(stage, micro_batch, number, _parent(giver) if giver else "the loss", "inside", giver)


class _Watch:
    """Hooks on every module; notes in order what goes in and out. The device is read once, by `first`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._flags: list[tuple[Stage, int, int, _Passing, torch.Tensor]] = []
        self._passing = WeakTensorKeyDictionary()
        self._micro_batch = -1
        self._numbers: Counter[Stage] = Counter()
        self._in_forward = False

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch what the model does inside."""
        handles: list[RemovableHandle] = []
        for name, module in self._model.named_modules():
            plain = ".".join(part for part in name.split(".") if not part.startswith("_"))  # without wrappers
            handles.append(module.register_forward_pre_hook(self._before(plain), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after(plain)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def first(self) -> dict[Stage, _Event]:
        """The first of this rank that was not finite, by stage."""
        finite = torch.stack([flag for *_, flag in self._flags]).tolist() if self._flags else []
        found: dict[Stage, _Event] = {}
        for (stage, micro_batch, number, passing, _), fine in zip(self._flags, finite, strict=True):
            if not fine and stage not in found:
                found[stage] = passing.event(stage, micro_batch, number)
        return found

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is self._model:
                self._micro_batch += 1
                self._numbers.clear()
                self._in_forward = True
            elif self._in_forward:  # not when activation checkpointing runs a module again
                for tensor in _tensors((args, kwargs)):
                    if tensor.requires_grad:  # a mask or a table may hold infinities on purpose
                        self._meet(tensor).takers.append(name)

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._in_forward:
                for tensor in _tensors(output):
                    self._meet(tensor).givers.append(name)
            if module is self._model:
                self._in_forward = False

        return hook

    def _meet(self, tensor: torch.Tensor) -> _Passing:
        """The record of a tensor; one that comes by for the first time is looked at, and so will be its gradient."""
        passing: _Passing | None = self._passing.get(tensor)
        if passing is None:
            passing = self._passing[tensor] = _Passing()
            self._look("forward", self._micro_batch, passing, tensor)
            if tensor.requires_grad:
                tensor.register_hook(self._on_gradient(self._micro_batch, passing))
        return passing

    def _on_gradient(self, micro_batch: int, passing: _Passing) -> Any:
        return lambda gradient: self._look("backward", micro_batch, passing, gradient)

    def _look(self, stage: Stage, micro_batch: int, passing: _Passing, tensor: torch.Tensor) -> None:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        # Of a float8 tensor of torchao its numbers: NaN if the scale or anything before it was not finite.
        local = local._data.float() if hasattr(local, "_data") else local
        number = self._numbers[stage]
        self._numbers[stage] += 1
        self._flags.append((stage, micro_batch, number, passing, local.isfinite().all()))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _holds(name: str, other: str) -> bool:
    """Whether module `other` lies inside module `name`."""
    return other != name and (not name or other.startswith(f"{name}."))
