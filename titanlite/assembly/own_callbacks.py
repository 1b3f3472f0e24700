"""The callbacks of the user, which `job.callbacks` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titanlite.callbacks import Callback
from titanlite.config.dotted_keys import HINT
from titanlite.config.dotted_paths import resolve_as
from titanlite.config.errors import Problem, refuse


def load_callbacks(paths: Sequence[str], where: str = "") -> list[Callback]:
    """Make the callbacks that `job.callbacks` names.

    Raises ConfigError naming all that cannot be loaded.
    """

    def accept(found: Any) -> bool:
        if isinstance(found, type):
            return issubclass(found, Callback)
        return isinstance(found, Callback)

    made = []
    problems = []
    for path in paths:
        try:
            found = resolve_as(path, accept, "a titanlite.Callback")
            made.append(found() if isinstance(found, type) else found)
        except Exception as error:
            reason = str(error)
            if not isinstance(error, ValueError):
                reason = f"{path!r} {type(error).__name__}: {error}"
            problems.append(Problem("unresolved", "job.callbacks", reason, HINT, where))
    refuse(problems)
    return made
