#!/usr/bin/env python
"""Build the documentation site from docs/, and check every link in it.

usage: python scripts/docs_site.py [--out FOLDER]        # needs: pip install 'titanlite[docs]'

The site has the layout of the repository, so links between pages are the same in both. A file that
a page links to and that is no page becomes one: its text, or the list of a folder. Then zensical
builds the site, strictly. Exit code 1: a link leads nowhere, or a page loads a file of another
server.
"""

from __future__ import annotations

import argparse
import html.parser
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Pages from which the others are reached by links.
FIRST = ("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")
PICTURES = {".png", ".svg", ".gif", ".jpg", ".webp"}
#: Pages that the search leaves out: records of the past, for maintainers.
UNSEARCHED = {"docs/log.md", "CHANGELOG.md"}
#: Language of a code block, by the ending of a file.
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yaml": "yaml", ".json": "json"}
#: Code, or the target of a link.
CODE_OR_LINK = re.compile(
    r"(?P<code>^ *```.*?^ *```|`[^`\n]+`)|\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)",
    re.DOTALL | re.MULTILINE,
)
OTHER_SERVER = re.compile(r"(https?:)?//")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs")
    folder = parser.parse_args().out.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        collect(folder / "pages")
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")
    shutil.copy(ROOT / "docs" / "site.css", folder / "pages")
    shutil.copy(ROOT / "zensical.toml", folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=folder, env={**os.environ, "NO_COLOR": "1"})
    if built.returncode:
        sys.exit(1)
    problems = check(folder / "site")
    print("\n".join(problems) or f"no broken link in {folder / 'site'}")
    sys.exit(1 if problems else 0)


def collect(folder: Path) -> None:
    """Copy the pages, and what they link to, into an empty folder."""
    shutil.copytree(ROOT / "docs" / "images", folder / "docs" / "images")
    waiting = [ROOT / name for name in FIRST if (ROOT / name).is_file()]
    waiting += sorted((ROOT / "docs").rglob("*.md"))
    done = set()
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done.add(source)
        place = folder / name_of(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in PICTURES:
            shutil.copy(source, place)
            continue
        text, targets = with_site_links(text_of(source), source)
        waiting += targets
        place.write_text(text, encoding="utf-8")


def name_of(source: Path) -> str:
    """Return the path on the site, before zensical makes it a page."""
    name = source.relative_to(ROOT).as_posix()
    return name if source.suffix in {".md", *PICTURES} else f"{name}.md"


def text_of(source: Path) -> str:
    """Return a page, or one that shows a file or lists a folder."""
    name = source.relative_to(ROOT).as_posix()
    hidden = "---\nsearch:\n  exclude: true\n---\n"
    if source.is_dir():
        rows = [
            f"- [{one.name}]({source.name}/{one.name})\n"
            for one in sorted(source.iterdir())
            if one.name[0] not in "._"
        ]
        return f"{hidden}# {name}\n\n{''.join(rows)}"
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return (hidden if name in UNSEARCHED else "") + with_blank_lines(text)
    return f"{hidden}# {name}\n\n````{LANGUAGES.get(source.suffix, 'text')}\n{text}````\n"


def with_blank_lines(text: str) -> str:
    """Return a page with an empty line above each list and table: the site's Markdown needs it."""
    lines: list[str] = []
    in_code = False
    for line in text.splitlines():
        above = lines[-1] if lines else ""
        is_text_above = above and not above.startswith((" ", "- ", "* ", "|", "#"))
        if not in_code and is_text_above and line.startswith(("- ", "* ", "1. ", "| ", "|-")):
            lines.append("")
        if line.lstrip().startswith("```"):
            in_code = not in_code
        lines.append(line)
    return "\n".join(lines) + "\n"


def with_site_links(text: str, page: Path) -> tuple[str, list[Path]]:
    """Return the text with links as the site needs them, and the files that they lead to.

    Raises FileNotFoundError for a link that leads nowhere.
    """
    targets = []

    def on_site(match: re.Match[str]) -> str:
        if match["code"] or re.match(r"[a-z]+:", match["target"]):
            return match[0]
        target = Path(os.path.normpath(page.parent / match["target"]))
        if not target.exists():
            raise FileNotFoundError(f"{page.relative_to(ROOT)} links to {match['target']}")
        targets.append(target)
        path = os.path.relpath(ROOT / name_of(target), page.parent)
        return f"]({path}{match['anchor'] or ''})"

    return CODE_OR_LINK.sub(on_site, text), targets


@dataclass
class Links(html.parser.HTMLParser):
    """What one built page has: names that `#…` finds, its links, and the files that it loads."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given["href"])
        if "src" in given:
            self.loaded.append(given["src"])


def check(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere and each file that another server would
    give.
    """
    pages = {}
    for file in site.rglob("*.html"):
        pages[file] = Links()
        pages[file].feed(file.read_text(encoding="utf-8"))
    problems = []
    for file, page in sorted(pages.items()):
        if file.name == "404.html":  # a server shows it at any address: its links are absolute
            continue
        name = file.relative_to(site)
        problems += [f"{name} loads {url}" for url in page.loaded if OTHER_SERVER.match(url)]
        for url in [*page.links, *page.loaded]:
            if not re.match(r"[a-z]+:|//", url) and not leads_somewhere(url, file, pages):
                problems.append(f"{name}: {url} leads nowhere")
    return problems


def leads_somewhere(url: str, file: Path, pages: dict[Path, Links]) -> bool:
    path, _, anchor = urllib.parse.unquote(url).partition("#")
    path = path.partition("?")[0]
    target = Path(os.path.normpath(file.parent / path)) if path else file
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return False
    return not anchor or (target in pages and anchor in pages[target].anchors)


if __name__ == "__main__":
    main()
