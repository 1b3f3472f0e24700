"""The memory of offloaded activations, for `titanlite.plan.memory`. No torch here.

titanlite/plan/FORMULAS.md derives the sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.plan.events import Alloc, Event, Free
from titanlite.plan.kept_events import KeptEvents

if TYPE_CHECKING:
    from titanlite.plan.rank_sizes import RankSizes


class SentEvents(KeptEvents):
    """Activations of a rank, of which those of blocks are sent to the host."""

    def __init__(self, sizes: RankSizes) -> None:
        super().__init__(sizes)
        #: Bytes of offloaded activations: all in host memory, and of the tensor sent last.
        self._away = 0
        self._sent = 0
        #: Some of them are on the device besides.
        self._is_under_way = False

    def keep(self, module: str) -> Iterator[Event]:
        if not _is_block(module):
            yield from super().keep(module)
            return
        size = self.kept(module)
        yield Alloc("activations", ("sent", module), size, on_host=True)
        self._away += size
        yield from self._on_the_way(self._sending(module))

    def drop(self, module: str) -> Iterator[Event]:
        if not _is_block(module):
            yield from super().drop(module)
            return
        size = self.kept(module)
        yield Free("activations", ("sent", module))
        self._away -= size
        # One tensor is fetched ahead.
        fetched = self.shape.hidden if self._away else 0
        if size == 0:
            # Its input is a buffer of the pipeline, and is fetched into tensors beside it.
            fetched = self._sending(module)
        yield from self._on_the_way(fetched)

    def _sending(self, block: str) -> int:
        """Return the bytes of the two tensors on their way when a block is sent."""
        before = self._sent
        if self.sizes.mode(block) == "none":
            width = self.sizes.shape_of(block).args.ffn_width
            numbers = self.shape.tokens * width // self.shape.tp
            self._sent = numbers * self.shape.size
            return 2 * self._sent
        self._sent = self.shape.hidden
        return self._sent + before

    def _on_the_way(self, size: int) -> Iterator[Event]:
        """size: bytes on the device while they are sent or fetched."""
        if self._is_under_way:
            yield Free("activations", "under way")
        self._is_under_way = True
        yield Alloc("activations", "under way", size)


def _is_block(module: str) -> bool:
    return module.startswith("layers.")
