"""What stands beside the core, by name: commands, features, exports and trackers of
`titanlite.contrib` and of other packages.

    [project.entry-points."titanlite.commands"]      # in the pyproject.toml of another package
    noise = "gradient_noise.command:add_command"

The core imports such a module by this table alone, when its name is asked for. The entry points of
other packages are read for names that are not in the table, and to list all.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

#: Kind → name → where it is: a module and an object in it.
OURS = {
    "commands": {
        "sweep": "titanlite.contrib.lab.sweep:add_command",
        "ladder": "titanlite.contrib.lab.ladder.command:add_command",
        "mup": "titanlite.contrib.lab.mup.command:add_commands",
        "prove": "titanlite.contrib.evidence.prove:add_command",
        "parity": "titanlite.contrib.evidence.parity:add_command",
        "push": "titanlite.contrib.hub.command:add_command",
    },
    "features": {
        "hub": "titanlite.contrib.hub.feature:HubFeature",
        "local_saves": "titanlite.contrib.resilience.feature:LocalSaves",
    },
    #: Functions of `titanlite.cli.hub.export_weights.Source` that return files to write beside
    #: weights, by name.
    "exports": {"statement": "titanlite.contrib.hub.data_statement:statement_files"},
    "trackers": {
        "wandb": "titanlite.metrics.wandb:WandbTracker",
        "mlflow": "titanlite.contrib.trackers.mlflow:MlflowTracker",
        "comet": "titanlite.contrib.trackers.comet:CometTracker",
        "trackio": "titanlite.contrib.trackers.trackio:TrackioTracker",
    },
}


@cache
def of_packages(kind: str) -> dict[str, str]:
    """Return the places of what installed packages bring, by name, without names of ours."""
    from importlib.metadata import entry_points

    points = entry_points(group=f"titanlite.{kind}")
    return {point.name: point.value for point in points if point.name not in OURS[kind]}


def place_of(kind: str, name: str) -> str | None:
    """Return where a name is, as "package.module:object"; None: nothing has it."""
    return OURS[kind].get(name) or of_packages(kind).get(name)


def installed(kind: str) -> dict[str, str]:
    """Return the places of all that is installed, by name, ours first."""
    ours = {name: place for name, place in OURS[kind].items() if not lack(place)}
    return {**ours, **of_packages(kind)}


def lack(place: str) -> str:
    """Return what a place needs and this installation lacks, in words; "": nothing."""
    parts = place.partition(":")[0].split(".")
    for count in range(1, len(parts) + 1):
        package = ".".join(parts[:count])
        try:
            found = find_spec(package)
        except Exception as error:
            # To find a module, the packages around it are imported.
            return f"needs {package}, which cannot be imported: {error!r}"
        if found is None:
            return f"needs {package}, which is not installed"
    return ""


def load(place: str) -> Any:
    """Import the object at a place."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
