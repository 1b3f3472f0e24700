"""What a config is refused for, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from titanlite.config.errors import ConfigError, Problem
from titanlite.resolve.load import check_config


def refusals(flags: Sequence[str], ranks: int = 1) -> Sequence[Problem]:
    """All that a training run of these flags on so many ranks is refused for; fails if it
    is not.
    """
    with pytest.raises(ConfigError) as caught:
        check_config(list(flags), ranks)
    return caught.value.problems


def refusal(flags: Sequence[str], ranks: int = 1) -> Problem:
    """The one thing that it is refused for."""
    (problem,) = refusals(flags, ranks)
    return problem
