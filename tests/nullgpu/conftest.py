"""The null GPU of the tests: in the folder $NULLGPU_DIR, by default .nullgpu, set up when it is not
there.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.nullgpu.cases import HERE, ROOT

#: setup.sh's exit code where this machine lacks a compiler, or the CUDA build of torch cannot be
#: had.
MISSING = 3


@pytest.fixture(scope="session")
def nullgpu() -> Path:
    """Return the folder of a null GPU whose libraries are built from the sources as they are."""
    folder = Path(os.environ.get("NULLGPU_DIR") or ROOT / ".nullgpu").resolve()
    done = subprocess.run([str(HERE / "setup.sh"), str(folder)], capture_output=True, text=True)
    if done.returncode == MISSING:
        pytest.skip(f"NO NULL GPU, NOTHING IS COUNTED: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder
