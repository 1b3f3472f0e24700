"""Events of activations: what modules keep between forward and backward. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.plan.events import Alloc, Event, Free
from titanlite.plan.rank_sizes import RankSizes


class KeptEvents:
    """Activations of a rank; those of blocks may be sent to the host."""

    def __init__(self, sizes: RankSizes) -> None:
        self.sizes = sizes
        self.shape = sizes.shape
        self._offloads = sizes.run.activation_checkpoint.offload and sizes.device != "cpu"
        #: Bytes of offloaded activations: all in host memory, and of the tensor sent last.
        self._away = 0
        self._sent = 0
        #: Some of them are on the device besides.
        self._is_under_way = False

    def kept(self, module: str) -> int:
        """Return the bytes that a module keeps on the device, without an input that is a buffer of
        the pipeline.
        """
        kept = self.sizes.costs[module].kept
        if module != "tok_embeddings" and any(module == stage[0] for stage in self.sizes.stages):
            return kept - self.shape.hidden
        return kept

    def parts(self, module: str) -> dict[str, int]:
        """Return the bytes that a module keeps by part.

        Of the head only the hidden states are activations.
        """
        loss = 0
        if module == "output":
            has_norm_output = self.shape.tp == 1 and self.sizes.loss.chunks == 1
            hidden = self.shape.hidden * (2 if has_norm_output else 1)
            loss = self.sizes.costs[module].kept - hidden
        return {"activations": self.kept(module) - loss, "logits and loss": loss}

    def _is_sent(self, module: str) -> bool:
        """Whether a module's activations go to the host."""
        return self._offloads and module.startswith("layers.")

    def keep(self, module: str) -> Iterator[Event]:
        """Keep a module's tensors until the backward."""
        if not self._is_sent(module):
            for part, size in self.parts(module).items():
                yield Alloc(part, module, size)
            return
        size = self.kept(module)
        yield Alloc("activations", ("sent", module), size, on_host=True)
        self._away += size
        yield from self._on_the_way(self._sending(module))

    def drop(self, module: str) -> Iterator[Event]:
        """Keep a module's tensors no longer."""
        if not self._is_sent(module):
            for part in self.parts(module):
                yield Free(part, module)
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
        """Return the bytes of the two tensors that are on their way when a block is sent."""
        before = self._sent
        if self.sizes.mode(block) == "none":
            numbers = self.shape.tokens * self.sizes.args.ffn_width // self.shape.tp
            self._sent = numbers * self.shape.size
            return 2 * self._sent
        self._sent = self.shape.hidden
        return self._sent + before

    def _on_the_way(self, size: int) -> Iterator[Event]:
        """Set the bytes that are on the device while they are sent or fetched."""
        if self._is_under_way:
            yield Free("activations", "under way")
        self._is_under_way = True
        yield Alloc("activations", "under way", size)
