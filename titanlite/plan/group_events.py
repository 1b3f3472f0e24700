"""Events of the groups that FSDP gathers and reduces. No torch here.

The buffer of a gather or a reduction lives until the next one.

Experts that ranks share are gathered after the other weights of their group, and reduced before
them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from titanlite.plan.events import Alloc, Event, Free, Run
from titanlite.plan.rank_sizes import RankSizes
from titanlite.plan.weights import Group, Weight


class GroupEvents:
    """Weights and gradients of a rank's groups; sizes are in bytes."""

    def __init__(self, sizes: RankSizes) -> None:
        self.sizes = sizes
        self.run = sizes.run
        #: Groups whose weights are whole; of which a part stays since few ranks divide them.
        self.gathered: set[Group] = set()
        self._divided: set[Group] = set()
        #: Groups whose whole gradients wait for the last micro-batch; that have reduced gradients.
        self._unreduced: set[Group] = set()
        self._has_gradient: set[Group] = set()
        #: Groups with gradients that replicas have summed; torch holds them until the backward
        #: ends.
        self._replicated: list[Group] = []

    # Weights

    def gather(
        self, phase: str, group: Group, given: int, held: int, has_begun: bool = False
    ) -> Iterator[Event]:
        """Gather a group's weights.

        given: bytes of what waits: an input in the forward, a gradient in the backward. held: of
        other buffers. has_begun: buffers are filled.
        """
        first = group.modules[0]
        given_part = "activations" if phase == "forward" else "working memory"
        self.gathered.add(group)
        # Buffers that are filled before their turn.
        waiting = self.buffer(group) if has_begun else 0
        for index, weights in enumerate(group.by_mesh):
            buffer = self._buffer(weights)
            if has_begun:
                waiting -= buffer
            else:
                filled = held + buffer + self._sent(weights)
                yield Run(phase, first, {given_part: given, "communication": filled})
            if group in self._divided:
                self._divided.remove(group)
                yield Free("gathered weights", ("divided", group))
            yield Alloc("gathered weights", (group, index), self._whole(weights))
            # Some are put in order by a copy.
            copied = self._whole(weights, copied=True)
            # torch still holds the buffer before while it copies.
            filled = held + waiting + buffer + copied
            yield Run(phase, first, {given_part: given, "communication": filled})
            if phase == "forward":
                held = buffer

    def free(self, group: Group) -> Iterator[Event]:
        if group in self.gathered:
            self.gathered.remove(group)
            for index in range(len(group.by_mesh)):
                yield Free("gathered weights", (group, index))

    def divide(self, group: Group) -> Iterator[Event]:
        """Keep a part of weights after the forward, where few ranks divide them."""
        among = self.run.training.reshard_after_forward
        if isinstance(among, int):
            self._divided.add(group)
            whole = self._whole(group.weights)
            yield Alloc("gathered weights", ("divided", group), whole // among)

    def buffer(self, group: Group) -> int:
        return sum(map(self._buffer, group.by_mesh))

    def last_buffer(self, group: Group) -> int:
        """Return the bytes of the buffer that outlives a forward gather."""
        return self._buffer(group.by_mesh[-1]) if group.weights else 0

    def _buffer(self, weights: Sequence[Weight]) -> int:
        return self._whole(weights) if weights[0].shards > 1 else 0

    def _sent(self, weights: Sequence[Weight]) -> int:
        if weights[0].shards == 1:
            return 0
        sent = sum(weight.part for weight in weights) * self.sizes.low
        if self.sizes.offloads:
            # An offloaded part comes to the device in its own dtype.
            sent += sum(weight.part * self.sizes.held(weight) for weight in weights)
        return sent

    def _whole(self, weights: Sequence[Weight], copied: bool = False) -> int:
        """Return the bytes of gathered weights. copied: by those a copy puts in order."""
        found = 0
        takes_masters = self.sizes.shards_nothing and not self.sizes.offloads
        for weight in weights:
            if copied and not weight.copied:
                continue
            # Products take this rank's part as it is.
            has_dtype = self.sizes.held(weight) == self.sizes.low
            if takes_masters and has_dtype and not weight.gathered_bytes:
                continue
            found += weight.padded * (weight.gathered_bytes or self.sizes.low)
        return found

    # Gradients

    def accumulate(self, group: Group, made: int, held: int) -> Iterator[Event]:
        """Keep a group's whole gradients for the next micro-batch. made, held: bytes."""
        first = group.modules[0]
        if not group.trained.weights:
            return
        whole = self._unreduced_bytes(group)
        before = yield from self._end_waiting(group)
        copy = 0
        if not before and self.sizes.reduced != self.sizes.low:
            # One parameter's at a time is there in both dtypes.
            largest = max(weight.numbers for weight in group.trained.weights)
            # With the rows of others, where the table's waits.
            largest += whole // self.sizes.reduced - group.trained.numbers
            copy = whole - made + self.sizes.low * largest
        yield Run("backward", first, {"communication": held + before + made + copy})
        self._unreduced.add(group)
        yield Alloc("communication", ("unreduced", group), whole)

    def reduce(
        self, group: Group, made: int, ahead: int, given: int = 0, freed: bool = False
    ) -> Iterator[Event]:
        """Reduce a group's gradients.

        made: bytes of new ones. ahead: of the gather that runs. given: of the gradient handed on.
        freed: whole weights are freed, each mesh's before its reduction.
        """
        if not group.trained.weights:
            return
        part = group.trained.part * self.sizes.reduced
        before = yield from self._end_waiting(group)
        each = self.sizes.reduced if before else self.sizes.low
        waiting = before or made
        # Buffers and parts of what is reduced.
        done = 0
        for weights in reversed(group.trained.by_mesh):
            is_last = weights is group.trained.by_mesh[0]
            numbers = sum(weight.numbers for weight in weights)
            others = 0 if is_last else max(waiting - numbers * each, 0)
            gathered = self._whole(group.by_mesh[0]) if freed and not is_last else 0
            kept, steps = self._reduction(weights, each, waiting - others)
            for size in steps:
                sizes = {
                    "working memory": given,
                    "gathered weights": gathered,
                    "communication": ahead + done + others + size,
                }
                yield Run("backward", group.modules[0], sizes)
            waiting = others
            done += kept
        if self.sizes.offloads or self.run.optimizer.early_step_in_backward:
            return
        if group not in self._has_gradient:
            self._has_gradient.add(group)
            yield Alloc("gradients", group, group.trained.part * self.sizes.master)
        elif self.run.mesh.dp_replicate > 1:
            self._replicated.append(group)
            yield Alloc("communication", ("replicated", group), part)

    def _reduction(self, weights: Sequence[Weight], each: int, made: int) -> tuple[int, list[int]]:
        """Return the bytes that a reduction leaves (buffer, this rank's part), and each step's.

        each: bytes of a number in whole gradients. made: of all of them.
        """
        buffer = sum(weight.padded for weight in weights) * self.sizes.reduced
        left = buffer
        # Where no other rank has a part, the buffer becomes the gradient
        # (`titanlite.parallel.fsdp_one_rank`).
        if not self._is_alone(weights):
            left += sum(weight.part for weight in weights) * self.sizes.reduced
        # Weights divided along another dimension are put in order one by one. A variable holds the
        # last one's gradient beside the copy of it.
        copied = [weight.numbers * each for weight in weights if weight.copied]
        steps = [made + max(copied)] if copied else []
        only_replicas = self.sizes.shards == 1 and self.run.mesh.dp_replicate > 1
        return left, [
            *steps,
            made + sum(copied[-1:]) + buffer,
            left + buffer * only_replicas,
        ]

    def reduction_buffer(self, group: Group) -> int:
        """Return the bytes of a reduction's buffers that live on."""
        several = [weights for weights in group.trained.by_mesh if not self._is_alone(weights)]
        return sum(weight.padded for weights in several for weight in weights) * self.sizes.reduced

    def _is_alone(self, weights: Sequence[Weight]) -> bool:
        """Whether no other rank has a part or copy of these weights."""
        return (
            weights[0].shards == 1 and self.run.mesh.dp_replicate == 1 and not self.sizes.offloads
        )

    def _end_waiting(self, group: Group) -> Generator[Event, None, int]:
        """Free whole gradients of earlier micro-batches; return their bytes."""
        if group not in self._unreduced:
            return 0
        self._unreduced.remove(group)
        yield Free("communication", ("unreduced", group))
        return self._unreduced_bytes(group)

    def _unreduced_bytes(self, group: Group) -> int:
        numbers = group.trained.numbers
        args = self.sizes.args
        has_table = "tok_embeddings" in group.modules and numbers and not args.tied
        if has_table and not self.sizes.adds_at_once:
            # The table's gradient has the rows of all tensor-parallel ranks until it is reduced.
            numbers += (args.n_vocab - args.n_vocab // self.run.mesh.tensor) * args.dim
        return numbers * self.sizes.reduced

    def end_backward(self) -> Iterator[Event]:
        """Free what torch holds until a backward ends."""
        for group in self._replicated:
            yield Free("communication", ("replicated", group))
        self._replicated.clear()
