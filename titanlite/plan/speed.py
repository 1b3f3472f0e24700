"""How long a step takes: a roofline over products, memory and links. No torch here.

`docs/plan.md` derives each formula. Times are seconds on the rank that the others wait for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from titanlite.config.errors import ConfigError, Problem
from titanlite.features.float8.choice import Float8Choice, choose_linears
from titanlite.models.spec import Size
from titanlite.parallel.pipeline_split import SCHEDULES, split_stages
from titanlite.plan.hardware import Cluster
from titanlite.plan.parts import VOCABULARY
from titanlite.start.derive import RunConfig
from titanlite.utils import counted

#: Parts of a step, in the order of reports. Traffic is what computing does not hide.
PARTS = (
    "matrix products",
    "attention",
    "memory traffic",  # norms, RoPE, SwiGLU, residuals, loss
    "float8 casts",
    "recomputation",
    "sharding traffic",  # all-gathers and reduce-scatters of FSDP, all-reduces of copies
    "tensor traffic",
    "context traffic",
    "expert traffic",
    "host transfers",  # offload
    "pipeline bubble",
    "optimizer",
    "launches",  # the GPU waits for the host
)


@dataclass(frozen=True)
class Speed:
    """A predicted step."""

    #: Per GPU.
    tokens_per_second: float
    #: The range that the calibration's error leaves.
    low: float
    high: float
    #: Share of the peak in bf16, by the model FLOPs that logs show.
    mfu: float
    step_seconds: float
    #: Name of `PARTS` → seconds of a step; their sum is `step_seconds`.
    parts: Mapping[str, float]
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Constants:
    """What no data sheet says; fitted by `benchmarks/plan_speed.py` on published runs."""

    #: Share of its peak that a large product in float8 reaches, in terms of the GPU's `sustained`
    #: share in bf16.
    float8: float = 0.95
    #: A product loses as much as so many more columns and rows would cost.
    edge: float = 153.0
    #: Share of the memory's bandwidth that kernels reach.
    memory: float = 0.65
    #: Passes over the outputs of a block's linears in the forward by the kernels between products;
    #: the backward has twice as many.
    passes_eager: float = 6.33
    passes_compiled: float = 2.88
    #: Share of a link's and of a network's bandwidth that collectives reach.
    link: float = 0.8
    network: float = 0.8
    #: Computing is slowed for this share of the time in which traffic runs beside it.
    contention: float = 0.131
    #: Share of tensor-parallel traffic that remains with asynchronous tensor parallelism.
    async_tensor: float = 0.4
    #: Attention is slower by this share for each doubling of the ranks that share a sequence.
    context: float = 0.185


CONSTANTS = Constants()
#: Largest relative error on the runs of the fit, each left out once, see docs/plan.md.
ERROR = 0.15
#: Published rates over predicted ones, least and most, of runs that the fit has not seen: `low` and
#: `high`.
UNSEEN = (0.85, 1.22)
#: The same on an H200 without float8, which was faster than predicted in every such run.
UNSEEN_H200 = (0.85, 1.41)

#: Seconds for which the host prepares the kernels of a block, forward and backward.
_LAUNCHES_EAGER, _LAUNCHES_COMPILED = 1.5e-3, 0.5e-3
#: Seconds that a collective takes beside its bytes, and more for each machine.
_LATENCY, _LATENCY_PER_NODE = 20e-6, 4e-6
#: Bytes that a loss moves per logit, forward and backward.
_LOSS_EAGER, _LOSS_COMPILED = 30, 14
#: Bytes that a cast to float8 moves per number, with its maximum; eager, a mean of 33 forward and
#: 35 backward.
_CAST_EAGER, _CAST_COMPILED = 34, 5
#: Bytes that the update, the norm and the clipping move per parameter.
_UPDATE_BYTES = 40
#: Steps of Muon's iteration: products of m x n and n x m, m x m and m x m, m x m and m x n.
_ITERATIONS = 5
#: Bytes per second of a host's memory, for each GPU's share of it.
_HOST_MEMORY = 25e9
#: Backward over forward: products, and attention, which computes its scores again.
_BACKWARD, _ATTENTION_BACKWARD = 2.0, 2.5


def predict(run: RunConfig, cluster: Cluster, constants: Constants = CONSTANTS) -> Speed:
    """Return the speed of a run's steps. Raises ConfigError for float8 on a GPU that has none."""
    return _Step(run, cluster, constants).speed()


class _Pass(NamedTuple):
    """Seconds of one micro-batch through the whole model in one direction."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    casts: float = 0.0

    def times(self, factor: float) -> _Pass:
        return _Pass(*(factor * seconds for seconds in self))


class _Step:
    """One step of a run; sizes are a rank's, of one micro-batch (of a pipeline: of one piece)."""

    def __init__(self, run: RunConfig, cluster: Cluster, constants: Constants) -> None:
        self.run, self.cluster, self.gpu, self.k = run, cluster, cluster.gpu, constants
        self.mesh, self.spec = run.mesh, run.spec
        args = run.model_args()
        self.args: Any = args if args.vocab_size else replace(args, vocab_size=VOCABULARY)
        self.compiled = run.training.compile and "model" in run.compile.components
        self.in_float8 = run.float8.enable_float8_linear and not run.float8.emulate
        if self.in_float8 and self.gpu.float8 is None:
            message, hint = f"{self.gpu.key} has no float8", "set it to false, or name another GPU"
            raise ConfigError([Problem("", "float8.enable_float8_linear", message, hint)])
        in_float32 = run.training.mixed_precision_param == "float32"
        #: Bytes of a number in activations and gathered weights, and FLOPs per second of the peak.
        self.itemsize, self.peak = (4, self.gpu.bf16 / 8) if in_float32 else (2, self.gpu.bf16)
        #: Micro-batches of a step, and the tokens of one on this rank.
        self.micro_batches = run.pipeline.microbatches * run.batch.accumulation
        rows = run.batch.micro_batch_size / run.pipeline.microbatches
        self.tokens = rows * run.batch.seq_len / self.mesh.context
        self.blocks = len(self.spec.block_names(self.args))
        self.base_flops = self.spec.flops_per_token(self.args, 0)
        self.attention_flops = (
            self.spec.flops_per_token(self.args, run.batch.seq_len) - self.base_flops
        )

    # Sizes

    @cached_property
    def plan(self) -> dict[str, str]:
        return self.spec.tensor_plan(self.args) if self.spec.tensor_plan else {}

    @cached_property
    def choices(self) -> list[Float8Choice]:
        if self.spec.linears is None:
            return []
        linears, tensor = self.spec.linears(self.args), self.mesh.tensor
        return choose_linears(
            linears, self.run.float8, self.plan if tensor > 1 else {}, tensor, self.spec.head
        )

    @cached_property
    def linears(self) -> list[tuple[Float8Choice, int]]:
        """The linears of all blocks, with the numbers of their weights."""
        found = [choice for choice in self.choices if self.spec.head not in choice.names]
        return [(c, c.size.in_features * c.size.out_features * len(c.names)) for c in found]

    @cached_property
    def width(self) -> int:
        """Numbers of a token between blocks."""
        head = next((choice for choice in self.choices if self.spec.head in choice.names), None)
        return head.size.in_features if head else int(getattr(self.args, "dim", 0))

    @cached_property
    def vocabulary(self) -> float:
        """Logits of a token on this rank."""
        return self.args.vocab_size / self.mesh.tensor

    @cached_property
    def experts(self) -> tuple[float, float]:
        """Parameters of all experts, and FLOPs of one token's in the forward: products outside of
        `choices`.
        """
        if self.spec.experts is None and self.spec.linears is not None:
            return 0.0, 0.0
        linears = (
            sum(c.size.in_features * c.size.out_features * len(c.names) for c in self.choices)
            * self.mesh.tensor
        )
        flops = max(self.base_flops / 3 - 2 * linears, 0.0)
        if self.spec.experts is None:
            return 0.0, flops
        count = min(self.spec.experts(self.args).values())
        return flops / 2 * count / getattr(self.args, "top_k", 1), flops

    @cached_property
    def outputs(self) -> float:
        """Numbers that the linears of all blocks put out for a token."""
        found = sum(c.size.out_features * len(c.names) for c, _ in self.linears)
        if self.spec.experts is not None:
            per_expert = 2 * getattr(self.args, "ffn_width", 0) + 2 * self.width
            found += self.blocks * getattr(self.args, "top_k", 1) * per_expert
        return found

    @cached_property
    def stage_share(self) -> float:
        """This rank's share of the model's FLOPs: that of the slowest rank of a pipeline."""
        if self.mesh.pipeline == 1 or self.spec.pipeline_costs is None:
            return 1.0
        experimental, costs = (
            self.run.experimental,
            self.spec.pipeline_costs(self.args, self.run.batch.seq_len),
        )
        ranks, schedule = self.mesh.pipeline, experimental.pipeline_parallel_schedule
        layout = split_stages(costs, ranks, schedule, experimental.pipeline_parallel_split_points)
        stages = [sum(costs[name].flops for name in stage) for stage in layout.stages]
        flops = [sum(stages[stage] for stage in layout.on(rank)) for rank in range(ranks)]
        return max(flops) / sum(flops)

    @cached_property
    def sharded(self) -> list[tuple[float, int, int]]:
        """What this rank's groups shard: parameters of its stage, ranks, and their distance.

        Expert parallelism leaves a rank a part of the experts, which fewer ranks share.
        """
        mesh, experts = self.mesh, self.experts[0]
        dense = (self.spec.count_parameters(self.args) - experts) / mesh.tensor * self.stage_share
        experts *= self.stage_share / mesh.expert
        if mesh.expert == 1:
            return [(dense + experts, mesh.weight_shards, mesh.tensor)]
        over = mesh.weight_shards // mesh.expert
        return [
            (dense, mesh.weight_shards, mesh.tensor),
            (experts, over, mesh.tensor * mesh.expert),
        ]

    @cached_property
    def owned(self) -> float:
        """Parameters that this rank updates."""
        return sum(parameters / ranks for parameters, ranks, _ in self.sharded)

    # Computing

    def product(self, rows: float, k: float, n: float, float8: bool = False) -> float:
        """Return the seconds of one product."""
        peak = (self.k.float8 * self.gpu.float8 if float8 else self.peak) * self.gpu.sustained  # type: ignore[operator]
        return 2 * math.prod(size + self.k.edge for size in (rows, k, n)) / peak

    def moved(self, size: float) -> float:
        """Return the seconds in which kernels read or write so many bytes."""
        return size / (self.gpu.bandwidth * self.k.memory)

    @cached_property
    def block_forward(self) -> _Pass:
        """All blocks, forward."""
        products = self.experts[1] * self.tokens / (self.peak * self.gpu.sustained * 0.8)
        for choice, _ in self.linears:
            k, n, count = choice.size.in_features, choice.size.out_features, len(choice.names)
            products += count * self.product(self.tokens, k, n, self.in_float8 and choice.converted)
        window = min(
            getattr(self.args, "window", None) or self.run.batch.seq_len, self.run.batch.seq_len
        )
        pairs = 1 - window / (2 * self.run.batch.seq_len)
        flops = self.attention_flops / 3 * pairs * self.tokens / self.mesh.tensor
        attention = (
            flops
            / (self.peak * self.gpu.attention)
            * (1 + self.k.context * math.log2(self.mesh.context))
        )
        passes = self.k.passes_compiled if self.compiled else self.k.passes_eager
        memory = self.moved(passes * self.itemsize * self.tokens * self.outputs)
        return _Pass(products, attention, memory, self.casts[0])

    @cached_property
    def casts(self) -> tuple[float, float]:
        """Seconds of casts to float8, forward and backward.

        The backward casts the gradients of outputs, and copies inputs to the other order; eager
        code casts all anew for each of its two products.
        """
        forward = backward = 0.0
        for c, weights in self.linears:
            if self.in_float8 and c.converted:
                inputs, outputs = (
                    len(c.names) * self.tokens * n
                    for n in (self.cast_inputs(c), c.size.out_features)
                )
                weights *= not self.run.float8.enable_fsdp_float8_all_gather
                forward += inputs + weights
                backward += (
                    outputs + inputs / 2 if self.compiled else 2 * outputs + inputs + weights
                )
        size = _CAST_COMPILED if self.compiled else _CAST_EAGER
        return self.moved(size * forward), self.moved(size * backward)

    def cast_inputs(self, choice: Float8Choice) -> float:
        """Return how many of a token's numbers are cast for the input of a linear.

        Compiled linears with the same input share the cast; under tensor parallelism each rank
        casts its tokens before it gathers them.
        """
        columns = [c.names[0] for c in self.choices if self.plan.get(c.names[0]) == "colwise"]
        if choice.names[0] not in columns:
            return choice.size.in_features
        takers = [
            name
            for name in columns
            if name.rpartition(".")[0] == choice.names[0].rpartition(".")[0]
        ]
        return choice.size.in_features / self.mesh.tensor / (len(takers) if self.compiled else 1)

    @cached_property
    def block_backward(self) -> _Pass:
        """All blocks, backward."""
        f = self.block_forward
        return _Pass(
            f.products * _BACKWARD, f.attention * _ATTENTION_BACKWARD, f.memory * 2, self.casts[1]
        )

    @cached_property
    def head(self) -> _Pass:
        """Head and loss, forward; the backward takes twice that."""
        compiled = self.run.training.compile and "loss" in self.run.compile.components
        size = (_LOSS_COMPILED if compiled else _LOSS_EAGER) * self.tokens * self.vocabulary
        return _Pass(
            self.product(self.tokens, self.width or 1, self.vocabulary), memory=self.moved(size) / 3
        )

    @cached_property
    def recomputed(self) -> float:
        """Share of the blocks that run their forward again."""
        ac = self.run.activation_checkpoint
        if ac.mode != "selective" or self.by_op:
            return float(ac.mode in ("full", "selective"))
        return (self.blocks // int(ac.selective_ac_option)) / self.blocks

    @property
    def stops_early(self) -> bool:
        """Whether recomputation of a block leaves out its last product and what follows: the
        backward needs none of it. Compiled halves of a block, as tensor parallelism has them, run
        whole; eager float8 saves inputs afterwards.
        """
        return self.mesh.tensor == 1 if self.compiled else not self.in_float8

    @cached_property
    def left_out(self) -> float:
        """Share of a block's products that recomputation leaves out.

        Experts save the result of their last product.
        """
        sizes = [size for _, size in self.linears]
        ends_in_product = (
            sizes and not self.experts[1] and self.spec.name != "hf"
        )  # transformers may add a norm
        return sizes[-1] / sum(sizes) * self.stops_early if ends_in_product else 0.0

    @property
    def by_op(self) -> bool:
        ac = self.run.activation_checkpoint
        return ac.mode == "selective" and ac.selective_ac_option == "op"

    @cached_property
    def again(self) -> float:
        """Seconds of recomputation. By operator: every second product, and all but attention."""
        f, ac = self.block_forward, self.run.activation_checkpoint
        if ac.mode == "budget":
            return (1 - ac.memory_budget) * (f.memory + f.products / 2)
        sizes = [size for _, size in self.linears]
        if not self.by_op:
            return self.recomputed * (sum(f) - f.products * self.left_out)
        repeated = sum(sizes[1::2]) / sum(sizes) if sizes and self.spec.experts is None else 0.5
        return f.products * repeated + f.memory + f.casts * repeated

    # Traffic

    def collective(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `size` bytes in all.

        stride: distance of neighbours in the group, in ranks. A machine's ranks share its network.
        """
        if ranks == 1:
            return 0.0
        here = max(1, min(ranks, self.cluster.gpus_per_node // stride))
        nodes = -(-ranks // here)
        inside = size * (ranks - 1) / ranks / (self.gpu.link * self.k.link) if here > 1 else 0.0
        # As many groups as `stride` share the machine's network.
        share = self.cluster.network * here / self.cluster.gpus_per_node * self.k.network
        between = size * (nodes - 1) / nodes / share
        return _LATENCY + _LATENCY_PER_NODE * (nodes - 1) + max(inside, between)

    @cached_property
    def float8_saves(self) -> float:
        """Bytes that gathers of weights in float8 save."""
        if not (self.in_float8 and self.run.float8.enable_fsdp_float8_all_gather):
            return 0.0
        sizes = (
            c.size.in_features * c.size.out_features * len(c.names)
            for c in self.choices
            if c.converted
        )
        return self.stage_share * sum(sizes)

    def sharding(self) -> tuple[float, float, float, float]:
        """Return the seconds of all gathers of a forward and of a backward, of the reduction of
        gradients, and of transfers to and from the host that go with them.
        """
        units, t = self.units, self.run.training
        size = 2.0 if t.mixed_precision_reduce == "bfloat16" else 4.0
        gather = once_more = reduce = 0.0
        for index, (parameters, ranks, stride) in enumerate(self.sharded):
            whole = parameters * self.itemsize - (0 if index else self.float8_saves)
            among = (
                min(t.reshard_after_forward, ranks)
                if isinstance(t.reshard_after_forward, int)
                else ranks
            )
            gather += units * self.collective(whole / units, ranks, stride)
            once_more += units * self.collective(whole / units, among, stride) * self.frees
            reduce += units * self.collective(parameters * size / units, ranks, stride)
            part = 2 * parameters * size / ranks / units
            reduce += units * self.collective(part, self.mesh.dp_replicate, stride * ranks)
        return gather, once_more, reduce, 4 * self.owned / self.gpu.pcie * t.enable_cpu_offload

    @property
    def frees(self) -> bool:
        """Whether a forward frees what it gathered.

        By default the last units stay, so does a single one.
        """
        return self.run.training.reshard_after_forward not in (
            ("never", "default") if self.one_unit else ("never",)
        )

    @property
    def one_unit(self) -> bool:
        return self.run.training.fsdp_units == "root"

    @property
    def units(self) -> float:
        return 1 if self.one_unit else max(self.blocks * self.stage_share, 1)

    def tensor_seconds(self) -> float:
        """Return the seconds of tensor parallelism for one micro-batch: 4 collectives in a block's
        forward, 4 in its backward, and those of recomputation.
        """
        again = self.recomputed * (2 if self.by_op else 4 - self.stops_early)
        if self.in_float8 and self.run.float8.recipe_name == "tensorwise":
            again -= 1  # two gathers of the forward send half the bytes
        one = self.collective(self.itemsize * self.tokens * self.width, self.mesh.tensor, 1)
        remains = self.k.async_tensor if self.run.experimental.enable_async_tensor_parallel else 1.0
        return self.blocks * (8 + again) * one * remains

    def context_seconds(self) -> float:
        """Return the seconds of context parallelism: keys and values are gathered, their gradients
        scattered.
        """
        width = (
            2
            * getattr(self.args, "kv_heads", 0)
            * getattr(self.args, "head_dim", 0)
            / self.mesh.tensor
        )
        size = self.itemsize * self.tokens * self.mesh.context * width
        one = self.collective(size, self.mesh.context, self.mesh.tensor)
        return self.blocks * (2 + self.recomputed) * one

    def expert_seconds(self) -> float:
        """Return the seconds of expert parallelism: rows go to the ranks of their experts and back,
        and gradients.
        """
        rows = self.tokens * getattr(self.args, "top_k", 1) * self.itemsize * self.width
        again = 0 if self.by_op else 2 * self.recomputed
        return self.blocks * (4 + again) * self.collective(rows, self.mesh.expert, self.mesh.tensor)

    # The step

    def speed(self) -> Speed:
        parts = dict.fromkeys(PARTS, 0.0)
        m, share = self.micro_batches, self.stage_share
        forward = _Pass(*(a + b for a, b in zip(self.block_forward, self.head, strict=True)))
        backward = _Pass(*(a + 2 * b for a, b in zip(self.block_backward, self.head, strict=True)))
        for name, one, two in zip(PARTS, forward, backward, strict=False):
            parts[name] = m * share * (one + two)
        parts["recomputation"] = m * share * self.again
        parts["tensor traffic"] = m * share * self.tensor_seconds()
        parts["context traffic"] = m * share * self.context_seconds()
        parts["expert traffic"] = m * share * self.expert_seconds()
        ahead, back = share * sum(forward), share * (sum(backward) + self.again)
        self._hide(parts, ahead, back)
        busy = sum(parts.values())
        launches = _LAUNCHES_COMPILED if self.compiled else _LAUNCHES_EAGER
        parts["launches"] = max(0.0, m * share * self.blocks * launches - busy)
        parts["pipeline bubble"] = self._bubble() * (busy + parts["launches"]) / m
        parts["optimizer"] = self._update()
        seconds = sum(parts.values())
        rate = self.run.batch.tokens_per_step / seconds / self.mesh.world_size
        mfu = rate * (self.base_flops + self.attention_flops) / self.gpu.bf16
        low, high = (rate * share for share in self.unseen)
        return Speed(rate, low, high, mfu, seconds, parts, self._assumptions())

    @property
    def unseen(self) -> tuple[float, float]:
        """Least and most of true rates over predicted ones."""
        return UNSEEN_H200 if self.gpu.key.startswith("h200") and not self.in_float8 else UNSEEN

    def _hide(self, parts: dict[str, float], forward: float, backward: float) -> None:
        """Add the traffic that computing does not hide.

        forward, backward: seconds of computing of one micro-batch.
        """
        gather, once_more, reduce, host = self.sharding()
        t, m = self.run.training, self.micro_batches
        gathers = m if t.reshard_after_forward != "never" else 1
        reductions = m if t.gradient_sync == "every" else 1
        ahead, back = gather * gathers, once_more * gathers + reduce * reductions
        # Nothing runs beside the first unit and the last, nor beside a single one.
        seconds = 0.0 if self.one_unit else (gather * gathers + reduce * reductions) / self.units
        beside = (0.0, 0.0) if self.one_unit else (forward * m, backward * m)
        for traffic, computing in zip((ahead, back), beside, strict=True):
            seconds += max(0.0, traffic - computing) + self.k.contention * min(traffic, computing)
        parts["sharding traffic"] = seconds
        weights = host * gathers, host * (gathers * self.frees + reductions)
        kept = (
            self.kept
            * m
            * self.stage_share
            / self.gpu.pcie
            * self.run.activation_checkpoint.offload
        )
        for sizes, hidden in ((weights, beside), ((kept, kept), (forward * m, backward * m))):
            parts["host transfers"] += sum(
                max(0.0, a - b) for a, b in zip(sizes, hidden, strict=True)
            )

    @cached_property
    def kept(self) -> float:
        """Bytes that all blocks keep for the backward of one micro-batch, roughly."""
        inputs = self.itemsize * self.tokens * self.width * self.blocks / self.mesh.tensor
        whole = self.itemsize * self.tokens * self.outputs * 1.5
        return inputs + whole * (0.5 if self.by_op else 1 - self.recomputed)

    def _bubble(self) -> float:
        """Return the idle time of a pipeline's rank, in micro-batches."""
        ranks, schedule = (
            self.mesh.pipeline,
            SCHEDULES.get(self.run.experimental.pipeline_parallel_schedule),
        )
        if ranks == 1 or schedule is None:
            return 0.0
        rounds = max(self.run.pipeline.stages // ranks, 1)
        return (ranks - 1) / rounds / (3 if schedule.splits_backward else 1)

    def _update(self) -> float:
        size = self.owned * _UPDATE_BYTES
        offloaded = self.run.training.enable_cpu_offload
        return (size / _HOST_MEMORY if offloaded else self.moved(size)) + self._orthogonal()

    def _orthogonal(self) -> float:
        """Return the seconds in which Muon makes matrices orthogonal, each on one of the ranks that
        share it.
        """
        if self.run.optimizer.name != "Muon" or self.spec.linears is None:
            return 0.0
        ranks = self.mesh.dp_replicate * self.mesh.weight_shards * self.mesh.tensor
        found = Counter(
            size for name, size in self.spec.linears(self.args).items() if name != self.spec.head
        )
        if self.spec.experts is not None:
            experts = sum(self.spec.experts(self.args).values())
            found[Size(self.width, getattr(self.args, "ffn_width", self.width))] += 3 * experts
        flops = 0.0
        for size, count in found.items():
            m, n = sorted((size.in_features, size.out_features))
            flops += (
                math.ceil(count * self.stage_share / ranks)
                * _ITERATIONS
                * (4 * m * m * n + 2 * m**3)
            )
        return flops / (self.gpu.bf16 * self.gpu.sustained)

    def _assumptions(self) -> tuple[str, ...]:
        gpu, cluster = self.gpu, self.cluster
        found = [
            (
                f"{gpu.key}: peak {gpu.bf16 / 1e12:.0f} TFLOPS in bf16, of which large products "
                f"reach {gpu.sustained:.0%}"
            ),
            f"memory {gpu.bandwidth / 1e9:.0f} GB/s, links {gpu.link / 1e9:.0f} GB/s",
        ]
        if cluster.nodes > 1:
            bits = f"{cluster.network * 8 / 1e9:.0f} Gbit/s"
            found.append(
                f"network {bits} for each machine of {counted(cluster.gpus_per_node, 'GPUs')}"
            )
        if self.in_float8:
            found.append("the MFU is of the peak in bf16, though products run in float8")
        low, high = (f"{100 * (share - 1):+.0f} %" for share in self.unseen)
        found.append(
            f"the range of speeds is {low} to {high}: so far were published runs that no constant "
            "was fitted on"
        )
        found.append("data, checkpoints and validation take no time")
        return tuple(found)
