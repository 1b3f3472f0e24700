"""The events of a training step on a rank, at the grain of FSDP groups. No torch here.

FORMULAS.md derives each size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from titanlite.plan.events import Alloc, Event, Run
from titanlite.plan.group_events import GroupEvents
from titanlite.plan.optimizer import state_bytes, step_bytes
from titanlite.plan.rank_sizes import RankSizes
from titanlite.plan.weights import Group


class StepEvents:
    """A step that is not the first, at most two micro-batches of it, on one rank."""

    def __init__(self, sizes: RankSizes) -> None:
        self.sizes = sizes
        self.run = sizes.run
        self.groups = GroupEvents(sizes)
        self.activations = sizes.kept_events(sizes)

    def events(self) -> Iterator[Event]:
        yield from self._state()
        work = self.sizes.work or StepEvents.micro_batches
        yield from work(self)
        sizes = self.sizes
        update = 0
        if not sizes.offloads:
            optimizer = self.run.optimizer
            update = step_bytes(sizes.trained, sizes.shard, optimizer, sizes.master, sizes.device)
        yield Run("optimizer", "", {"working memory": update})

    def _state(self) -> Iterator[Event]:
        sizes = self.sizes
        optimizer = self.run.optimizer
        masters = sum(weight.part * sizes.held(weight) for weight in sizes.weights)
        averages = self.run.trained(sizes.args).averages
        state = 0.0
        for weight in sizes.trained:
            each = state_bytes(weight, optimizer, sizes.master) + averages
            state += each * weight.local(sizes.shard)
        yield Alloc("parameters", "weights", masters, sizes.offloads)
        yield Alloc("optimizer", "state", round(state), sizes.offloads)
        if sizes.offloads:
            pinned = sum(weight.part for weight in sizes.trained) * sizes.master
            yield Alloc("gradients", "pinned", pinned, sizes.offloads)
        widths = [rotary.width for rotary in sizes.args.rotaries() if rotary is not None]
        tables = 4 * sum(widths) * sizes.args.max_seq_len
        yield Alloc("parameters", "cosines and sines", tables)

    def micro_batches(self) -> Iterator[Event]:
        modules = self.sizes.stages[0]
        count = min(self.run.batch.accumulation, 2)
        for index in range(count):
            is_last = index == count - 1
            reduces = is_last or self.run.training.gradient_sync == "every"
            yield from self.forward(modules)
            yield from self.backward(modules, reduces=reduces)

    def forward(self, modules: list[str]) -> Iterator[Event]:
        # Bytes of the latest gather.
        buffer = 0
        for module in modules:
            group = self.sizes.group_of[module]
            if group not in self.groups.gathered:
                given = self._hidden(module)
                yield from self.groups.gather("forward", group, given, held=buffer)
                buffer = self.groups.last_buffer(group)
            if module == "output" and self.sizes.loss.chunks == 1:
                # The loss comes after the model's forward, whose end frees the buffer. Beside the
                # logits are the hidden states that they come from.
                shape = self.sizes.shape
                output = shape.tokens * (shape.vocabulary + shape.args.dim) * self.sizes.low
                parts = {"logits and loss": output, "communication": buffer}
                yield Run("forward", module, parts)
                buffer = 0
            cost = self.sizes.costs[module]
            work = cost.forward.total + cost.kept - self.activations.kept(module)
            yield self._run("forward", module, work, communication=buffer)
            yield from self.activations.keep(module)
            if group.reshards and module == group.modules[-1]:
                yield from self.groups.free(group)
                yield from self.groups.divide(group)

    def backward(
        self,
        modules: list[str],
        *,
        frees: bool = True,
        reduces: bool = False,
    ) -> Iterator[Event]:
        """Make gradients.

        frees: weights after use. reduces: gradients once they are made.
        """
        # Buffers of a gather that runs ahead, and of the latest reduction.
        ahead = 0
        reduced = 0
        # Whole gradients that are not yet reduced.
        made = Counter[Group]()
        order = self._in_order(modules)
        for module in reversed(modules):
            if not self.sizes.has_backward(module):
                yield from self.activations.drop(module)
                continue
            group = self.sizes.group_of[module]
            cost = self.sizes.costs[module]
            peak = cost.backward
            if module == group.modules[-1]:
                if group not in self.groups.gathered:
                    buffers = reduced + sum(made.values())
                    given = 0 if module == "output" else self.sizes.shape.hidden
                    has_begun = ahead > 0
                    yield from self.groups.gather("backward", group, given, buffers, has_begun)
                ahead = self._ahead(group, order)
            # The gradient of a tied weight is added to the other one, outside of both.
            weights = peak.weights
            if module == "tok_embeddings":
                weights += made[group]
            communication = ahead + reduced + sum(made.values()) + weights
            work = peak.working + cost.kept - self.activations.kept(module)
            yield from self.activations.drop(module)
            yield self._run("backward", module, work, communication)
            if module != "tok_embeddings" or not made[group]:
                made[group] += cost.weights
            if module == group.modules[0]:
                if frees:
                    yield from self.groups.free(group)
                if reduces:
                    given = self._hidden(module)
                    yield from self.groups.reduce(group, made.pop(group), ahead, given, frees)
                    reduced = self.groups.reduction_buffer(group)
                else:
                    yield from self.groups.accumulate(group, made.pop(group), ahead + reduced)
        yield from self.groups.end_backward()

    def _hidden(self, module: str) -> int:
        """Return the bytes of a module's input or gradient."""
        return 0 if module == "tok_embeddings" else self.sizes.shape.hidden

    def _in_order(self, modules: list[str]) -> list[Group]:
        running = [name for name in modules if self.sizes.has_backward(name)]
        groups = {self.sizes.group_of[name] for name in running}
        return sorted(groups, key=lambda group: modules.index(group.modules[-1]))

    def _ahead(self, group: Group, order: list[Group]) -> int:
        """Return the buffer of the gather that a backward begins while it runs `group`."""
        index = order.index(group)
        following = order[index - 1]
        if index == 0 or following in self.groups.gathered:
            return 0
        return self.groups.buffer(following)

    def _run(self, phase: str, module: str, work: int, communication: int) -> Run:
        """Return the event of a module whose kept tensors begin or end. work: bytes beside them."""
        part = "logits and loss" if module == "output" else "working memory"
        sizes = {part: work, "communication": communication}
        return Run(phase, module, sizes, self.activations.parts(module))
