"""Find where a loss or gradient that is not finite came from.

It runs the step again, and checks what every module computes.

This costs one more step after the bad one, and nothing before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from titanlite.dist.dist_env import gather_objects
from titanlite.dist.local_parts import local
from titanlite.loss import LossFunction, count_valid, cross_entropy_sum
from titanlite.optim.gradients import local_gradients
from titanlite.step import PlainRunner

if TYPE_CHECKING:
    from titanlite.data.loader import Batch

Stage = Literal["weights", "forward", "loss", "backward", "reduction", "nowhere"]

#: Parameters that a message names.
_NAMED = 5


@dataclass(frozen=True)
class Finding:
    """The first number that was not finite when a step ran again; equal on all ranks."""

    #: weights: they were not finite before the step. forward, backward: a module computed it. loss:
    #: all activations are finite, the loss is not. reduction: gradients became so when they were
    #: summed over micro-batches and ranks. nowhere: the second time all was finite, but perhaps the
    #: sum of the gradients' squares.
    stage: Stage
    #: Name of the module; "" is the model itself. None where no single module is to blame.
    module: str | None = None
    #: Ranks on which it happened.
    ranks: tuple[int, ...] = ()
    #: Number of the micro-batch, from 0; None where all of them are involved.
    micro_batch: int | None = None
    #: The parameters that are not finite (weights), or whose gradients are not (reduction), by
    #: name.
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"rank{'s' * (len(self.ranks) != 1)} {', '.join(map(str, self.ranks))}"
        if self.micro_batch is not None:
            where += f", micro-batch {self.micro_batch + 1}"
        named = ", ".join(self.parameters[:_NAMED])
        if len(self.parameters) > _NAMED:
            named += f" and {len(self.parameters) - _NAMED} more"
        value = f"the output of {self.module or 'the model'}"
        return {
            "weights": f"not finite before the step: the weights {named} ({where})",
            "forward": f"first not finite: {value}, in the forward pass ({where})",
            "loss": f"first not finite: the loss itself; every module's output is finite ({where})",
            "backward": f"first not finite: the gradient of {value} ({where})",
            "reduction": f"first not finite: the gradients of {named}, "
            f"when they were summed ({where})",
            "nowhere": "run a second time, every activation and gradient is finite: the sum of "
            "the gradients' squares overflows, or the step is not reproducible, as "
            "with a fault of the hardware",
        }[self.stage]


def diagnose_nonfinite(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    *,
    sync_every: bool = False,
    loss_function: LossFunction = cross_entropy_sum,
) -> Finding:
    """Run the step of these micro-batches again, without an update, and name what was not finite
    first.

    micro_batches: this rank's, on the model's device; the weights must be those of then. All ranks
    call it together, and get the same finding. Compiled parts run uncompiled. Gradients that the
    model holds are lost.
    """
    model.zero_grad(set_to_none=True)
    if found := _parameter_finding(
        "weights", [name for name, p in model.named_parameters() if not _finite(p)]
    ):
        return found
    tokens = torch.stack([count_valid(batch.labels) for batch in micro_batches]).sum()
    dist.all_reduce(tokens)
    tokens.clamp_(min=1)
    recorder = _Recorder(model)
    with recorder.hooks(), torch.compiler.set_stance("force_eager"):
        share = PlainRunner(model, loss_function, sync_every).forward_backward(
            micro_batches, tokens
        )
    try:
        return _first(model, recorder, bool(share.isfinite()))
    finally:
        model.zero_grad(set_to_none=True)


def _first(model: nn.Module, recorder: _Recorder, loss_is_finite: bool) -> Finding:
    # Every rank runs the same modules in the same order, so the number of an event means the same
    # on all.
    shared = gather_objects(recorder.first_events())
    stages: tuple[Stage, ...] = ("forward", "backward")
    for stage in stages:
        events = {rank: found[stage] for rank, found in enumerate(shared) if stage in found}
        if events:
            first = min(events.values(), key=lambda event: event.order)
            ranks = tuple(rank for rank, event in events.items() if event.order == first.order)
            return Finding(stage, first.module, ranks, first.order[0])
        if stage == "forward":
            losses = gather_objects(loss_is_finite)
            bad_ranks = tuple(rank for rank, finite in enumerate(losses) if not finite)
            if bad_ranks:
                return Finding("loss", None, bad_ranks)
    gradients = {name: local_gradients([p]) for name, p in model.named_parameters()}
    bad = [name for name, parts in gradients.items() if not all(map(_finite, parts))]
    return _parameter_finding("reduction", bad) or Finding("nowhere")


def _parameter_finding(stage: Stage, mine: Sequence[str]) -> Finding | None:
    names = gather_objects(mine)
    ranks = tuple(rank for rank, found in enumerate(names) if found)
    if not ranks:
        return None
    order = dict.fromkeys(name for found in names for name in found)
    return Finding(stage, None, ranks, parameters=tuple(order))


def _finite(tensor: torch.Tensor) -> bool:
    return bool(local(tensor).detach().isfinite().all())


class _Event(NamedTuple):
    #: Micro-batch, and number of values that were checked before it in this stage of the
    #: micro-batch.
    order: tuple[int, int]
    module: str


class _Recorder:
    """Hooks that check the outputs of modules in order, without reading the device."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._checks: list[tuple[Stage, _Event, torch.Tensor]] = []
        self._micro_batch = -1
        self._numbers: Counter[Stage] = Counter()
        self._in_forward = False

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles = [self._model.register_forward_pre_hook(self._begin)]
        for name, module in self._model.named_modules():
            parts = name.split(".")
            plain = ".".join(part for part in parts if not part.startswith("_"))  # no wrappers
            handles.append(module.register_forward_hook(partial(self._after, plain)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def first_events(self) -> dict[Stage, _Event]:
        """Read the device once; return this rank's first bad value by stage."""
        if not self._checks:
            return {}
        finite = torch.stack([flag for *_, flag in self._checks]).tolist()
        first: dict[Stage, _Event] = {}
        for (stage, event, _), fine in zip(self._checks, finite, strict=True):
            if not fine:
                first.setdefault(stage, event)
        return first

    def _begin(self, *_: object) -> None:
        self._micro_batch += 1
        self._numbers.clear()
        self._in_forward = True

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._in_forward:  # activation checkpointing runs the module again
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self._check("forward", self._micro_batch, name, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._check, "backward", self._micro_batch, name))
        self._in_forward = module is not self._model

    def _check(self, stage: Stage, micro_batch: int, name: str, tensor: torch.Tensor) -> None:
        part: Any = local(tensor).detach()
        # A float8 tensor of torchao holds NaN if the scale or anything before it was not finite.
        if hasattr(part, "_data"):
            part = part._data.float()
        event = _Event((micro_batch, self._numbers[stage]), name)
        self._checks.append((stage, event, part.isfinite().all()))
        self._numbers[stage] += 1
