#!/usr/bin/env python
"""Print the places that a recipe of docs/extend.md names, with the numbers of their lines.

usage: python scripts/recipe.py NAME

NAME: words of the recipe's heading, as `figure`. Without one: list the recipes. No recipe of that
name: list them on standard error, and exit with 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "extend.md"
#: `file:symbol`, such as `titanlite/step.py:TrainStep.run`.
PLACE = re.compile(r"`([\w./-]+\.py):([\w.]+)`")


def recipes() -> dict[str, str]:
    """Return heading → text of each recipe."""
    parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    found = {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}
    return {heading: text for heading, text in found.items() if PLACE.search(text)}


def source(file: str, symbol: str) -> str:
    """Return the lines of a class, function, table or field. Raises KeyError for another name."""
    text = (ROOT / file).read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(text).body
    start = end = 0
    for name in symbol.split("."):
        start, end, body = _found(body, name)
    lines = text.splitlines()[start - 1 : end]
    return "\n".join(f"{number:5} {line}" for number, line in enumerate(lines, start))


def imports(file: str, symbol: str) -> str:
    """Return the imports from this repository of a test that another one is copied from."""
    used = set(re.findall(r"\w+", source(file, symbol)))
    lines = []
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("tests", "titanlite")):
            names = [one.name for one in node.names if (one.asname or one.name) in used]
            lines += [f"      from {node.module} import {', '.join(names)}"] if names else []
    return "\n".join([*lines, ""]) if file.startswith("tests/") else ""


def _found(body: list[ast.stmt], name: str) -> tuple[int, int, list[ast.stmt]]:
    for index, node in enumerate(body):
        if name not in _names(node):
            continue
        end = node.end_lineno or node.lineno
        after = body[index + 1 : index + 2]
        if isinstance(node, ast.AnnAssign) and after and isinstance(after[0], ast.Expr):
            end = after[0].end_lineno or end  # the docstring of a field
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        return first, end, getattr(node, "body", [])
    raise KeyError(name)


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id


def main() -> None:
    words = [word.lower() for word in sys.argv[1:]]
    if not words:
        print("\n".join(recipes()))
        return
    chosen = {
        heading: text
        for heading, text in recipes().items()
        if all(word in heading.lower() for word in words)
    }
    if not chosen:
        sys.exit("no heading has all of these words; the recipes:\n" + "\n".join(recipes()))
    for heading, text in chosen.items():
        print(f"## {heading}\n{text}")
        for file, symbol in dict.fromkeys(PLACE.findall(text)):
            print(f"--- {file}:{symbol}\n{imports(file, symbol)}{source(file, symbol)}\n")


if __name__ == "__main__":
    main()
