"""A data source of your own: each text file of a folder is one document.

[training]
dataset = "./text_files.py:documents"
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs"


def documents() -> Iterator[str]:
    """Yield texts, or tables with a `text`: on every rank and at every start the same, in the same
    order.

    A document's number in this order is its place in the run's data order, so an order that changes
    breaks a resume.
    """
    for file in sorted(FOLDER.glob("*.md")):
        yield file.read_text(encoding="utf-8")
