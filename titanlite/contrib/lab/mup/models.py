"""The models of a coordinate check: the config's, in several widths. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanlite.config.errors import unfit
from titanlite.config.sections import Mup
from titanlite.features.mup.base import base_args
from titanlite.models.llama import LlamaArgs
from titanlite.models.spec import ShapeError

#: Widths that are tried where none are given; the first of them that models can have are taken.
_CANDIDATES = (64, 128, 256, 512, 1024, 2048)
_COUNT = 4
#: Blocks of the models at most.
LAYERS = 4
#: Ids are taken modulo this. The vocabulary has one size at all widths, and large heads would take
#: most of the time.
MOST_IDS = 4096


@dataclass(frozen=True)
class Models:
    """Arguments of models that differ in width alone."""

    #: Arguments of the base model.
    base: Any
    #: Models by width.
    of: dict[int, Any]
    #: Arguments that are the same at all widths, as `mup.base` would name them.
    kept: dict[str, Any]

    @property
    def widths(self) -> list[int]:
        return list(self.of)


def models_of(args: LlamaArgs, mup: Mup, asked: Sequence[int]) -> Models:
    """Return the models of a check. Raises ConfigError.

    mup: its base model; without one the first width is the base. asked: widths; empty: some that
    fit.
    """
    most = max(LAYERS, getattr(args, "n_dense_layers", 0) + 1)
    small = replace(args, n_layers=min(args.n_layers, most), vocab_size=min(args.n_vocab, MOST_IDS))
    given = {name: value for name, value in mup.base.items() if name != "n_layers"}
    kept = {name: value for name, value in given.items() if getattr(small, name) == value}
    found: dict[int, Any] = {}
    problems = []
    base = base_args(small, mup.base_dim, given) if mup.base_dim else None
    for width in asked or _CANDIDATES:
        try:
            sized = base_args(base or small, width, kept)
        except ShapeError as error:
            problems.append(f"width {width}: {error.problems[0].message}")
            continue
        # Between widths with the same number of key heads, keys are like an output: they have other
        # rules, and attention falls.
        if asked or sized.kv_heads * args.n_heads == args.kv_heads * sized.n_heads:
            found[width] = sized
    if not asked:
        found = dict(list(found.items())[:_COUNT])
    if (asked and problems) or len(found) < 2:
        unit = math.lcm(args.dim // math.gcd(args.dim, args.n_heads), 8)
        fit = ",".join(str(unit * count) for count in (1, 2, 4, 8))
        hint = f"give multiples of a head's width: --widths {fit}"
        message = "; ".join(["a slope needs two widths of the model", *problems])
        raise unfit("--widths", message, hint)
    return Models(base or found[min(found)], found, kept)
