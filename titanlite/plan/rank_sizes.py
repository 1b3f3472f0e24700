"""The sizes of a rank that the events of its step follow from, for `titanlite.plan.memory`.

No torch here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titanlite.models.llama import LlamaArgs
from titanlite.plan.blocks import Shape, block_ops, embedding
from titanlite.plan.feed_forward import FeedForwardMemory
from titanlite.plan.lifetimes import ModuleMemory, measure
from titanlite.plan.loss_ops import Loss, head_ops
from titanlite.plan.product_memory import ProductMemory
from titanlite.plan.weights import Weight, groups_of, position
from titanlite.run.config import RunConfig
from titanlite.run.features import moe_layers_of

if TYPE_CHECKING:
    from titanlite.features.experts import MoELayers
    from titanlite.features.lora.settings import Adapters
    from titanlite.models.linears import Linears
    from titanlite.models.spec import Size

_BYTES = {"float32": 4, "bfloat16": 2}


class RankSizes:
    """What a rank has and runs."""

    def __init__(self, run: RunConfig, args: LlamaArgs, loss: Loss, rank: int, device: str) -> None:
        training = run.training
        mesh = run.mesh
        self.run = run
        self.args = args
        self.loss = loss
        self.device = device
        self.shards = mesh.weight_shards
        #: This rank's place among those that shard weights, and in the pipeline.
        self.shard = rank // mesh.tensor % mesh.weight_shards
        self.pipeline_rank = rank // (mesh.world_size // mesh.pipeline)
        #: Bytes of a number: in this rank's weights, in products, in reductions of gradients.
        self.master = _BYTES[training.dtype]
        self.low = _BYTES[training.mixed_precision_param]
        self.reduced = _BYTES[training.mixed_precision_reduce]
        self.offloads = training.enable_cpu_offload and device != "cpu"
        #: With the arguments of the model, for what all blocks share.
        self.shape = self._shape(args)
        #: Modules of each of its pipeline stages.
        self.stages = self._stages()
        mine = {module for stage in self.stages for module in stage}
        self.groups = groups_of(self, mine)
        self.group_of = {name: group for group in self.groups for name in group.modules}
        #: Needs of each module.
        self.costs = {module: self._cost(module) for module in mine}

    @functools.cached_property
    def weights(self) -> list[Weight]:
        """The weights of all groups."""
        return [weight for group in self.groups for weight in group.weights]

    @functools.cached_property
    def trained(self) -> list[Weight]:
        """Those that have gradients and a state."""
        return [weight for weight in self.weights if not weight.frozen]

    @functools.cached_property
    def shards_nothing(self) -> bool:
        """Whether tensor parallelism alone divides weights over ranks, perhaps with experts that
        these share.
        """
        mesh = self.run.mesh
        is_whole = all(weight.shards == 1 for weight in self.weights)
        return is_whole and mesh.world_size == mesh.tensor

    @property
    def adds_at_once(self) -> bool:
        """Whether each micro-batch adds to the gradients of weights that no other rank shares
        (`titanlite.parallel.one_rank`): none wait for the last one.
        """
        casts_together = self.device != "cpu" and self.low != self.master
        return self.shards_nothing and self.reduced == self.master and not casts_together

    def held(self, weight: Weight) -> int:
        """Return the bytes of a number of a weight on this rank."""
        return min(self.low, self.master) if weight.frozen else self.master

    def has_backward(self, module: str) -> bool:
        """Return whether a module has a backward: a frozen embedding has none."""
        return self.shape.products.trains or module != "tok_embeddings"

    def begins_gradients(self, module: str) -> bool:
        """Return whether a block keeps nothing of its input, which needs no gradient."""
        if self.shape.products.trains or module == "output" or self.mode(module) != "none":
            return False
        return ["tok_embeddings", module] in [stage[:2] for stage in self.stages]

    @functools.cached_property
    def adapters(self) -> Adapters | None:
        """Those beside frozen weights; None: all weights are trained."""
        lora = self.run.features.lora
        return None if lora is None else lora.adapters(self.run.spec, self.args)

    def shape_of(self, block: str) -> Shape:
        """Return the shape of a block, by its own arguments."""
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
            features=run.features,
            products=self._products,
            feed_forward=self._feed_forward(args),
        )

    @functools.cached_property
    def linears(self) -> Linears:
        """The linears of the model, and how tensor parallelism divides them."""
        from titanlite.models.linears import linears_of

        return linears_of(self.run.spec, self.args, self.run.mesh.tensor)

    def on_rank(self, name: str, size: Size) -> Size:
        """Return the size of a linear on this rank. name: in the model; size: of the whole."""
        return size if self.run.mesh.tensor == 1 else self.linears.on_rank(name)

    @functools.cached_property
    def _products(self) -> ProductMemory:
        products = ProductMemory()
        for feature in self.run.features.on:
            products = feature.product_memory(self, products)
        return products

    @functools.cached_property
    def _moe_layers(self) -> MoELayers | None:
        return moe_layers_of(self.run.spec, self.args)

    def _feed_forward(self, args: LlamaArgs) -> FeedForwardMemory:
        """Return the feed-forward of a block. args: of that block."""
        if self._moe_layers is None:
            return FeedForwardMemory()
        return self._moe_layers.memory(args, self.run.mesh.expert)

    def _stages(self) -> list[list[str]]:
        """Return the modules of each of this rank's pipeline stages, in the order they run.

        A last norm that runs with the head is left out.
        """
        costs = self.run.spec.pipeline_costs(self.args, self.args.max_seq_len)  # type: ignore[misc]
        stages: list[Sequence[str]] = [list(costs)]
        pipeline = self.run.features.pipeline
        if pipeline is not None:
            layout = pipeline.layout(self.run.spec, self.args, self.args.max_seq_len)
            stages = [layout.stages[index] for index in layout.on(self.pipeline_rank)]
        found = []
        for stage in stages:
            found.append([name for name in stage if name != "norm" or "output" not in stage])
        return found

    def _cost(self, module: str) -> ModuleMemory:
        """Return the needs of a module; the last norm counts with the head."""
        if module == "output":
            return head_memory(self.shape, self.loss)
        if module == "tok_embeddings":
            waits = self.run.training.gradient_sync == "last" and self.run.batch.accumulation > 1
            return embedding(self.shape, waits and not self.args.tied)
        return block_memory(self.shape_of(module), self.mode(module))

    def mode(self, block: str) -> str:
        """Return how a block checkpoints activations, as `measure` takes it."""
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
    """Return the memory of a block, in bytes by time. mode: of recomputation."""
    return measure(block_ops(shape), mode)


@functools.cache
def head_memory(shape: Shape, loss: Loss) -> ModuleMemory:
    """Return the memory of head and loss, in bytes by time."""
    return measure(head_ops(shape, loss))
