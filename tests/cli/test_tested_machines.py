"""What titanlite says on machines that it is not tested on; their reports are faked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.processes import python
from titanlite import exit_codes
from titanlite.assembly.tested_machines import TESTED, accelerator_warning
from titanlite.cli import doctor

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


@pytest.mark.parametrize(
    "start",
    [
        "from titanlite.main import main; main(['--training.steps=1'])",
        "from titanlite.cli.main import main; sys.exit(main(['train', 'debug_model.toml']))",
    ],
    ids=["train.py", "titanlite"],
)
def test_windows_is_refused_in_one_line(start: str) -> None:
    done = python("-c", f"{WINDOWS}{start}")
    assert done.stderr == REFUSAL
    assert done.stdout == ""
    assert done.returncode == exit_codes.CONFIG


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch report another machine."""

    def reports(accelerator: str = "", hip: str | None = None, cuda: bool = False) -> None:
        device = torch.device(accelerator) if accelerator else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)

    return reports


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_an_accelerator_that_is_not_used_is_named(fake: Callable[..., None], kind: str) -> None:
    fake(kind)
    warning = f"the {kind} device of this machine is not used, but its CPU: {TESTED}"
    assert accelerator_warning() == warning


def test_rocm_is_named_as_untested(fake: Callable[..., None]) -> None:
    fake("cuda", hip="7.0", cuda=True)
    assert accelerator_warning() == f"torch is built for ROCm 7.0, which is untested: {TESTED}"


def test_tested_machines_get_no_warning(fake: Callable[..., None]) -> None:
    fake()
    assert accelerator_warning() == ""
    fake("cuda", cuda=True)
    assert accelerator_warning() == ""


def test_doctor_has_the_warning(fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_command", lambda *_: None)

    def found() -> Iterator[tuple[str, str]]:
        for status, message, *_ in doctor._torch():
            yield status, message

    fake("cuda", hip="7.0", cuda=True)
    ok, warning = found()
    assert ok[1].endswith("built for ROCm 7.0")
    assert warning == (doctor.WARNING, f"torch is built for ROCm 7.0, which is untested: {TESTED}")
