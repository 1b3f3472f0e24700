#!/usr/bin/env python
"""Count long sentences in the docs, docstrings, comments and messages, and print the longest.

usage: python scripts/prose.py [FILE ...] [--worst N]

A sentence has at most 25 words; `LIMITS` says how many may have more. A test holds the shares.
Code, tables, addresses of links and headings are no sentences. Pages of `LEFT_OUT` are not counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_WORDS = 25
#: Largest share of sentences with more words, in percent, by kind of text.
LIMITS = {"docs": 1.2, "docstrings": 0.8, "comments": 0.8, "messages": 0.8}
#: Pages whose text is kept as it was written, or generated from docstrings, which count as such.
LEFT_OUT = {"log.md", "CHANGELOG.md", "api.md"}
#: Calls whose texts a user reads, by the last part of their name.
SPEAKERS = re.compile(r"Error$|^(Problem|warning|info|error|print|add_argument|add_parser)$")


@dataclass(frozen=True)
class Sentence:
    """One sentence and its place."""

    kind: str
    place: str
    text: str

    @property
    def words(self) -> int:
        return count_words(self.text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="pages and Python files (default: all)")
    parser.add_argument("--worst", type=int, default=15, help="sentences to print of each kind")
    given = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    files = {os.path.relpath(file, root) for file in given.files}
    found = [one for one in sentences_of(root) if not files or one.place in files]
    for kind, limit in LIMITS.items():
        own = [sentence for sentence in found if sentence.kind == kind]
        long = [sentence for sentence in own if sentence.words > MOST_WORDS]
        mark = "" if share_of_long(found, kind) <= limit else "  MISSED"
        share = share_of_long(found, kind)
        print(f"{kind}: {share:.1f} % of {len(own):,} sentences are long (<= {limit} %){mark}")
        for sentence in sorted(long, key=lambda one: -one.words)[: given.worst]:
            print(f"  {sentence.words:3} {sentence.place}: {sentence.text}")


def share_of_long(sentences: list[Sentence], kind: str) -> float:
    """Return the share of long sentences of a kind, in percent."""
    own = [sentence for sentence in sentences if sentence.kind == kind]
    long = sum(sentence.words > MOST_WORDS for sentence in own)
    return 100 * long / max(1, len(own))


def sentences_of(repository: Path) -> list[Sentence]:
    """Return every sentence of the pages and of the library."""
    found: list[Sentence] = []
    for page in pages_of(repository):
        place = str(page.relative_to(repository))
        for text in prose_of_page(page.read_text(encoding="utf-8")):
            found += (Sentence("docs", place, sentence) for sentence in split(text))
    for path in sorted((repository / "titanlite").rglob("*.py")):
        place = str(path.relative_to(repository))
        source = path.read_text(encoding="utf-8")
        for kind, text in [*texts_of_code(source), *comments_of(source)]:
            found += (Sentence(kind, place, sentence) for sentence in split(text))
    return found


def pages_of(repository: Path) -> list[Path]:
    """Return the Markdown pages: at the top, in docs/, and beside the code that they explain."""
    pages = sorted(repository.glob("*.md"))
    for folder in ("docs", "titanlite/plan", "tests/config", "tests/failures", "tests/nullgpu"):
        pages += sorted((repository / folder).rglob("*.md"))
    return [page for page in pages if page.name not in LEFT_OUT]


def prose_of_page(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a Markdown page, without code, tables, headings."""
    text = re.sub(r"^ *(```|~~~).*?^ *\1", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        is_code = all(row.startswith("    ") for row in block.splitlines() if row)
        block = block.strip()
        if not block or is_code or block.startswith(("#", "|", "!", "<")):
            continue
        rows = [row for row in block.splitlines() if not row.lstrip().startswith(("|", "#"))]
        yield re.sub(r"^(?:[-*]|\d+\.) +", "", " ".join(rows))


def texts_of_code(source: str) -> Iterator[tuple[str, str]]:
    """Yield docstrings, and the texts of errors, logs and help, as (kind, text)."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for text in paragraphs(ast.get_docstring(node) or ""):
                yield "docstrings", text
        if isinstance(node, ast.ClassDef):
            for statement in node.body:  # docstrings of keys
                value = getattr(statement, "value", None)
                is_text = isinstance(statement, ast.Expr) and isinstance(value, ast.Constant)
                if is_text and isinstance(value.value, str) and statement is not node.body[0]:
                    for text in paragraphs(value.value):
                        yield "docstrings", text
        if isinstance(node, ast.Call) and SPEAKERS.search(name_of(node.func)):
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                text = text_of(argument)
                if " " in text:
                    yield "messages", text


def paragraphs(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring that are prose: neither code nor tables."""
    for block in re.split(r"\n\s*\n", docstring):
        rows = block.splitlines()
        if rows and not all(row.startswith("    ") for row in rows):
            yield " ".join(row.strip() for row in rows)


def comments_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield the comments; those on lines that follow each other are one text."""
    block: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#: ").strip()
        if text.startswith(("type:", "noqa", "!", "pragma")):
            continue
        if token.start[0] != last + 1 and block:
            yield "comments", " ".join(block)
            block = []
        block.append(text)
        last = token.start[0]
    if block:
        yield "comments", " ".join(block)


def name_of(function: ast.expr) -> str:
    """Return the last part of the name of what is called."""
    return getattr(function, "attr", getattr(function, "id", ""))


def text_of(node: ast.expr) -> str:
    """Return the text of a string; a value within it counts as one word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "X"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""


def split(text: str) -> list[str]:
    """Divide a text into sentences. A semicolon or a colon ends none."""
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\b(e\.g|i\.e|cf|vs|etc|al)\.", r"\1", text)
    parts = re.split(r"(?<=[.!?])[\"')*]*\s+", text)
    return [part.strip() for part in parts if count_words(part) > 1]


def count_words(text: str) -> int:
    """Count words: runs of letters and digits, with hyphens, dots and slashes inside."""
    return len(re.findall(r"[A-Za-z0-9][\w./'’%-]*", text))


if __name__ == "__main__":
    main()
