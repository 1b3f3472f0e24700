"""The number of GPUs of this machine, without torch."""

from __future__ import annotations

import os
import re
import subprocess


def count_gpus() -> int:
    """Return the GPUs that torch will see here, without importing it."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return 0
    found = len(re.findall(r"^GPU ", listed, re.MULTILINE))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([name for name in visible.split(",") if name.strip()]))
