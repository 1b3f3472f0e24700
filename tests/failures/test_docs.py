"""The table of failures in docs/reliability.md names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_every_proof_in_the_table_is_a_test() -> None:
    text = (
        (TESTS.parent / "docs" / "reliability.md")
        .read_text()
        .partition("## Failures that are survived")[2]
    )
    rows = re.findall(r"^\| (\d+) \|.*$", text, re.MULTILINE)
    proofs = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", text)
    assert len(proofs) >= len(rows)
    assert rows == [str(n) for n in range(1, 19)]
    for file, name in proofs:
        assert f"\ndef {name}(" in (TESTS / file).read_text(), f"{file} has no {name}"
