"""Events of the groups that FSDP gathers and reduces. No torch here.

A gather fills a buffer from all ranks and copies it into whole weights. The buffer lives until the
next gather. A reduction puts whole gradients in order in a buffer and leaves this rank's part. The
buffer lives until the next reduction.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from titanlite.plan.events import Alloc, Event, Free, Run
from titanlite.plan.rank_sizes import RankSizes
from titanlite.plan.weights import Group, Weight


class GroupEvents:
    """Weights and gradients of a rank's groups."""

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
        self, phase: str, group: Group, held: int = 0, has_begun: bool = False
    ) -> Iterator[Event]:
        """Gather a group's weights.

        held: buffer of the gather before. has_begun: the buffer is filled.
        """
        buffer = self.buffer(group)
        first = group.modules[0]
        self.gathered.add(group)
        if not has_begun:
            yield Run(phase, first, {"communication": held + buffer + self._sent(group)})
        if group in self._divided:
            self._divided.remove(group)
            yield Free("gathered weights", ("divided", group))
        yield Alloc("gathered weights", group, self._whole(group))
        # Some are put in order by a copy.
        copied = self._whole(group, copied=True)
        # torch still holds the buffer before while it copies.
        yield Run(phase, first, {"communication": held + buffer + copied})

    def free(self, group: Group) -> Iterator[Event]:
        """Free a group's whole weights, if they are there."""
        if group in self.gathered:
            self.gathered.remove(group)
            yield Free("gathered weights", group)

    def divide(self, group: Group) -> Iterator[Event]:
        """Keep a part of a group's weights after its forward, where few ranks divide them."""
        among = self.run.training.reshard_after_forward
        if isinstance(among, int):
            self._divided.add(group)
            yield Alloc("gathered weights", ("divided", group), self._whole(group) // among)

    def buffer(self, group: Group) -> int:
        """Return the bytes of a gather's buffer."""
        return self._whole(group) if self.sizes.shards > 1 else 0

    def _sent(self, group: Group) -> int:
        """Return the bytes of a rank's part as it is sent."""
        if self.sizes.shards == 1:
            return 0
        sent = group.part * self.sizes.low
        if self.sizes.offloads:
            # An offloaded part comes to the device in its own dtype.
            sent += sum(weight.part * self.sizes.held(weight) for weight in group.weights)
        return sent

    def _whole(self, group: Group, copied: bool = False) -> int:
        """Return the bytes of gathered weights.

        copied: of those that are put in order by a copy.
        """
        found = 0
        for weight in group.weights:
            if copied and not weight.copied:
                continue
            if self._takes_masters(weight) and not weight.gathered_bytes:
                continue
            found += weight.padded * (weight.gathered_bytes or self.sizes.low)
        return found

    def _takes_masters(self, weight: Weight) -> bool:
        """Return whether products take this rank's part of a weight as it is."""
        mesh = self.run.mesh
        is_whole = mesh.world_size == mesh.tensor
        has_dtype = self.sizes.held(weight) == self.sizes.low
        return is_whole and has_dtype and not self.sizes.offloads

    # Gradients

    def accumulate(self, group: Group, made: int, held: int) -> Iterator[Event]:
        """Keep a group's whole gradients for the next micro-batch.

        made: bytes of new gradients. held: of buffers.
        """
        first = group.modules[0]
        if not group.trained.weights:
            return
        whole = group.trained.numbers * self.sizes.reduced
        before = yield from self._end_waiting(group)
        copy = 0
        if not before and self.sizes.reduced != self.sizes.low:
            # One parameter's at a time is there in both dtypes.
            largest = max(weight.numbers for weight in group.trained.weights)
            copy = whole - made + self.sizes.low * largest
        yield Run("backward", first, {"communication": held + before + made + copy})
        self._unreduced.add(group)
        yield Alloc("communication", ("unreduced", group), whole)

    def reduce(self, group: Group, made: int, ahead: int) -> Iterator[Event]:
        """Reduce a group's gradients. made: bytes of new ones. ahead: of the gather that runs."""
        first = group.modules[0]
        if not group.trained.weights:
            return
        part = group.trained.part * self.sizes.reduced
        whole = self.reduction_buffer(group)
        before = yield from self._end_waiting(group)
        made = before or made
        # Weights divided along another dimension are put in order one by one.
        ordered = 0
        for weight in group.trained.weights:
            if weight.copied:
                ordered = max(ordered, weight.numbers * self.sizes.low)
        if ordered:
            yield Run("backward", first, {"communication": ahead + made + ordered})
        yield Run("backward", first, {"communication": ahead + made + whole})
        scaled = whole if self.sizes.shards == 1 and self.run.mesh.world_size > 1 else 0
        yield Run("backward", first, {"communication": ahead + whole + part + scaled})
        if self.sizes.offloads or self.run.optimizer.early_step_in_backward:
            return
        if group not in self._has_gradient:
            self._has_gradient.add(group)
            yield Alloc("gradients", group, group.trained.part * self.sizes.master)
        elif self.run.mesh.dp_replicate > 1:
            self._replicated.append(group)
            yield Alloc("communication", ("replicated", group), part)

    def reduction_buffer(self, group: Group) -> int:
        """Return the bytes of a reduction's buffer."""
        return group.trained.padded * self.sizes.reduced

    def _end_waiting(self, group: Group) -> Generator[Event, None, int]:
        """Free a group's whole gradients of earlier micro-batches; return their bytes."""
        if group not in self._unreduced:
            return 0
        self._unreduced.remove(group)
        yield Free("communication", ("unreduced", group))
        return group.trained.numbers * self.sizes.reduced

    def end_backward(self) -> Iterator[Event]:
        """Free what torch holds until a backward ends."""
        for group in self._replicated:
            yield Free("communication", ("replicated", group))
        self._replicated.clear()
