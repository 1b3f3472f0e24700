"""The arguments of Llama 4's decoder. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from titanlite.models.experts.arguments import ExpertArgs
from titanlite.models.fields import argument
from titanlite.models.llama import Rotary
from titanlite.models.spec import ShapeError

if TYPE_CHECKING:
    from typing_extensions import Self

#: Hugging Face's `model_type` of the model that reads images, too; this one is its text part.
PART_OF = "llama4"


@dataclass(frozen=True)
class Llama4Args(ExpertArgs):
    """Arguments of Llama 4's decoder; `ffn_dim` is the width of a dense feed-forward.

    A block without rotary positions has `nope_every` = 1, and one with them 0.
    """

    n_experts: int = 16
    top_k: int = 1
    #: `transformers` has none for these models; 0.001 is in their config.json.
    aux_loss: float = 0.001
    #: Step by which each expert's bias moves after an update; 0: there are no biases.
    bias_update: float = argument(0.0, decides="")
    #: Hidden width of each expert, the shared one too.
    expert_width: int = 8192
    #: Every so many blocks one has experts; the others are dense.
    sparse_step: int = 1
    #: How scores are made of the router's logits: "sigmoid", or "softmax".
    score: str = "sigmoid"
    #: Every so many blocks one has no rotary positions and attends to all; 0: none.
    nope_every: int = argument(4, may_be_zero=True)
    #: Tokens of a chunk, counted from the beginning of a document. In blocks with rotary positions
    #: a token attends to those of its chunk; 0: to all.
    chunk: int = argument(8192, may_be_zero=True)
    #: Whether q and k of blocks with rotary positions are divided by their root mean square, after
    #: the rotation.
    unit_qk: bool = True
    #: q of blocks without rotary positions grows by this share of log(1 + position // floor); 0:
    #: it does not.
    temperature: float = argument(0.1, may_be_zero=True)
    temperature_floor: int = 8192
    # No fields: these are the same for all.
    norm_topk = False
    scales_input = True
    n_shared_experts = 1
    joined_experts = True
    neighbours_rotate = True

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = []
        if self.n_experts and self.sparse_step > self.n_layers:
            wrong.append(
                f"sparse_step = {self.sparse_step} is more than n_layers = {self.n_layers}: no "
                "block has experts"
            )
        if self.score == "softmax_of_chosen":
            wrong.append('score must be "sigmoid" or "softmax"')
        if wrong:
            raise ShapeError(*wrong)

    def of_block(self, index: int) -> Self:
        """Return the arguments of block `index`."""
        has_rope = not self.nope_every or (index + 1) % self.nope_every != 0
        is_sparse = (index + 1) % self.sparse_step == 0
        block: Self = _of_kind(self, has_rope, is_sparse)
        return block

    @property
    def rotary(self) -> Rotary | None:
        return None if self.nope_every == 1 else super().rotary

    published_context = 262144

    def attention_flops(self, seq_len: int) -> int:
        """Do as `LlamaArgs.attention_flops`; keys outside the chunk are not counted."""
        return super().attention_flops(min(seq_len, self.chunk or seq_len))


@cache
def _of_kind(args: Llama4Args, has_rope: bool, is_sparse: bool) -> Any:
    kind = replace(args, nope_every=0) if has_rope else replace(args, nope_every=1, chunk=0)
    return kind if is_sparse else kind.without_experts()
