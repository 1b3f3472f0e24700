"""What titanlite says on machines that it is not tested on; their reports are faked."""

from __future__ import annotations

import pytest
import torch

from tests.support.processes import python
from titanlite import exit_codes
from titanlite.assembly.tested_machines import TESTED, accelerator_warning

# What Python has not on Windows.
WINDOWS = """
import os, signal, sys
for module in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[module] = None
for name in ("SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    delattr(signal, name)
from types import SimpleNamespace
from titanlite.assembly import tested_machines
tested_machines.os = SimpleNamespace(name="nt")
"""
REFUSAL = (
    "error: titanlite needs the signals and file locks of Linux or macOS, and this is Windows: "
    "use WSL 2, a container or a Linux machine\n"
)


def test_windows_is_refused_in_one_line() -> None:
    done = python("-c", f"{WINDOWS}from titanlite.main import main; main(['--training.steps=1'])")
    assert done.stderr == REFUSAL
    assert done.stdout == ""
    assert done.returncode == exit_codes.CONFIG


@pytest.mark.parametrize(
    ("accelerator", "hip", "warning"),
    [
        ("mps", None, f"the mps device of this machine is not used, but its CPU: {TESTED}"),
        ("cuda", "7.0", f"torch is built for ROCm 7.0, which is untested: {TESTED}"),
        ("cuda", None, ""),
    ],
)
def test_what_is_said_of_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, hip: str | None, warning: str
) -> None:
    device = torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: accelerator == "cuda")
    assert accelerator_warning() == warning
