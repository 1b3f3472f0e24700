#!/usr/bin/env python
"""Write every generated file anew: pages, the schema of keys, examples and snapshots.

usage: python scripts/generate.py [WORD]

WORD: only the makers with this word in their command, as `keys` or `launch`.

Tests compare the files. `git diff` then shows what changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Commands of Python, and the file that takes their output, if they do not write by themselves.
MAKERS = {
    "scripts/config_keys.py": "",
    "scripts/api_page.py": "docs/api.md",
    "scripts/rooms_picture.py docs/images/rooms.svg": "",
    "tests/scripts/test_cli_docs.py --write": "",
    "tests/config/test_command.py --write": "",
    "tests/models/test_docs.py --write": "",
    "tests/plan/test_generated.py --write": "",
    "tests/launch/test_local.py --write": "",
    "tests/launch/test_slurm.py --write": "",
    "tests/launch/test_kubernetes.py --write": "",
}


def main() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for maker, file in MAKERS.items():
        if not all(word in maker for word in sys.argv[1:]):
            continue
        print(f"python {maker}", flush=True)
        words = [sys.executable, *maker.split()]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True)
        if done.returncode:
            sys.exit(done.stderr.decode())
        if file:
            (ROOT / file).write_bytes(done.stdout)


if __name__ == "__main__":
    main()
