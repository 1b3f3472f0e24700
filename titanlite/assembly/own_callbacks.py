"""Code of the user: the callbacks that `job.callbacks` names, and trackers of other packages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titanlite import doors
from titanlite.callbacks import Callback
from titanlite.config.errors import Problem, refuse
from titanlite.config.import_objects import resolve_as
from titanlite.config.import_path_keys import HINT


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


def check_trackers(names: Sequence[str], where: str = "") -> None:
    """Import the trackers of a run. Raises ConfigError naming those that cannot be loaded."""
    from titanlite.metrics.tracker_base import Tracker

    problems = []
    for name in names:
        place = doors.place_of("trackers", name) or name
        try:
            found = doors.load(place)
            if not issubclass(found, Tracker):
                raise TypeError(f"{found!r} is no titanlite.metrics.tracker_base.Tracker")
        except Exception as error:
            reason = f"the tracker {name!r} ({place}) {type(error).__name__}: {error}"
            problems.append(
                Problem("unresolved", "metrics.trackers", reason, "mend or leave it out", where)
            )
    refuse(problems)
