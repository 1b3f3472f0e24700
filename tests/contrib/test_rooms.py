"""The core does not import `titanlite.contrib`; tables name its commands, features and trackers."""

from __future__ import annotations

import re

from tests.support.processes import ROOT
from titanlite.cli.command_table import COMMANDS


def test_the_core_names_contrib_in_the_tables_of_commands_and_features_alone() -> None:
    library = ROOT / "titanlite"
    found = set()
    for file in library.rglob("*.py"):
        place = file.relative_to(library)
        text = file.read_text(encoding="utf-8")
        if place.parts[0] != "contrib" and re.search(r"(from |import |\")titanlite\.contrib", text):
            found.add(str(place))
    assert found == {"cli/command_table.py", "metrics/trackers.py", "run/features.py"}
    assert COMMANDS["sweep"].startswith("titanlite.contrib.lab.")
