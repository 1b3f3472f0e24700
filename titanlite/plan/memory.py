"""Memory of a rank by formulas: a training step replayed on sizes, at the grain of FSDP groups. No torch here.

docs/plan.md derives each formula. `titanlite.plan.trace` runs the real code instead.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.derive import RunConfig
from titanlite.models.llama import LlamaArgs
from titanlite.plan.blocks import ModuleMemory, Shape, block_ops, embedding, head_ops, measure
from titanlite.plan.parts import PARTS, Moment, RankMemory

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
        #: Reduced gradients that replicas have summed; torch holds them until the backward ends.
        self.replicated = 0
        self.groups = self._groups()
        #: In the order they run; the last norm counts with the head.
        self.modules = sorted((name for group in self.groups for name in group.modules), key=self._position)
        self.group_of = {name: group for group in self.groups for name in group.modules}

    # What the run consists of

    def _groups(self) -> list[Group]:
        """Return the FSDP groups in the order they last run, as `ModelSpec.fsdp_units`."""
        a = self.args
        units = self.run.spec.fsdp_groups(a)
        if self.run.training.fsdp_units == "root":
            units = [sum(units, ())]
        given = self.run.training.reshard_after_forward
        found = []
        for index, unit in enumerate(units):
            reshards = index < len(units) - 2 if given == "default" else given != "never"
            weights = tuple(weight for name in unit for weight in self._weights(name))
            modules = sorted((name for name in unit if name != "norm"), key=self._position)
            found.append(Group(tuple(modules), weights, reshards))
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

    def _emit(self, phase: str, module: str, *more: dict[str, int]) -> None:
        parts = sum(map(Counter, more), self.state.copy())
        self.moments.append(Moment(phase, module, {name: parts[name] for name in PARTS if parts[name]}))

    def _forward(self) -> None:
        buffer = 0  # the buffer of an all-gather lives until the next one
        for module in self.modules:
            group = self.group_of[module]
            if group not in self.gathered:
                buffer = self._gather("forward", group, buffer)
            cost = self._cost(module)
            working = self._working(module, cost.forward.total)
            if module == "output" and self.run.training.loss_chunks == 1:
                # The loss comes after the model's forward, whose end frees the buffer.
                logits = self.shape.tokens * (self.args.n_vocab // self.shape.tp + self.args.dim) * self.low
                self._emit("forward", module, {"logits and loss": logits, "communication": buffer})
                buffer = 0
            self._emit("forward", module, working, {"activations": cost.kept, "communication": buffer})
            self.state["activations"] += cost.kept
            if group.reshards and module == group.modules[-1]:
                self._free(group)

    def _backward(self, reduces: bool) -> None:
        ahead = reduced = 0
        made = Counter[Group]()
        order = sorted(self.groups, key=lambda group: self.modules.index(group.modules[-1]))
        for module in reversed(self.modules):
            group, cost = self.group_of[module], self._cost(module)
            if module == group.modules[-1]:
                if group not in self.gathered:
                    self._gather("backward", group, ahead, begun=bool(ahead))
                following = order[order.index(group) - 1]  # the first has none before it
                ahead = self._buffer(following) if following is not order[-1] and following not in self.gathered else 0
            self.state["activations"] -= cost.kept
            # The gradient of a tied weight is added to the other one, outside of both.
            weights = cost.backward.weights + (made[group] if module == "tok_embeddings" else 0)
            communication = ahead + reduced + sum(made.values()) + weights
            working = self._working(module, cost.backward.working)
            self._emit("backward", module, working, {"activations": cost.kept, "communication": communication})
            made[group] += cost.weights if module != "tok_embeddings" or not made[group] else 0
            if module == group.modules[0]:
                self._free(group)
                reduced = self._reduce(group, made.pop(group), ahead, reduced, reduces)
        self.state["communication"] -= self.replicated
        self.replicated = 0

    def _gather(self, phase: str, group: Group, held: int, begun: bool = False) -> int:
        """Gather a group's weights; return the size of the buffer."""
        buffer = self._buffer(group)
        self.gathered.add(group)
        if not begun:
            self._emit(phase, group.modules[0], {"communication": held + buffer + buffer // self.shards})
        self.state["gathered weights"] += self._whole(group)
        self._emit(phase, group.modules[0], {"communication": buffer})
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
        module = group.modules[0]
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
        elif self.run.mesh.dp_replicate > 1:
            self.replicated += part
            self.state["communication"] += part
        return whole

    # Modules

    def _position(self, module: str) -> int:
        order = {"tok_embeddings": -1, "norm": self.args.n_layers, "output": self.args.n_layers + 1}
        return order[module] if module in order else int(module.rpartition(".")[2])

    def _cost(self, module: str) -> ModuleMemory:
        """Return what a module needs."""
        if module == "output":
            return _head(self.shape, self.run.training.loss_chunks)
        if module == "tok_embeddings":
            return embedding(self.shape)
        return _block(self.shape, self._mode(self._position(module)))

    def _mode(self, index: int) -> str:
        ac = self.run.activation_checkpoint
        if ac.mode in ("none", "budget") or ac.mode == "full":
            return "full" if ac.mode == "full" else "none"
        if ac.selective_ac_option == "op":
            return "op"
        return "none" if (index + 1) % int(ac.selective_ac_option) else "full"

    def _working(self, module: str, size: int) -> dict[str, int]:
        return {"logits and loss" if module == "output" else "working memory": size}


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
