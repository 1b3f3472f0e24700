"""The models of a ladder: small ones of the target's proportions. No torch.

N is what `titanlite.models.counts.count_multiplied_parameters` counts: the parameters that a token
is multiplied by. The head is among them, the embedding is not, of MoE layers the chosen experts
are. A count without the head bends the laws of small models, whose largest part it is (Porian et
al. 2024, arXiv:2406.19146; Pearce and Song 2024, arXiv:2406.12907).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanlite.contrib.lab.ladder.law import FEWEST_SIZES, LadderError
from titanlite.models.counts import count_multiplied_parameters
from titanlite.models.llama import LlamaArgs
from titanlite.models.spec import ShapeError
from titanlite.utils import counted

#: Models of a ladder without `ladder.sizes`, and the share of the largest in the target.
DEFAULT_SIZES = 5
DEFAULT_SHARE = 8
#: Fields of arguments that follow the width, where a family has them.
_WIDTHS = ("ffn_dim", "expert_width", "q_lora_rank", "kv_lora_rank")
#: A model may be off the wanted number of parameters, or of heads for each key, by this factor.
_NEAR = 1.25
_NEAR_GROUP = 1.5
#: A block alone cannot build on another's attention: such models lie beside the law of deeper ones
#: (docs/log.md; Olsson et al. 2022, arXiv:2209.11895, see it in what they learn).
_FEWEST_LAYERS = 2
#: Most by which a model may be deeper or flatter, and what that weighs beside its size.
_SKEW = 1.5
_WEIGHT_OF_DEPTH = 0.5
#: Widths that matrix products like: multiples of the first up to ten of the second.
_COARSE = 64
_FINE = 8


@dataclass(frozen=True)
class Shape:
    """A model of the ladder."""

    args: LlamaArgs
    #: N.
    parameters: int
    #: Fields of `model.overrides`.
    overrides: dict[str, Any]
    #: How far depth over width is from that of the target, in logarithms.
    skew: float

    @property
    def name(self) -> str:
        return f"d{self.args.dim}-l{self.args.n_layers}"


def shapes(target: LlamaArgs, wanted: Sequence[int]) -> list[Shape]:
    """Return the models nearest to the `wanted` parameters, the smallest first. Raises LadderError.

    wanted: empty: the default ones.
    """
    # The default ones are by blocks: of a small model with a large vocabulary the head is nearly
    # all.
    head = 0 if wanted else target.n_vocab
    whole = count_multiplied_parameters(target) - head * target.dim
    halves = [whole / DEFAULT_SHARE / 2**step for step in range(DEFAULT_SIZES)]
    sizes = sorted(wanted, reverse=True) or halves
    candidates = list(_candidates(target, round(sizes[0]) + head * target.dim))
    found: list[Shape] = []
    for size in sizes:

        def distance(shape: Shape, size: float = size) -> float:
            parameters = shape.parameters - head * shape.args.dim
            return abs(math.log(parameters / size)) + _WEIGHT_OF_DEPTH * shape.skew

        if candidates:
            found.insert(0, min(candidates, key=distance))
        # For a narrow target, two sizes may be nearest to one model.
        candidates = [one for one in candidates if one.parameters < found[0].parameters]
    if len(found) < FEWEST_SIZES:
        raise LadderError(
            f"a law needs {FEWEST_SIZES} sizes, and this file's model has "
            f"{counted(len(found), 'smaller ones')} of its proportions: give it more heads or "
            "layers"
        )
    return found


def _candidates(target: LlamaArgs, largest: int) -> Iterator[Shape]:
    heads = 0
    while True:
        heads += 1
        wanted = max(heads * target.kv_heads / target.n_heads, 1)
        shared = _kv_heads(target, heads)
        if max(shared / wanted, wanted / shared) > _NEAR_GROUP:
            continue
        layers = target.n_layers * heads / target.n_heads
        found = []
        fewest = max(math.floor(layers / _SKEW), min(_FEWEST_LAYERS, target.n_layers))
        most = max(math.ceil(layers * _SKEW), fewest)
        for number in range(fewest, most + 1):
            shape = _shape(target, heads, number)
            if shape is not None:
                found.append(shape)
        yield from found
        if found and found[0].parameters > largest * _NEAR:
            return


def _kv_heads(target: LlamaArgs, heads: int) -> int:
    wanted = max(heads * target.kv_heads / target.n_heads, 1)
    divisors = [number for number in range(1, heads + 1) if heads % number == 0]
    return min(divisors, key=lambda number: abs(math.log(number / wanted)))


def _shape(target: LlamaArgs, heads: int, layers: int) -> Shape | None:
    share = heads / target.n_heads
    dim = round(target.dim * share)
    if "head_dim" in target.__dataclass_fields__ or target.is_latent:
        dim = _round(target.dim * share)
    overrides: dict[str, Any] = {"dim": dim, "n_layers": layers, "n_heads": heads}
    if target.n_kv_heads is not None:
        overrides["n_kv_heads"] = _kv_heads(target, heads)
    overrides["ffn_dim"] = _round(target.ffn_width * share)
    for name in _WIDTHS[1:]:
        if name in target.__dataclass_fields__ and getattr(target, name):
            overrides[name] = _round(getattr(target, name) * share)
    dense = getattr(target, "n_dense_layers", 0)
    if dense and "n_dense_layers" in target.__dataclass_fields__:
        overrides["n_dense_layers"] = min(max(round(dense * share), 1), layers - 1)
    try:
        args = replace(target, **overrides)
    except ShapeError:
        return None
    skew = abs(math.log(layers / (target.n_layers * dim / target.dim)))
    return Shape(args, count_multiplied_parameters(args), overrides, skew)


def _round(width: float) -> int:
    unit = _COARSE if width >= 10 * _COARSE else _FINE
    return max(round(width / unit), 1) * unit
