"""The sizes of a step that its seconds follow from, for `titanlite.plan.speed`. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from titanlite.models.counts import blocks
from titanlite.models.linears import LinearKind, Linears, linears_of
from titanlite.models.llama import LlamaArgs
from titanlite.models.spec import Size
from titanlite.plan.hardware import Cluster
from titanlite.plan.other_products import ExpertSpeed, OtherProducts, Sharded
from titanlite.plan.parts import VOCABULARY
from titanlite.plan.product_speed import ProductSpeed
from titanlite.plan.rates import Constants, Rates
from titanlite.run.config import RunConfig


class StepSizes:
    """One step of a run; sizes are a rank's, of one micro-batch (of a pipeline: of one piece).

    Blocks are the whole model's; `stage_share` is a pipeline rank's part.
    """

    def __init__(self, run: RunConfig, cluster: Cluster, constants: Constants) -> None:
        self.run = run
        self.mesh = run.mesh
        self.spec = run.spec
        self.args: Any = run.model_args()
        if not self.args.vocab_size:
            self.args = replace(self.args, vocab_size=VOCABULARY)
        #: Bytes of a number in activations and gathered weights.
        self.itemsize = 2
        peak = cluster.gpu.bf16
        if run.training.mixed_precision_param == "float32":
            self.itemsize = 4
            peak /= 8
        self.rates = Rates(cluster, constants, peak=peak)
        self.compiled = run.compiles_blocks
        self.micro_batches = run.pipeline.microbatches * run.batch.accumulation
        #: Tokens of a micro-batch on this rank.
        self.tokens = run.tokens_at_once
        self.blocks = len(self.spec.block_names(self.args))
        #: Model FLOPs of a token, forward and backward: without attention, and of attention.
        self.base_flops = self.spec.flops_per_token(self.args, 0)
        flops = self.spec.flops_per_token(self.args, run.batch.seq_len)
        self.attention_flops = flops - self.base_flops
        # Fields that features change (`Feature.plan_speed`).
        self.products = ProductSpeed(self.model_linears.kinds())
        #: Factor by which attention takes longer than in one piece.
        self.attention_slower = 1.0
        #: Share of tensor-parallel traffic that computing waits for.
        self.tensor_traffic_left = 1.0
        #: Name of `speed.PARTS` → seconds of other traffic that computing waits for, of a
        #: micro-batch.
        self.traffic: dict[str, Callable[[StepSizes], float]] = {}
        #: Seconds of a step's copies of activations to the host, as many as back.
        self.activation_transfers: Callable[[StepSizes], float] = lambda _: 0.0
        #: This rank's share of the model's FLOPs: that of the slowest rank of a pipeline.
        self.stage_share = 1.0
        #: Time in which it waits for other stages, in micro-batches.
        self.idle = 0.0
        for feature in run.features.on:
            feature.plan_speed(self)

    # The model

    @cached_property
    def tensor_plan(self) -> dict[str, str]:
        """Module name → how ranks divide it; empty if they cannot."""
        if self.spec.tensor_plan is None:
            return {}
        return self.spec.tensor_plan(self.args)

    @cached_property
    def model_linears(self) -> Linears:
        return linears_of(self.spec, self.args, self.mesh.tensor)

    @cached_property
    def others(self) -> OtherProducts:
        experts = self.spec.moe_layers(self.args)
        return ExpertSpeed(self, experts) if experts else OtherProducts(self)

    @cached_property
    def linears(self) -> list[LinearKind]:
        return [linear for linear in self.products.kinds if self.spec.head not in linear.names]

    @cached_property
    def width(self) -> int:
        """Numbers of a token between blocks."""
        for linear in self.products.kinds:
            if self.spec.head in linear.names:
                return linear.size.in_features
        return int(getattr(self.args, "dim", 0))

    @cached_property
    def vocabulary(self) -> float:
        """Logits of a token on this rank."""
        return self.args.vocab_size / self.mesh.tensor

    @cached_property
    def outputs(self) -> float:
        """Numbers per token that all blocks' products put out."""
        found = 0.0
        for linear in self.linears:
            found += linear.size.out_features * len(linear.names) * self.part(linear)
        return found + self.others.outputs

    def part(self, linear: LinearKind) -> float:
        """Return a linear's share of a micro-batch's tokens on this rank."""
        divides = self.tensor_plan.get(linear.names[0]) in ("sequence", "heads")
        return 1 / self.mesh.tensor if divides else 1.0

    @cached_property
    def matrices(self) -> Counter[Size]:
        """How many matrices of each size all blocks have."""
        found = Counter[Size]()
        if self.spec.linears is None:
            return found
        for name, size in self.spec.linears(self.args).items():
            if name != self.spec.head:
                found[size] += 1
        found.update(self.others.matrices)
        return found

    @cached_property
    def pairs(self) -> float:
        """Share of the token pairs in its FLOPs that attention computes: half, more in a window."""
        length = self.run.batch.seq_len
        if not isinstance(self.args, LlamaArgs):
            return 0.5
        flops = 0
        computed = 0.0
        for block in blocks(self.args):
            window = min(block.window or length, length)
            flops += block.attention_flops(length)
            computed += block.attention_flops(length) * (1 - window / (2 * length))
        return computed / flops

    # A rank's part of it

    @cached_property
    def sharded(self) -> list[Sharded]:
        mesh = self.mesh
        divided = self.spec.count_parameters(self.args) - self.others.parameters
        parameters = divided / mesh.tensor * self.stage_share + (self.adapters or 0.0)
        return self.others.sharded(Sharded(parameters, mesh.weight_shards, mesh.tensor))

    @cached_property
    def adapters(self) -> float | None:
        """Parameters of the adapters of a rank's stage; None: all weights are trained."""
        adapters = self.run.trained(self.args).adapters
        return None if adapters is None else adapters * self.stage_share

    @cached_property
    def reduced(self) -> list[Sharded]:
        """Parameters with gradients, as `sharded`."""
        if self.adapters is None:
            return self.sharded
        return [Sharded(self.adapters, self.mesh.weight_shards, self.mesh.tensor)]

    @cached_property
    def owned(self) -> float:
        """Parameters that this rank updates."""
        return sum(group.parameters / group.ranks for group in self.reduced)

    @cached_property
    def held_bytes(self) -> float:
        if self.adapters is None:
            return 4 * self.owned
        frozen = sum(group.parameters / group.ranks for group in self.sharded) - self.owned
        return 4 * self.owned + self.itemsize * frozen

    # How weights are gathered

    @property
    def is_one_unit(self) -> bool:
        return self.run.training.fsdp_units == "root"

    @property
    def units(self) -> float:
        """How many times a forward gathers."""
        return 1 if self.is_one_unit else max(self.blocks * self.stage_share, 1)

    @property
    def frees(self) -> bool:
        """Whether a forward frees what it gathered; by default the last units stay."""
        reshards = self.run.training.reshard_after_forward
        if reshards == "default":
            return not self.is_one_unit
        return reshards != "never"

    # What the backward computes again

    @property
    def by_op(self) -> bool:
        """Whether recomputation goes by operators, not by blocks."""
        return self.run.activation_checkpoint.by_op

    @cached_property
    def recomputed(self) -> float:
        """Share of the blocks that repeat their forward."""
        ac = self.run.activation_checkpoint
        if ac.mode == "selective" and not self.by_op:
            return (self.blocks // int(ac.selective_ac_option)) / self.blocks
        return 1.0 if ac.mode in ("full", "selective") else 0.0

    @property
    def stops_early(self) -> bool:
        """Whether recomputation omits a block's last product and the rest, which no backward needs.

        Compiled halves of a block run whole.
        """
        if self.compiled:
            return self.mesh.tensor == 1
        return not self.products.saves_inputs_late

    @cached_property
    def repeated(self) -> float:
        """Share of products that recomputation by operator repeats: every second one."""
        if not self.linears or self.others.beside_linears:
            return 0.5
        sizes = [linear.weights for linear in self.linears]
        return sum(sizes[1::2]) / sum(sizes)

    @cached_property
    def left_out(self) -> float:
        """Share of a block's products that recomputation leaves out.

        Experts save their last product's result. Blocks of transformers, and of families with norms
        after, may end in a norm.
        """
        has_last_norm = getattr(self.args, "norm_placement", "before") != "before"
        ends_in_product = self.spec.name != "hf" and not has_last_norm
        ends_in_linear = ends_in_product and not self.others.beside_linears
        if not self.linears or not ends_in_linear or not self.stops_early:
            return 0.0
        sizes = [linear.weights for linear in self.linears]
        return sizes[-1] / sum(sizes)
