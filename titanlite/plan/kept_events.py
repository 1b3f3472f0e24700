"""Events of activations: what modules keep between forward and backward. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.plan.events import Alloc, Event, Free

if TYPE_CHECKING:
    from titanlite.plan.rank_sizes import RankSizes


class KeptEvents:
    """Activations of a rank, all on the device."""

    def __init__(self, sizes: RankSizes) -> None:
        self.sizes = sizes
        self.shape = sizes.shape

    def kept(self, module: str) -> int:
        """Return the bytes kept on the device, without inputs in pipeline buffers."""
        kept = self.sizes.costs[module].kept
        if module != "tok_embeddings" and any(module == stage[0] for stage in self.sizes.stages):
            return kept - self.shape.hidden
        if self.sizes.begins_gradients(module):
            return kept - self.shape.hidden
        return kept

    def parts(self, module: str) -> dict[str, int]:
        """Return the bytes kept by part; of the head hidden states alone are activations."""
        loss = 0
        if module == "output":
            has_norm_output = self.shape.tp == 1 and self.sizes.loss.chunks == 1
            hidden = self.shape.hidden * (2 if has_norm_output else 1)
            loss = self.sizes.costs[module].kept - hidden
        return {"activations": self.kept(module) - loss, "logits and loss": loss}

    def keep(self, module: str) -> Iterator[Event]:
        for part, size in self.parts(module).items():
            yield Alloc(part, module, size)

    def drop(self, module: str) -> Iterator[Event]:
        for part in self.parts(module):
            yield Free(part, module)
