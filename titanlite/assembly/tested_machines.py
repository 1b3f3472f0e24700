"""The machines that titanlite is tested on, and what it says on others.

Tested: NVIDIA GPUs and CPUs on Linux, CPUs on macOS. Importing this module needs no torch.
"""

from __future__ import annotations

import os

TESTED = "titanlite is tested on NVIDIA GPUs and CPUs with Linux, and on CPUs with macOS"


def system_problem() -> str:
    """Return why this operating system cannot run anything; "" on Linux and macOS."""
    if os.name == "posix":
        return ""
    name = "Windows" if os.name == "nt" else os.name
    return (
        f"titanlite needs the signals and file locks of Linux or macOS, and this is {name}: "
        "use WSL 2, a container or a Linux machine"
    )


def accelerator_warning() -> str:
    """Return what is untested or unused here, or "" for NVIDIA GPUs or CPUs alone."""
    import torch

    if torch.version.hip is not None:
        return f"torch is built for ROCm {torch.version.hip}, which is untested: {TESTED}"
    if torch.cuda.is_available():
        return ""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return ""
    return f"the {found.type} device of this machine is not used, but its CPU: {TESTED}"
