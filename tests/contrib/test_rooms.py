"""The core does not import `titanlite.contrib`: `titanlite.doors` names what stands there."""

from __future__ import annotations

import re

from tests.support.processes import ROOT

#: Imports for type checkers alone.
TYPES = re.compile(r"if TYPE_CHECKING:\n(?:    .*\n|\n)+")


def test_the_core_names_contrib_in_the_table_of_doors_alone() -> None:
    library = ROOT / "titanlite"
    found = set()
    for file in library.rglob("*.py"):
        place = file.relative_to(library)
        text = TYPES.sub("", file.read_text(encoding="utf-8"))
        if place.parts[0] != "contrib" and re.search(r"(from |import |\")titanlite\.contrib", text):
            found.add(str(place))
    assert found == {"doors.py"}
