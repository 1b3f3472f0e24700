"""Draws the badges of the README from pyproject.toml and constraints.txt.

    python scripts/badges.py            # writes docs/images/badge-*.svg
    python scripts/badges.py --check    # exit code 1 if one is out of date

They are files of the repository: no server knows who reads the page.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
#: Pixels. A character is drawn at most this wide: browsers choose the font.
_CHARACTER = 6.6
_PADDING = 7
_HEIGHT = 20


def facts() -> dict[str, str]:
    """Return label → value of each badge."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest, above = re.findall(r"3\.(\d+)", project["requires-python"])
    (torch,) = (one for one in project["dependencies"] if re.match(r"torch\W", one))
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned, "constraints.txt pins torch"
    return {
        "version": _version(),
        "python": f"3.{lowest} to 3.{int(above) - 1}",
        "torch": f"{torch.removeprefix('torch')}, tested with {pinned[1]}",
        "licence": project["license"],
    }


def _version() -> str:
    """Return the version without an import of the package, which may not be installed."""
    text = (ROOT / "titanlite" / "__init__.py").read_text()
    found = re.search(r'__version__ = "([^"]+)"', text)
    assert found, "titanlite/__init__.py has a version"
    return found[1]


def draw(label: str, value: str) -> str:
    """Return an SVG: the label on grey, the value on blue."""
    left = round(len(label) * _CHARACTER) + 2 * _PADDING
    right = round(len(value) * _CHARACTER) + 2 * _PADDING
    value = html.escape(value)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{_HEIGHT}" \
role="img" aria-label="{label}: {value}">
<title>{label}: {value}</title>
<rect width="{left + right}" height="{_HEIGHT}" rx="3" fill="#555"/>
<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v{_HEIGHT - 6}a3 3 0 0 1-3 3h-{right - 3}z" \
fill="#2266aa"/>
<g fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" text-anchor="middle">
<text x="{left / 2}" y="14">{label}</text>
<text x="{left + right / 2}" y="14">{value}</text>
</g>
</svg>
"""


def main(argv: list[str]) -> int:
    """Write the badges, or say which are out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(argv)
    code = 0
    for label, value in facts().items():
        file = FOLDER / f"badge-{label}.svg"
        text = draw(label, value)
        if not options.check:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            print(f"{file.relative_to(ROOT)} is out of date: run python scripts/badges.py")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
