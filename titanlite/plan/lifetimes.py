"""Lifetimes of the tensors inside of a module: bytes kept for the backward, and the peaks of
forward and backward.

A module is a list of `Op`. `measure` replays it on sizes alone, by the rules of autograd. A saved
tensor dies with the last node that saved it, and a gradient when its node is done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Op:
    """One operator; sizes are in bytes."""

    #: Name of its output, and the size.
    name: str
    size: int
    #: Inputs that get a gradient.
    reads: tuple[str, ...]
    #: Tensors kept for the backward: inputs, or its own output.
    saves: tuple[str, ...] = ()
    #: More that it keeps, as the logarithms of attention's sums.
    keeps: int = 0
    #: Temporary tensors at the peak of its forward, beside inputs and output. The same of its
    #: backward, beside saved tensors, the output's gradient and those of inputs.
    forward: int = 0
    backward: int = 0
    #: Gradient of its weight.
    weight: int = 0
    #: As `activation_checkpoint.kind_of`.
    kind: str = ""
    #: The gradients of its inputs are the output's own tensor, as of an addition.
    passes: bool = False
    #: Tensors that Python variables hold until it is done.
    holds: tuple[str, ...] = ()

    @property
    def extra(self) -> str:
        """Name of what it keeps besides others' tensors."""
        return f"{self.name}'"

    @property
    def saved(self) -> tuple[str, ...]:
        return (*self.saves, self.extra) if self.keeps else self.saves


class OpList(NamedTuple):
    """A module's operators, and its inputs → bytes."""

    ops: list[Op]
    inputs: Mapping[str, int]


class Peak(NamedTuple):
    """Bytes at a module's peak, beside what it keeps before (backward) or after (forward)."""

    working: int = 0
    #: Gradients of the module's weights made so far.
    weights: int = 0

    @property
    def total(self) -> int:
        return self.working + self.weights

    def or_higher(self, other: Peak) -> Peak:
        return other if other.total > self.total else self

    def above(self, size: int) -> Peak:
        return Peak(max(self.working - size, 0), self.weights)


class ModuleMemory(NamedTuple):
    """A module's needs in one micro-batch, in bytes."""

    #: Between forward and backward, its input included, its output not.
    kept: int
    #: Peaks above `kept`.
    forward: Peak
    backward: Peak
    #: Gradients of its weights, all of them.
    weights: int
    #: Its output.
    out: int


def measure(module: OpList, mode: str = "none") -> ModuleMemory:
    """Replay a module. mode: of activation checkpointing, "none", "full" or "op"."""
    ops = module.ops
    replay = _Replay(module)
    if mode == "none":
        kept = replay.bytes_of(replay.saved - {ops[-1].name})
        forward = replay.forward(replay.saved, replay.inputs)
        backward = replay.backward(replay.saved).above(kept)
    else:
        cached: set[str] = set()
        if mode == "op":
            # `OpPolicy` keeps the tensors of attention and of every second product.
            cached.update([op.name for op in ops if op.kind == "matmul"][::2])
            for op in ops:
                if op.kind in ("attention", "other"):
                    cached.add(op.name)
                if op.kind == "attention" and op.keeps:
                    cached.add(op.extra)
        stays = {*replay.inputs[:1], *cached}
        kept = replay.bytes_of(stays)
        forward = replay.forward(stays, replay.inputs)
        # The backward repeats the forward to the last operator that saves something, and runs that
        # one only if it saves more than its inputs.
        last = max(index for index, op in enumerate(ops) if op.saved)
        runs = last + (ops[last].name in ops[last].saves or ops[last].keeps > 0)
        saved = replay.saved | (cached & {op.name for op in ops[last:]})
        again = replay.forward(saved, stays, cached, ops[: last + 1], runs)
        repeated = Peak(again + ops[-1].size - kept)
        backward = repeated.or_higher(replay.backward(saved, kept))
    return ModuleMemory(
        kept,
        Peak(forward).above(kept),
        backward,
        weights=sum(op.weight for op in ops),
        out=ops[-1].size,
    )


class _Replay:
    """Runs a module's operators on sizes."""

    def __init__(self, module: OpList) -> None:
        self.ops = module.ops
        self.sizes = dict(module.inputs)
        #: All that the backward needs, by the first operator that saved it.
        self._first_saver: dict[str, int] = {}
        for index, op in enumerate(self.ops):
            self.sizes[op.name] = op.size
            self.sizes[op.extra] = op.keeps
            for name in op.saved:
                self._first_saver.setdefault(name, index)
        self.saved = set(self._first_saver)
        outputs = {op.name for op in self.ops}
        self.inputs = [name for op in self.ops for name in op.reads if name not in outputs]

    def bytes_of(self, names: Collection[str]) -> int:
        return sum(self.sizes[name] for name in names)

    def forward(
        self,
        stays: Collection[str],
        alive: Collection[str],
        cached: Collection[str] = (),
        ops: Sequence[Op] = (),
        runs: int | None = None,
    ) -> int:
        """Return the peak bytes of a forward.

        stays: tensors that outlive it. alive: those before it. cached: outputs that need no work.
        ops: those of a recomputation, of which the first `runs` run; empty: all.
        """
        ops = ops or self.ops
        last_use: dict[str, int] = {}
        for index, op in enumerate(ops):
            for name in (*op.reads, *op.saves, *op.holds):
                last_use[name] = index
        alive = set(alive)
        most = 0
        for index, op in enumerate(ops[:runs]):
            alive |= {op.name, op.extra}
            work = 0 if op.name in cached else op.forward
            most = max(most, self.bytes_of(alive) + work)
            done = {name for name in alive if last_use.get(name, -1) <= index}
            alive -= done - {op.name, *stays}
        return most

    def backward(self, alive: Collection[str], above: int = 0) -> Peak:
        """Return the peak of a backward, from a gradient of the output, over `above` bytes."""
        alive = set(alive)
        peak = Peak()
        # Gradients of weights.
        made = 0
        gradients = _Gradients(self.ops[-1])
        for index, op in reversed(list(enumerate(self.ops))):
            given = gradients.of.pop(op.name)
            mine: dict[str, _Storage] = {}
            for name in op.reads:
                mine[name] = given if op.passes else gradients.new(self.sizes[name])
                given.users += op.passes
            made += op.weight
            exists = self.bytes_of(alive) - above
            peak = peak.or_higher(Peak(exists + gradients.bytes + op.backward, made))
            gradients.drop(given)
            for name, storage in mine.items():
                if gradients.sum_is_new(name):
                    now = exists + gradients.bytes + self.sizes[name]
                    peak = peak.or_higher(Peak(now, made))
                gradients.add(name, storage)
            alive -= {name for name in op.saved if self._first_saver[name] == index}
        return peak


@dataclass(slots=True, eq=False)
class _Storage:
    size: int
    #: Tensors whose gradient it is.
    users: int = 1


class _Gradients:
    def __init__(self, last: Op) -> None:
        #: Bytes of all storages.
        self.bytes = 0
        self.of = {last.name: self.new(last.size)}

    def new(self, size: int) -> _Storage:
        self.bytes += size
        return _Storage(size)

    def drop(self, storage: _Storage) -> None:
        storage.users -= 1
        if storage.users == 0:
            self.bytes -= storage.size

    def sum_is_new(self, name: str) -> bool:
        """Whether a sum takes another tensor, since others hold the first gradient."""
        return name in self.of and self.of[name].users > 1

    def add(self, name: str, storage: _Storage) -> None:
        """Add to a tensor's gradient, in place where nothing else holds the first."""
        if name in self.of and not self.sum_is_new(name):
            self.drop(storage)
            return
        if name in self.of:
            self.drop(self.of[name])
        self.of[name] = storage
