"""The documentation site: its navigation has every page, and broken links are found.

A workflow builds it for each change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tests.support.processes import ROOT
from tests.support.scripts import load_script

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Pages for maintainers, and those that another one lists, which the navigation leaves out.
CARDS = (ROOT / "docs" / "cards").glob("*_*.md")
NOT_LISTED = {"docs/log.md", *(card.relative_to(ROOT).as_posix() for card in CARDS)}


def listed(entries: list) -> Iterator[str]:
    """Yield the pages of a navigation, at every depth."""
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from listed(value)


def test_the_navigation_has_every_page_once():
    settings = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    found = list(listed(settings["nav"]))
    assert len(found) == len(set(found))
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in found if page.startswith("docs/")} == pages - NOT_LISTED
    assert all((ROOT / page).is_file() for page in found)


def test_a_broken_link_and_a_file_of_another_server_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html#here"></a><a href="#top"></a><a href="no.html"></a>'
        '<a href="b.html#gone"></a><script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="here"></p><link rel="stylesheet" href="//font/x.css">')
    assert load_script("docs_site").check(tmp_path) == [
        "a.html loads https://example.org/x.js",
        "a.html: no.html leads nowhere",
        "a.html: b.html#gone leads nowhere",
        "b.html loads //font/x.css",
    ]
