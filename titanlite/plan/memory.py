"""Memory of a rank by formulas: a training step replayed on sizes, at the grain of FSDP groups.

No torch here.

docs/plan.md derives each formula. `titanlite.tools.plan.trace` runs the real code instead.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from msgspec.structs import replace as replace_fields

from titanlite.features import float8_of
from titanlite.features.float8.choice import Float8Choice, converted_names
from titanlite.models.linears import linears_of
from titanlite.models.llama import LlamaArgs
from titanlite.models.mixtral import MixtralArgs
from titanlite.parallel.pipeline_split import split_stages
from titanlite.plan.blocks import (
    Loss,
    ModuleMemory,
    Peak,
    Repeated,
    Shape,
    block_ops,
    embedding,
    head_ops,
    measure,
    repeated,
)
from titanlite.plan.optimizer import state_bytes, step_bytes
from titanlite.plan.parts import PARTS, VOCABULARY, Moment, RankMemory
from titanlite.start.derive import MeshSizes, RunConfig

_BYTES = {"float32": 4, "bfloat16": 2}


class NoFormula(ValueError):
    """A model or setting without formulas; `titanlite.tools.plan.trace` can plan it."""


def estimate(run: RunConfig, rank: int | None = None, device: str = "cuda") -> RankMemory:
    """Return the memory of a rank over a step that is not the first, at most two micro-batches of
    it.

    rank: None for the worst. device: "cuda" or "cpu", the type that the run would have. Raises
    NoFormula for a model that is no family of `titanlite.models.llama`, and for
    `training.fsdp_units` that go by classes or sizes.
    """
    args = _planned_args(run)
    if rank is not None:
        return _Step(run, args, rank, device).memory()
    ranks = range(
        0, run.mesh.world_size, run.mesh.world_size // run.mesh.pipeline
    )  # the first of each stage
    return max(
        (_Step(run, args, rank, device).memory() for rank in ranks),
        key=lambda memory: memory.peak.total,
    )


def _planned_args(run: RunConfig) -> LlamaArgs:
    """Return the model's arguments with a vocabulary. Raises NoFormula."""
    args = run.model_args()
    if not isinstance(args, LlamaArgs) or args.norm_type not in ("rmsnorm", "fused_rmsnorm"):
        raise NoFormula(f"there are no formulas for the memory of this model ({run.model.name})")
    if run.training.fsdp_units not in ("block", "root"):
        raise NoFormula(
            f"there are no formulas for training.fsdp_units = {run.training.fsdp_units!r}"
        )
    return replace(args, vocab_size=args.vocab_size or VOCABULARY)


def worst_rank(run: RunConfig, device: str = "cuda") -> int:
    """Return the rank with the largest peak by formulas. Raises NoFormula as `estimate`."""
    return estimate(run, None, device).rank


@dataclass(frozen=True)
class Weight:
    """A parameter as tensor and expert parallelism leave it on a rank: rows that `fully_shard`
    divides over ranks.
    """

    rows: int
    #: Numbers in each row.
    width: int
    shards: int
    #: Of a block, with more than one dimension; and with the last two of this size, where several
    #: are stacked.
    matrix: tuple[int, int] | None = None
    #: Gathered in float8.
    float8: bool = False
    #: Divided along another dimension than the first: put in order by a copy.
    copied: bool = False
    #: Ranks in a row that hold the same rows of other experts.
    neighbours: int = 1

    @property
    def numbers(self) -> int:
        return self.rows * self.width

    @property
    def padded(self) -> int:
        """Its numbers with the rows that make it divide evenly."""
        return -(-self.rows // self.shards) * self.shards * self.width

    @property
    def part(self) -> int:
        """The numbers that a rank holds, padded."""
        return self.padded // self.shards

    def local(self, index: int) -> int:
        """Return the numbers that rank `index` of those that shard weights holds."""
        each = -(-self.rows // self.shards)
        return min(max(self.rows - index // self.neighbours * each, 0), each) * self.width


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
        converted = converted_names(self._float8_choices())
        kinds = frozenset(
            name.removeprefix("layers.0.") for name in converted if name.startswith("layers.0.")
        )
        self.shape = Shape(tokens, args, self.low, mesh.tensor, mesh.context, mesh.expert, kinds)
        self.offloads = t.enable_cpu_offload and device != "cpu"
        self.moments: list[Moment] = []
        self.state = Counter[str]()
        self.host = Counter[str]()
        #: Activations in host memory, and those of them that are on the device too; the last one
        #: sent.
        self.away = self.under_way = self.sent = 0
        #: Whole gradients not yet reduced, of groups that accumulate.
        self.unreduced: dict[Group, int] = {}
        self.gathered: set[Group] = set()
        #: Parts of gathered weights that stay between forward and backward, where few ranks divide
        #: them.
        self.divided: dict[Group, int] = {}
        self.has_gradient: set[Group] = set()
        #: Reduced gradients that replicas have summed; torch holds them until the backward ends.
        self.replicated = 0
        self.stages = self._stages()
        mine = {module for stage in self.stages for module in stage}
        self.groups = self._groups(mine)
        self.group_of = {name: group for group in self.groups for name in group.modules}

    # What the run consists of

    def _stages(self) -> list[list[str]]:
        """Return the modules of each of this rank's pipeline stages, in the order they run, without
        the last norm.
        """
        costs = list(self.run.spec.pipeline_costs(self.args, self.args.max_seq_len))  # type: ignore[misc]
        pp, e = self.run.mesh.pipeline, self.run.experimental
        stages: list[Sequence[str]] = [costs]
        if pp > 1:
            full = self.run.spec.pipeline_costs(self.args, self.args.max_seq_len)  # type: ignore[misc]
            layout = split_stages(
                full, pp, e.pipeline_parallel_schedule, e.pipeline_parallel_split_points
            )
            stages = [layout.stages[i] for i in layout.on(self.pipeline_rank)]
        return [
            [name for name in stage if name != "norm" or "output" not in stage] for stage in stages
        ]

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.run.mesh.world_size // self.run.mesh.pipeline)

    def _groups(self, mine: set[str]) -> list[Group]:
        """Return the FSDP groups of these modules in the order they last run, as
        `ModelSpec.fsdp_units`.
        """
        units = self.run.spec.fsdp_groups(self.args)
        if self.run.training.fsdp_units == "root":
            units = [sum(units, ())]
        units = [
            found
            for unit in units
            if (
                found := tuple(
                    n
                    for n in unit
                    if n in mine | {"norm"}
                    and n != "norm"
                    or n == "norm"
                    and mine & {"norm", "output"}
                )
            )
        ]
        given = self.run.training.reshard_after_forward
        groups = []
        for index, unit in enumerate(units):
            reshards = index < len(units) - 2 if given == "default" else given != "never"
            weights = tuple(weight for name in unit for weight in self._weights(name))
            modules = sorted((name for name in unit if name in mine), key=self._position)
            groups.append(Group(tuple(modules), weights, reshards))
        return groups

    def _weights(self, module: str) -> list[Weight]:
        a, mesh, shards = self.args, self.run.mesh, self.shards
        vocab = a.n_vocab // mesh.tensor
        if module in ("tok_embeddings", "output"):
            return [] if a.tied and module == "output" else [Weight(vocab, a.dim, shards)]
        if module == "norm":
            return [Weight(a.dim, 1, shards)]
        return list(
            _block_weights(
                a, mesh, self.shape.float8 if self.run.float8.enable_fsdp_float8_all_gather else ()
            )
        )

    def _float8_choices(self) -> list[Float8Choice]:
        float8 = float8_of(self.run.float8)
        if float8 is None:
            return []
        return float8.choices(linears_of(self.run.spec, self.args, self.run.mesh.tensor))

    # The step

    def memory(self) -> RankMemory:
        weights = [weight for group in self.groups for weight in group.weights]
        optimizer = self.run.optimizer
        masters = sum(weight.part for weight in weights) * self.master
        state = sum(
            state_bytes(weight, optimizer, self.master) * weight.local(self.shard)
            for weight in weights
        )
        state += 4 * sum(weight.local(self.shard) for weight in weights) * bool(optimizer.ema_decay)
        place = self.host if self.offloads else self.state
        place["parameters"] += masters
        place["optimizer"] += round(state)
        if self.offloads:
            place["gradients"] += masters
        self.state["parameters"] += (
            4 * self.args.head_dim * self.args.max_seq_len
        )  # tables of cosines and sines
        if self.run.mesh.pipeline > 1:
            self._pipeline()
        else:
            batches = min(self.run.batch.accumulation, 2)
            for index in range(batches):
                self._forward(self.stages[0])
                self._backward(
                    self.stages[0],
                    index == batches - 1 or self.run.training.gradient_sync == "every",
                )
        temporary = (
            0
            if self.offloads
            else step_bytes(weights, self.shard, optimizer, self.master, self.device)
        )
        self._emit("optimizer", "", {"working memory": temporary})
        return RankMemory(self.rank, tuple(self.moments), dict(self.host))

    def _pipeline(self) -> None:
        from titanlite.plan.pipeline import actions

        run, ranks = self.run, self.run.mesh.pipeline
        schedule = run.experimental.pipeline_parallel_schedule
        pieces = run.pipeline.microbatches * run.batch.accumulation
        # A rank has receive buffers for each piece: inputs, and gradients of outputs.
        received = sum(
            ("tok_embeddings" not in stage) + ("output" not in stage) for stage in self.stages
        )
        self.state["communication"] += pieces * received * self.shape.hidden
        replayed = pieces if schedule in ("GPipe", "LoopedBFS") else min(pieces, 4 * ranks)
        for kind, stage in actions(schedule, ranks, self.pipeline_rank, len(self.stages), replayed):
            first = (
                "tok_embeddings" in self.stages[stage]
            )  # it has no first half, and all in the second
            if kind == "F":
                self._forward(self.stages[stage])
            elif kind == "I":
                self._first_half(() if first else self.stages[stage])
            else:
                self._backward(self.stages[stage], second_half=kind == "W" and not first)
        for group in self.groups:
            self._free(group)
            self._reduce(group, 0, 0, 0, True)

    def _emit(self, phase: str, module: str, *more: dict[str, int]) -> None:
        parts = sum(map(Counter, more), self.state.copy())
        self.moments.append(
            Moment(phase, module, {name: parts[name] for name in PARTS if parts[name]})
        )

    def _forward(self, modules: list[str]) -> None:
        buffer = 0  # the buffer of an all-gather lives until the next one
        for module in modules:
            group = self.group_of[module]
            if group not in self.gathered:
                buffer = self._gather("forward", group, buffer)
            cost, kept = self._cost(module), self._kept(module)
            working = self._working(module, cost.forward.total + cost.kept - kept)
            if module == "output" and self.run.training.loss_chunks == 1:
                # The loss comes after the model's forward, whose end frees the buffer.
                logits = (
                    self.shape.tokens
                    * (self.args.n_vocab // self.shape.tp + self.args.dim)
                    * self.low
                )
                self._emit("forward", module, {"logits and loss": logits, "communication": buffer})
                buffer = 0
            self._emit(
                "forward", module, working, self._kept_parts(module), {"communication": buffer}
            )
            self._keep(module, kept)
            if group.reshards and module == group.modules[-1]:
                self._free(group)
                if isinstance(
                    among := self.run.training.reshard_after_forward, int
                ):  # each keeps its part of these
                    self.divided[group] = self._whole(group) // among
                    self.state["gathered weights"] += self.divided[group]

    def _first_half(self, modules: Sequence[str]) -> None:
        """Make gradients of inputs alone; all that those of weights need lives on."""
        for module in reversed(modules):
            cost = self._cost(module)
            self._emit("backward", module, self._working(module, cost.split.working))
            self.state["activations"] += cost.pending

    def _backward(
        self, modules: list[str], reduces: bool = False, second_half: bool = False
    ) -> None:
        ahead = reduced = 0
        made = Counter[Group]()
        order = sorted(
            {self.group_of[name] for name in modules},
            key=lambda group: modules.index(group.modules[-1]),
        )
        for module in reversed(modules):
            group, cost, kept = self.group_of[module], self._cost(module), self._kept(module)
            if second_half:  # frees what gradients of weights need as it makes them, one by one
                cost = cost._replace(backward=Peak(cost.pending))
                self.state["activations"] -= cost.pending
            if module == group.modules[-1]:
                if group not in self.gathered:
                    self._gather("backward", group, ahead, begun=bool(ahead))
                following = order[order.index(group) - 1]  # the first has none before it
                ahead = (
                    self._buffer(following)
                    if following is not order[-1] and following not in self.gathered
                    else 0
                )
            self._keep(module, -kept)
            # The gradient of a tied weight is added to the other one, outside of both.
            weights = cost.backward.weights + (made[group] if module == "tok_embeddings" else 0)
            communication = ahead + reduced + sum(made.values()) + weights
            working = self._working(module, cost.backward.working + cost.kept - kept)
            self._emit(
                "backward",
                module,
                working,
                self._kept_parts(module),
                {"communication": communication},
            )
            made[group] += cost.weights if module != "tok_embeddings" or not made[group] else 0
            if module == group.modules[0]:
                if self.run.mesh.pipeline == 1:
                    self._free(group)
                reduced = self._reduce(group, made.pop(group), ahead, reduced, reduces)
        self.state["communication"] -= self.replicated
        self.replicated = 0

    def _gather(self, phase: str, group: Group, held: int, begun: bool = False) -> int:
        """Gather a group's weights; return the size of the buffer."""
        buffer, copied = self._buffer(group), self._whole(group, copied=True)
        self.gathered.add(group)
        if not begun:
            parts = sum(weight.part for weight in group.weights) * (
                self.low + self.master * self.offloads
            )
            self._emit(
                phase,
                group.modules[0],
                {"communication": held + buffer + (parts if self.shards > 1 else 0)},
            )
        self.state["gathered weights"] += self._whole(group) - self.divided.pop(group, 0)
        self._emit(phase, group.modules[0], {"communication": buffer + copied})
        return buffer

    def _buffer(self, group: Group) -> int:
        return self._whole(group) if self.shards > 1 else 0

    def _whole(self, group: Group, copied: bool = False) -> int:
        """Return the bytes of gathered weights. copied: of those that are put in order by a
        copy.
        """
        weights = (weight for weight in group.weights if weight.copied or not copied)
        if (
            self.run.mesh.world_size == self.run.mesh.tensor
            and self.master == self.low
            and not self.offloads
        ):
            weights = (
                weight for weight in weights if weight.float8
            )  # products take the others as they are
        return sum(weight.padded * (1 if weight.float8 else self.low) for weight in weights)

    def _free(self, group: Group) -> None:
        if group in self.gathered:
            self.gathered.remove(group)
            self.state["gathered weights"] -= self._whole(group)

    def _reduce(self, group: Group, made: int, ahead: int, held: int, reduces: bool) -> int:
        """Reduce a group's gradients; return the size of the buffer, which lives until the next
        one.
        """
        numbers = sum(weight.numbers for weight in group.weights)
        module, before = group.modules[0], self.unreduced.pop(group, 0)
        self.state["communication"] -= before
        if not reduces:
            after = numbers * self.reduce
            # One parameter's at a time is there in both dtypes.
            copy = (
                0
                if before or self.reduce == self.low
                else after - made + self.low * max(weight.numbers for weight in group.weights)
            )
            self._emit("backward", module, {"communication": ahead + held + before + made + copy})
            self.unreduced[group] = after
            self.state["communication"] += after
            return held
        padded, part = (
            sum(w.padded for w in group.weights),
            sum(w.part for w in group.weights) * self.reduce,
        )
        whole, made = padded * self.reduce, before or made
        # Weights divided along another dimension are put in order one by one.
        ordered = max(
            (weight.numbers * self.low for weight in group.weights if weight.copied), default=0
        )
        scaled = whole if self.shards == 1 and self.run.mesh.world_size > 1 else 0
        if ordered:
            self._emit("backward", module, {"communication": ahead + made + ordered})
        self._emit("backward", module, {"communication": ahead + made + whole})
        self._emit("backward", module, {"communication": ahead + whole + part + scaled})
        if self.offloads or self.run.optimizer.early_step_in_backward:
            return whole
        if group not in self.has_gradient:
            self.has_gradient.add(group)
            self.state["gradients"] += part // self.reduce * self.master
        elif self.run.mesh.dp_replicate > 1:
            self.replicated += part
            self.state["communication"] += part
        return whole

    # Modules

    def _position(self, module: str) -> int:
        order = {"tok_embeddings": -1, "norm": self.args.n_layers, "output": self.args.n_layers + 1}
        return order[module] if module in order else int(module.rpartition(".")[2])

    def _cost(self, module: str) -> ModuleMemory:
        """Return the needs of a module; the last norm counts with the head."""
        if module == "output":
            return _head(self.shape, loss_of(self.run))
        if module == "tok_embeddings":
            return embedding(self.shape)
        return _block(self.shape, self._mode(self._position(module)))

    def _kept(self, module: str) -> int:
        """Return the bytes that a module keeps on the device, without an input that is a buffer of
        the pipeline.
        """
        kept = self._cost(module).kept
        first = any(module == stage[0] for stage in self.stages) and module != "tok_embeddings"
        return kept - self.shape.hidden if first else kept

    def _kept_parts(self, module: str) -> Counter[str]:
        """Return the bytes that a module keeps by part: of the head only the hidden states are
        activations.
        """
        kept, loss = self._kept(module), 0
        if module == "output":
            t = self.run.training
            loss = self._cost(module).kept - self.shape.hidden * (
                1 + (self.shape.tp == 1 == t.loss_chunks)
            )
        return Counter({"activations": kept - loss, "logits and loss": loss})

    def _keep(self, module: str, size: int) -> None:
        """Keep a module's tensors until the backward, or (negative) no longer; those of blocks may
        be offloaded.
        """
        if (
            not module.startswith("layers.")
            or not self.run.activation_checkpoint.offload
            or self.device == "cpu"
        ):
            for part, bytes_ in self._kept_parts(module).items():
                self.state[part] += bytes_ if size > 0 else -bytes_
            return
        self.away += size
        # Two tensors are still on their way in the forward, and one is fetched ahead in the
        # backward.
        if size < 0:
            under_way = self.shape.hidden * (self.away > 0)
        elif self._mode(self._position(module)) == "none":
            self.sent = self.shape.tokens * self.args.ffn_width // self.shape.tp * self.shape.size
            under_way = 2 * self.sent
        else:
            self.sent, under_way = self.shape.hidden, self.shape.hidden + self.sent
        self.state["activations"] += under_way - self.under_way
        self.under_way = under_way
        self.host["activations"] = max(self.host["activations"], self.away)

    def _mode(self, index: int) -> str:
        ac = self.run.activation_checkpoint
        if ac.mode in ("none", "budget", "full"):
            return "full" if ac.mode == "full" else "none"
        if ac.selective_ac_option == "op":
            return "op"
        return "none" if (index + 1) % int(ac.selective_ac_option) else "full"

    def _working(self, module: str, size: int) -> dict[str, int]:
        return {"logits and loss" if module == "output" else "working memory": size}


def loss_of(run: RunConfig) -> Loss:
    """Return how the run computes its loss."""
    t = run.training
    divided: Literal["whole", "in place", "compiled"] = "in place"
    if (
        not t.enable_loss_parallel or t.loss != "cross_entropy"
    ):  # a function of the user takes whole logits
        divided = "whole"
    elif t.compile and "loss" in run.compile.components:
        divided = "compiled"
    return Loss(t.loss_chunks, divided, bool(t.z_loss or t.label_smoothing), run.mesh.pipeline > 1)


def _block_weights(a: LlamaArgs, mesh: MeshSizes, float8: Collection[str]) -> Iterator[Weight]:
    tp, shards = mesh.tensor, mesh.weight_shards
    heads, groups, width = (
        a.n_heads * a.head_dim // tp,
        a.kv_heads * a.head_dim // tp,
        a.ffn_width // tp,
    )
    sizes = {
        "wq": (heads, a.dim),
        "wk": (groups, a.dim),
        "wv": (groups, a.dim),
        "wo": (a.dim, heads),
    }
    matrices = {f"attention.{name}": size for name, size in sizes.items()}
    if not isinstance(a, MixtralArgs):
        matrices |= {"feed_forward.w1": (width, a.dim), "feed_forward.w2": (a.dim, width)}
        matrices["feed_forward.w3"] = (width, a.dim)
    else:
        matrices["feed_forward.gate"] = (a.n_experts, a.dim)
        held, over = a.n_experts // mesh.expert, shards // mesh.expert
        for rows, columns in ((width, a.dim), (a.dim, width), (width, a.dim)):
            # In expert parallelism, or where ranks cannot share whole experts, each matrix is
            # divided.
            divides = mesh.expert > 1 or (held % over and not (rows % over and columns % over))
            size = (held * rows, columns) if rows % over == 0 else (held * columns, rows)
            rows_of = size if divides else (held, rows * columns)
            yield Weight(*rows_of, over, (rows, columns), False, bool(divides), mesh.expert)
    for name, (rows, columns) in matrices.items():
        yield Weight(rows, columns, shards, (rows, columns), name in float8)
    yield from [Weight(a.dim, 1, shards)] * 2 + [Weight(a.head_dim, 1, shards)] * (2 * a.qk_norm)


@functools.cache
def _block(shape: Shape, mode: str) -> ModuleMemory:
    return measure(*block_ops(shape), mode)


@functools.cache
def _head(shape: Shape, loss: Loss) -> ModuleMemory:
    return measure(*head_ops(shape, loss))


def with_vocabulary(run: RunConfig, tokenizer_size: int | None = None) -> RunConfig:
    """Return the run with the size of its vocabulary as a key, so that no plan needs the tokenizer.

    tokenizer_size: None: the tokenizer is read if the model has no size of its own. Raises
    DataError.
    """
    size = run.model_args(tokenizer_size).vocab_size
    if size is None:
        from titanlite.data.tokenizer import load_tokenizer

        size = load_tokenizer(run.model.tokenizer_path, run.model.name).vocab_size
    return replace_fields(run, model=replace_fields(run.model, vocab_size=size))


@dataclass(frozen=True)
class KeptActivations:
    """What the blocks of the model keep for the backward, on a rank and in one micro-batch."""

    blocks: int
    #: Blocks that recompute.
    recomputing: int
    #: Bytes of all blocks, and those that they would keep without recomputation.
    kept: int
    plain: int
    #: Operators of a block that recomputes.
    operators: Repeated


def kept_activations(run: RunConfig, device: str = "cuda") -> KeptActivations:
    """Return what the blocks of a run keep. Raises NoFormula as `estimate`."""
    args = _planned_args(run)
    step = _Step(run, args, 0, device)
    modes = [step._mode(index) for index in range(args.n_layers)]
    chosen = [mode for mode in modes if mode != "none"]
    ops, _ = block_ops(step.shape)
    return KeptActivations(
        blocks=len(modes),
        recomputing=len(chosen),
        kept=sum(_block(step.shape, mode).kept for mode in modes),
        plain=len(modes) * _block(step.shape, "none").kept,
        operators=repeated(ops, chosen[0] if chosen else "none"),
    )
