"""docs/cli.md says what the command has, and how each of its commands ends."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

if __name__ == "__main__":  # the folder of a script is the first to look in, not the repository
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.commands import commands
from tests.support.processes import ROOT
from titanlite import exit_codes
from titanlite.cli.command_table import make_parser

DOCS = ROOT / "docs"
ROWS = {
    row[1]: (row[2], row[3])
    for row in re.finditer(
        r"^\| `titanlite ([a-z -]+)` \| (.*) \| (.*) \|$", (DOCS / "cli.md").read_text(), re.M
    )
}
CODES = {
    value
    for name, value in vars(exit_codes).items()
    if name.isupper() and isinstance(value, int) and value != exit_codes.BEGUN
}


#: The part of the page that the parsers write.
OPTIONS = re.compile(r"(<!-- options: [^>]* -->\n)(.*?)(<!-- /options -->)", re.DOTALL)


def options() -> str:
    """Return a section for each command: what it does, its arguments and options."""
    found = reversed(commands(make_parser()).items())  # in the order of `titanlite --help`
    return "\n".join(section(name, parser) for name, parser in found)


def section(name: str, parser: argparse.ArgumentParser) -> str:
    text = f"### titanlite {name}\n{described(parser.description or '')}\n"
    rows = [
        f"| {written(action)} | {cell(action.help or '')} |\n"
        for action in parser._actions
        if "--help" not in action.option_strings and action.help != argparse.SUPPRESS
    ]
    return f"{text}\n| argument | meaning |\n|---|---|\n{''.join(rows)}" if rows else text


def described(text: str) -> str:
    """Return a description; its indented lines become code."""
    blocks = [block.strip("\n") for block in text.split("\n\n")]
    return "\n\n".join(
        f"```\n{block}\n```" if block.startswith("  ") else cell(block) for block in blocks
    )


def written(action: argparse.Action) -> str:
    """Return an argument as it is written on the command line."""
    values = action.metavar or " or ".join(map(str, action.choices or ()))
    if not action.option_strings:
        return f"`{values or action.dest}`"
    value = f" {values}" if action.nargs != 0 else ""
    return ", ".join(f"`{word}{value}`" for word in action.option_strings)


def cell(text: str) -> str:
    """Return a text on one line, without what closes a cell or begins a tag."""
    line = " ".join(text.replace("%%", "%").split())
    return re.sub(r"[|<*\[]", lambda sign: f"\\{sign[0]}", line)


def test_the_page_has_the_options_of_every_command():
    match = OPTIONS.search((DOCS / "cli.md").read_text(encoding="utf-8"))
    assert match
    assert match[2] == options(), "run: python scripts/generate.py"


def codes(command: str) -> set[int]:
    return set(map(int, re.findall(r"(?:^|, )(\d+)", ROWS[command][0])))


def test_the_table_has_every_command_and_which_has_json():
    parsers = commands(make_parser())
    assert set(ROWS) == set(parsers)
    for name, parser in parsers.items():
        assert ("--json" in parser.format_help()) == (not ROWS[name][1].startswith("–")), name


def test_the_documented_codes_are_those_of_the_code():
    table = (DOCS / "cli.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)} == CODES
    assert all(codes(command) <= CODES for command in ROWS)
    assert codes("train") == CODES - {exit_codes.ERROR}


def test_every_command_that_the_docs_name_is_there():
    # noise is the command of the package that add-a-feature.md writes.
    known = {*ROWS, *(name.partition(" ")[0] for name in ROWS), "noise"}
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "titanlite" / "README.md"]:
        text = page.read_text()
        examples = "".join(re.findall(r"```.*?```", text, re.S))
        found = re.findall(r"`titanlite ([a-z]+)(?: ([a-z]+))?", text)
        found += re.findall(
            r"^\$? ?(?:.venv/bin/)?titanlite ([a-z]+)(?: ([a-z]+))?", examples, re.M
        )
        for group, word in found:
            name = f"{group} {word}".strip() if group in ("config", "checkpoint") else group
            assert name in known, f"{page.name}: titanlite {name}"


if __name__ == "__main__" and "--write" in sys.argv:
    page = DOCS / "cli.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(OPTIONS.sub(lambda match: match[1] + options() + match[3], text))
