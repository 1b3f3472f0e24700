"""How rotary frequencies are scaled for sequences longer than those a model was first trained with.

A scaling is a table in a config, with the names of `transformers`; `rope_type` tells its kind.
`titanlite.models.rope` computes the frequencies; `titanlite.models.rope_config_json` reads and
writes config.json. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar

from titanlite.config.errors import Problem
from titanlite.models.argument_fields import checked_fields
from titanlite.models.spec import ShapeError, names_like, shown

_TABLE = "rope_scaling"
#: `original_context`, as `transformers` names it.
_THEIRS = "original_max_position_embeddings"


@dataclass(frozen=True)
class Scaling:
    """Base of all kinds."""

    #: The value of `rope_type`.
    kind: ClassVar[str]

    @classmethod
    def parse(cls, value: object) -> Scaling | None:
        """Return the scaling of a table, of Llama 3.1's bare factor (1: none), or of "none".

        A table without `rope_type` is Llama 3.1's. Raises ShapeError for all else.
        """
        if value is None or value == "none":
            return None
        if isinstance(value, Scaling):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return None if value == 1 else RopeScaling(factor=float(value))
        if not isinstance(value, Mapping):
            raise _error(f'expected a table, a factor or "none", got {shown(value)}')
        table = dict(value)
        kind = table.pop("rope_type", RopeScaling.kind)
        if kind not in KINDS:
            message = f"no rope_type {shown(kind)}"
            raise ShapeError(
                Problem("model", f"{_TABLE}.rope_type", message, names_like(str(kind), KINDS))
            )
        return KINDS[kind].of_table(table)

    @classmethod
    def of_table(cls, table: Mapping[str, object]) -> Scaling:
        """Return the scaling of a table without `rope_type`. Raises ShapeError."""
        given = checked_fields(cls, table, _TABLE)
        missing = []
        for one in fields(cls):
            if one.default is MISSING and one.name not in given:
                missing.append(f'"{one.name}"')
        if missing:
            raise _error(f"the table of {cls.kind} needs a {' and a '.join(missing)}")
        return cls(**given)

    def as_table(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def amplitude(self) -> float:
        """A factor of cosines and sines; `attention_factor` of `transformers`."""
        return 1.0

    def positions(self, context: int) -> int:
        """Return `max_position_embeddings` from the context without scaling."""
        return context


def _error(message: str, name: str = "") -> ShapeError:
    return ShapeError(Problem("model", f"{_TABLE}.{name}" if name else _TABLE, message))


def _at_least_one(scaling: Any, *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        if not value >= 1:
            raise _error(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class RopeScaling(Scaling):
    """Llama 3.1's stretching of the long wavelengths (Llama 3 model card)."""

    kind: ClassVar[str] = "llama3"

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: Tokens of context the model was first trained with.
    original_context: int = 8192

    def __post_init__(self) -> None:
        _at_least_one(self, "factor")
        if not 0.0 < self.low_freq_factor <= self.high_freq_factor:
            given = f"{self.low_freq_factor} and {self.high_freq_factor}"
            raise _error(f"needs 0 < low_freq_factor <= high_freq_factor, got {given}")
        if self.original_context < 1:
            raise _error(f"original_context must be positive, got {self.original_context}")

    @classmethod
    def of_table(cls, table: Mapping[str, object]) -> Scaling:
        """Return the scaling; `original_context` may have its name in `transformers`."""
        given = dict(table)
        if _THEIRS in given:
            if "original_context" in given:
                raise _error("is a second name of original_context: give one of the two", _THEIRS)
            given["original_context"] = given.pop(_THEIRS)
        return super().of_table(given)


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    kind: ClassVar[str] = "linear"

    rope_type: str = field(default="linear", init=False)
    factor: float

    def __post_init__(self) -> None:
        _at_least_one(self, "factor")


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): stretches long wavelengths, scales the logits."""

    kind: ClassVar[str] = "yarn"

    rope_type: str = field(default="yarn", init=False)
    factor: float
    #: Tokens of context the model was first trained with.
    original_max_position_embeddings: int
    #: Factor of cosines and sines; None: by `factor` and, if both are given, the two `mscale`.
    attention_factor: float | None = None
    #: Turns in the original context above which a pair keeps its frequency.
    beta_fast: float = 32.0
    #: Turns below which it is divided by `factor`.
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    #: The ramp between the two begins and ends at whole pairs.
    truncate: bool = True

    def __post_init__(self) -> None:
        _at_least_one(self, "factor", "original_max_position_embeddings")
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise _error(f"must be positive, got {value}", name)
        if self.beta_fast < self.beta_slow:
            message = f"is {self.beta_slow}, more than beta_fast = {self.beta_fast}"
            raise _error(message, "beta_slow")

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._by_length(self.mscale) / self._by_length(self.mscale_all_dim)
        return self._by_length(1.0)

    @property
    def mscale_of_all(self) -> float:
        """A factor of whole queries and keys with `mscale_all_dim`; else 1."""
        return self._by_length(self.mscale_all_dim) if self.mscale_all_dim else 1.0

    def _by_length(self, mscale: float) -> float:
        """The rule of the paper, section 3.4."""
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def serves(self) -> int:
        """Tokens of context that the scaling serves."""
        return round(self.factor * self.original_max_position_embeddings)

    def positions(self, context: int) -> int:
        # `transformers` 4 takes the factor from this number.
        return self.serves


#: Value of `rope_type` → its class.
KINDS: Mapping[str, type[Scaling]] = {
    kind.kind: kind for kind in (RopeScaling, LinearScaling, YarnScaling)
}
