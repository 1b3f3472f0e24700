"""The sizes of a rank that the events of its step follow from, for `titanlite.plan.memory`.

No torch here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from titanlite.models.llama import LlamaArgs
from titanlite.plan.blocks import Shape, attention, block_ops, embedding
from titanlite.plan.experts import feed_forward_of
from titanlite.plan.kept_events import KeptEvents
from titanlite.plan.lifetimes import ModuleMemory, measure
from titanlite.plan.loss_ops import Loss, head_ops, loss_of
from titanlite.plan.parts import BYTES
from titanlite.plan.product_memory import ProductMemory
from titanlite.plan.weights import Weight, groups_of, position
from titanlite.run.config import RunConfig

if TYPE_CHECKING:
    from titanlite.models.linears import Linears
    from titanlite.plan.events import Event
    from titanlite.plan.step_events import StepEvents


class RankSizes:
    """Sizes of a rank's weights and work."""

    def __init__(self, run: RunConfig, args: LlamaArgs, rank: int, device: str) -> None:
        training = run.training
        mesh = run.mesh
        self.run = run
        self.args = args
        self.device = device
        self.shards = mesh.weight_shards
        #: This rank's place among those that shard weights, and in the pipeline.
        self.shard = rank // mesh.tensor % mesh.weight_shards
        self.pipeline_rank = rank // (mesh.world_size // mesh.pipeline)
        #: Bytes of a number: in this rank's weights, in products, in reductions of gradients.
        self.master = BYTES[training.dtype]
        self.low = BYTES[training.mixed_precision_param]
        self.reduced = BYTES[training.mixed_precision_reduce]
        self.offloads = training.enable_cpu_offload and device != "cpu"
        # Fields that features change (`Feature.plan_memory`).
        self.products = ProductMemory()
        self.attention = attention
        self.loss = loss_of(run)
        self.kept_events = KeptEvents
        #: Modules of each of its pipeline stages, in the order they run.
        self.stages: list[list[str]] = [list(run.spec.pipeline_costs(args, args.max_seq_len))]  # type: ignore[misc]
        #: The events between the state at the start and the update; None: `micro_batches`.
        self.work: Callable[[StepEvents], Iterator[Event]] | None = None
        for feature in run.features.on:
            feature.plan_memory(self)
        for stage in self.stages:
            # A last norm that runs with the head counts with it.
            if "norm" in stage and "output" in stage:
                stage.remove("norm")
        #: With the arguments of the model, for what all blocks share.
        self.shape = self._shape(args)
        mine = {module for stage in self.stages for module in stage}
        self.groups = groups_of(self, mine)
        self.group_of = {name: group for group in self.groups for name in group.modules}
        #: Needs of each module.
        self.costs = {module: self._cost(module) for module in mine}

    @functools.cached_property
    def weights(self) -> list[Weight]:
        return [weight for group in self.groups for weight in group.weights]

    @functools.cached_property
    def trained(self) -> list[Weight]:
        """Parameters that have gradients and an optimizer state."""
        return [weight for weight in self.weights if not weight.frozen]

    @functools.cached_property
    def shards_nothing(self) -> bool:
        """Whether tensor parallelism alone divides weights, perhaps with shared experts."""
        mesh = self.run.mesh
        is_whole = all(weight.shards == 1 for weight in self.weights)
        return is_whole and mesh.world_size == mesh.tensor

    @property
    def adds_at_once(self) -> bool:
        """Whether each micro-batch adds to gradients of unshared weights, so that none wait."""
        casts_together = self.device != "cpu" and self.low != self.master
        return self.shards_nothing and self.reduced == self.master and not casts_together

    def held(self, weight: Weight) -> int:
        """Return the bytes of each number of a weight."""
        return min(self.low, self.master) if weight.frozen else self.master

    def has_backward(self, module: str) -> bool:
        """Whether a module has a backward: a frozen embedding has none."""
        return self.products.trains or module != "tok_embeddings"

    def begins_gradients(self, module: str) -> bool:
        """Whether a block keeps nothing of an input that needs no gradient."""
        if self.products.trains or module == "output" or self.mode(module) != "none":
            return False
        return ["tok_embeddings", module] in [stage[:2] for stage in self.stages]

    def shape_of(self, block: str) -> Shape:
        return self._shape(self.args.of_block(position(block, self.args.n_layers)))

    def _shape(self, args: LlamaArgs) -> Shape:
        run = self.run
        mesh = run.mesh
        return Shape(
            run.tokens_at_once,
            args,
            self.low,
            tp=mesh.tensor,
            cp=mesh.context,
            products=self.products,
            feed_forward=feed_forward_of(args, mesh.expert),
            attention=self.attention,
        )

    @functools.cached_property
    def linears(self) -> Linears:
        from titanlite.models.linears import linears_of

        return linears_of(self.run.spec, self.args, self.run.mesh.tensor)

    def _cost(self, module: str) -> ModuleMemory:
        """Return a module's needs; the head's include the last norm."""
        if module == "output":
            return head_memory(self.shape, self.loss)
        if module == "tok_embeddings":
            waits = self.run.training.gradient_sync == "last" and self.run.batch.accumulation > 1
            return embedding(self.shape, waits and not self.args.tied)
        return block_memory(self.shape_of(module), self.mode(module))

    def mode(self, block: str) -> str:
        """Return a block's mode for `measure`."""
        ac = self.run.activation_checkpoint
        if ac.mode in ("none", "budget"):
            return "none"
        if ac.mode == "full":
            return "full"
        if ac.selective_ac_option == "op":
            return "op"
        index = position(block, self.args.n_layers)
        return "none" if (index + 1) % int(ac.selective_ac_option) else "full"


@functools.cache
def block_memory(shape: Shape, mode: str) -> ModuleMemory:
    """Return a block's memory, in bytes by time. mode: as for `measure`."""
    return measure(block_ops(shape), mode)


@functools.cache
def head_memory(shape: Shape, loss: Loss) -> ModuleMemory:
    """Return the memory of head and loss, in bytes by time."""
    return measure(head_ops(shape, loss))
