"""Memory of a rank by formulas: a training step replayed on sizes, at the grain of FSDP groups. No torch here.

docs/plan.md derives each formula. `titanlite.plan.trace` runs the real code instead.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.derive import RunConfig
from titanlite.models.llama import LlamaArgs
from titanlite.plan.blocks import ModuleMemory, Shape, block_ops, head_ops, measure
from titanlite.plan.parts import Moment, RankMemory

_BYTES = {"float32": 4, "bfloat16": 2}


class NoFormula(ValueError):
    """A model or setting without formulas; `titanlite.plan.trace` can plan it."""


def estimate(run: RunConfig, rank: int | None = None, device: str = "cuda") -> RankMemory:
    """Return the memory of a rank over a step that is not the first, at most two micro-batches of it.

    rank: None for the worst. device: "cuda" or "cpu", the type that the run would have. Raises NoFormula for a model
    that is no family of `titanlite.models.llama`, and for `training.fsdp_units` that go by classes or sizes.
    """
    if not isinstance(args := run.model_args(), LlamaArgs) or args.norm_type not in ("rmsnorm", "fused_rmsnorm"):
        raise NoFormula(f"there are no formulas for the memory of this model ({run.model.name})")
    if run.training.fsdp_units not in ("block", "root"):
        raise NoFormula(f"there are no formulas for training.fsdp_units = {run.training.fsdp_units!r}")
    if rank is not None:
        return _Step(run, args, rank, device).memory()
    ranks = range(0, run.mesh.world_size, run.mesh.world_size // run.mesh.pipeline)  # the first of each stage
    return max((_Step(run, args, rank, device).memory() for rank in ranks), key=lambda memory: memory.peak.total)


def worst_rank(run: RunConfig, device: str = "cuda") -> int:
    """Return the rank with the largest peak by formulas. Raises NoFormula as `estimate`."""
    return estimate(run, None, device).rank


@dataclass(frozen=True)
class Weight:
    """A parameter as tensor parallelism leaves it on a rank: rows that `fully_shard` divides, and numbers in each."""

    rows: int
    width: int

    def padded(self, ranks: int) -> int:
        """Return its numbers with the rows that make it divide evenly."""
        return -(-self.rows // ranks) * ranks * self.width

    def local(self, ranks: int, index: int) -> int:
        """Return the numbers that rank `index` of `ranks` holds."""
        each = -(-self.rows // ranks)
        return min(max(self.rows - index * each, 0), each) * self.width


@dataclass(frozen=True)
class Group:
    """Modules that are gathered together."""

    modules: tuple[str, ...]
    weights: tuple[Weight, ...]
    #: Freed after its forward.
    reshards: bool


class _Step:
    """Replays a step; the state is bytes by part."""

    def __init__(self, run: RunConfig, args: LlamaArgs, rank: int, device: str) -> None:
        t, mesh, batch = run.training, run.mesh, run.batch
        self.run, self.args, self.rank, self.device = run, args, rank, device
        self.shards, self.shard = mesh.weight_shards, rank // mesh.tensor % mesh.weight_shards
        self.master, self.low, self.reduce = (
            _BYTES[name] for name in (t.dtype, t.mixed_precision_param, t.mixed_precision_reduce)
        )
        tokens = batch.micro_batch_size // run.pipeline.microbatches * batch.seq_len // mesh.context
        self.shape = Shape(tokens, args, self.low, mesh.tensor)
        self.moments: list[Moment] = []
        self.state = Counter[str]()
        #: Whole gradients not yet reduced, of groups that accumulate.
        self.unreduced: dict[Group, int] = {}
        self.gathered: set[Group] = set()
        self.has_gradient: set[Group] = set()
        self.groups = self._groups()

    # What the run consists of

    def _groups(self) -> list[Group]:
        """Return the FSDP groups in the order they last run, as `ModelSpec.fsdp_units`."""
        a = self.args
        units = self.run.spec.fsdp_groups(a)
        if self.run.training.fsdp_units == "root":
            units = [tuple(name for unit in units for name in unit)]
        given = self.run.training.reshard_after_forward
        found = []
        for index, unit in enumerate(units):
            reshards = index < len(units) - 2 if given == "default" else given != "never"
            weights = tuple(weight for name in unit for weight in self._weights(name))
            found.append(Group(unit, weights, reshards))
        return found

    def _weights(self, module: str) -> list[Weight]:
        a, tp = self.args, self.run.mesh.tensor
        vocab = a.n_vocab // tp
        if module in ("tok_embeddings", "output"):
            return [] if a.tied and module == "output" else [Weight(vocab, a.dim)]
        if module == "norm":
            return [Weight(a.dim, 1)]
        return list(_block_weights(a, tp))

    # The step

    def memory(self) -> RankMemory:
        self.state["parameters"] = self._shards(lambda w: w.padded(self.shards) // self.shards * self.master)
        self.state["parameters"] += 4 * self.args.head_dim * self.args.max_seq_len  # tables of cosines and sines
        self.state["optimizer"] = self._shards(self._optimizer_bytes)
        batches = min(self.run.batch.accumulation, 2)
        for index in range(batches):
            self._forward()
            self._backward(index == batches - 1 or self.run.training.gradient_sync == "every")
        self._emit("optimizer", "", {})
        return RankMemory(self.rank, tuple(self.moments))

    def _shards(self, size) -> int:
        return sum(size(weight) for group in self.groups for weight in group.weights)

    def _optimizer_bytes(self, weight: Weight) -> int:
        return 2 * self.master * weight.local(self.shards, self.shard)

    def _emit(self, phase: str, module: str, more: dict[str, int]) -> None:
        parts = {name: self.state[name] + more.get(name, 0) for name in {**self.state, **more}}
        self.moments.append(Moment(phase, module, {name: size for name, size in parts.items() if size}))

    def _forward(self) -> None:
        previous = 0  # the buffer of the last all-gather lives until the next one
        for group in sorted(self.groups, key=lambda group: min(map(self._position, group.modules))):
            first = self._gather("forward", group, previous) if group not in self.gathered else previous
            previous = first
            for module in sorted(group.modules, key=self._position):
                cost = self._cost(module)
                if cost is None:
                    continue
                self._emit(
                    "forward",
                    self._label(module),
                    {**self._working(module, cost.forward.total, cost.kept), "communication": previous},
                )
                self._keep(module, cost, 1)
            if group.reshards:
                self._free(group)

    def _backward(self, reduces: bool) -> None:
        ahead = reduced = 0
        order = [group for group in self.groups if "output" not in group.modules or len(self.groups) == 1]
        head = next(group for group in self.groups if "output" in group.modules)
        groups = [head, *reversed(order)] if len(self.groups) > 1 else self.groups
        for index, group in enumerate(groups):
            if group not in self.gathered:
                self._gather("backward", group, ahead, begun=bool(ahead))
            following = groups[index + 1] if index + 1 < len(groups) else None
            ahead = self._buffer(following) if following and following not in self.gathered else 0
            made = 0
            for module in sorted(group.modules, key=self._position, reverse=True):
                cost = self._cost(module)
                if cost is None:
                    continue
                self._keep(module, cost, -1)
                self._emit(
                    "backward",
                    self._label(module),
                    {
                        **self._working(module, cost.backward.working, cost.kept),
                        "communication": ahead + reduced + made + cost.backward.weights,
                    },
                )
                made += cost.weights
            self._free(group)
            reduced = self._reduce(group, made, ahead, reduced, reduces)

    def _gather(self, phase: str, group: Group, held: int, begun: bool = False) -> int:
        """Gather a group's weights; return the size of the buffer."""
        buffer = self._buffer(group)
        self.gathered.add(group)
        if not begun:
            self._emit(phase, self._label(group.modules[0]), {"communication": held + buffer + buffer // self.shards})
        self.state["gathered weights"] += self._whole(group)
        self._emit(phase, self._label(group.modules[0]), {"communication": buffer})
        return buffer

    def _buffer(self, group: Group) -> int:
        return self._whole(group) if self.shards > 1 else 0

    def _whole(self, group: Group) -> int:
        return sum(weight.padded(self.shards) for weight in group.weights) * self.low

    def _free(self, group: Group) -> None:
        if group in self.gathered:
            self.gathered.remove(group)
            self.state["gathered weights"] -= self._whole(group)

    def _reduce(self, group: Group, made: int, ahead: int, held: int, reduces: bool) -> int:
        """Reduce a group's gradients; return the size of the buffer, which lives until the next one."""
        numbers = sum(weight.rows * weight.width for weight in group.weights)
        padded = sum(weight.padded(self.shards) for weight in group.weights)
        module = self._label(group.modules[0])
        before = self.unreduced.pop(group, 0)
        self.state["communication"] -= before
        if not reduces:
            after = numbers * self.reduce
            copy = after if self.reduce != self.low and not before else 0
            self._emit("backward", module, {"communication": ahead + held + before + made + copy})
            self.unreduced[group] = after
            self.state["communication"] += after
            return held
        whole, part = padded * self.reduce, padded // self.shards * self.reduce
        if before:
            made = before
        scaled = whole if self.shards == 1 and self.run.mesh.world_size > 1 else 0
        self._emit("backward", module, {"communication": ahead + made + whole})
        self._emit("backward", module, {"communication": ahead + whole + part + scaled})
        if group not in self.has_gradient:
            self.has_gradient.add(group)
            self.state["gradients"] += padded // self.shards * self.master
        return whole

    # Modules

    def _position(self, module: str) -> int:
        order = {"tok_embeddings": -1, "norm": self.args.n_layers, "output": self.args.n_layers + 1}
        return order[module] if module in order else int(module.rpartition(".")[2])

    def _label(self, module: str) -> str:
        return "output" if module == "norm" else module

    def _cost(self, module: str) -> ModuleMemory | None:
        """Return what a module needs; the norm counts with the head."""
        if module == "norm":
            return None
        if module == "output":
            return _head(self.shape, self.run.training.loss_chunks)
        if module == "tok_embeddings":
            hidden = self.shape.tokens * self.args.dim * self.low
            return ModuleMemory(
                0,
                0,
                _peak(hidden),
                _peak(hidden, self.args.n_vocab * self.args.dim * self.low),
                self.args.n_vocab * self.args.dim * self.low,
                hidden,
            )
        return _block(self.shape, self._mode(self._position(module)))

    def _mode(self, index: int) -> str:
        ac = self.run.activation_checkpoint
        if ac.mode in ("none", "budget") or ac.mode == "full":
            return "full" if ac.mode == "full" else "none"
        if ac.selective_ac_option == "op":
            return "op"
        return "none" if (index + 1) % int(ac.selective_ac_option) else "full"

    def _working(self, module: str, working: int, kept: int) -> dict[str, int]:
        part = "logits and loss" if module == "output" else "working memory"
        return {part: working, "activations": kept}

    def _keep(self, module: str, cost: ModuleMemory, sign: int) -> None:
        self.state["activations"] += sign * cost.kept


def _peak(working: int, weights: int = 0):
    from titanlite.plan.blocks import Peak

    return Peak(working, weights)


def _block_weights(a: LlamaArgs, tp: int) -> Iterator[Weight]:
    heads, groups, width = a.n_heads * a.head_dim // tp, a.kv_heads * a.head_dim // tp, a.ffn_width // tp
    yield from (Weight(heads, a.dim), Weight(groups, a.dim), Weight(groups, a.dim), Weight(a.dim, heads))
    yield from (Weight(width, a.dim), Weight(a.dim, width), Weight(width, a.dim))
    yield from [Weight(a.dim, 1)] * 2 + [Weight(a.head_dim, 1)] * (2 * a.qk_norm)


@functools.cache
def _block(shape: Shape, mode: str) -> ModuleMemory:
    return measure(*block_ops(shape), mode)


@functools.cache
def _head(shape: Shape, chunks: int) -> ModuleMemory:
    return measure(*head_ops(shape, chunks))
