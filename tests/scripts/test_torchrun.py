"""torchrun that ends with its workers' exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.torchrun import last_words, worst

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ("", None),
        ("0 0\n0 0\n", None),
        ("0 5\n0 5\n", 5),
        ("0 7\n0 3\n", 3),
        ("0 7\n0 7\n", 7),
        ("0 1\n0 7\n", 1),
        ("0 5\n0 5\n1 6\n1 6\n", 6),
        ('0 1 "rank 1 on a: OSError: 1 2"\n0 7 ""\n', 1),
    ],
)
def test_which_code_stands_for_all(told: str, code: int | None) -> None:
    assert worst(told) == code


def test_what_the_last_restart_said_is_kept_for_the_end() -> None:
    told = '0 1 "rank 0: first"\n1 7 ""\n1 1 "rank 1 on a: OSError: a\\nb"\n1 1 "rank 2: third"\n'
    assert last_words(told) == "rank 1 on a: OSError: a\nb"
    assert last_words("0 7\n") == last_words("") == ""


@pytest.mark.soak
@pytest.mark.parametrize(("codes", "ends"), [("00", 0), ("55", 5), ("37", 3)])
def test_it_ends_with_the_workers_code(tmp_path: Path, codes: str, ends: int) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, time\n"
        f"code = int({codes!r}[int(os.environ['RANK'])])\n"
        "open(os.environ['TITANLITE_EXIT_CODES'], 'a').write(f'0 {code}\\n')\n"
        "time.sleep(1)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "titanlite.torchrun", "--nproc_per_node=2", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == ends, done.stderr
    assert "Traceback" not in done.stderr
