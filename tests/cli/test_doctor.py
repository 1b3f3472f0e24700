"""`titanlite doctor`: what it finds on machines with faults."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.support.processes import ROOT, python
from titanlite import exit_codes
from titanlite.assembly.tested_machines import TESTED, accelerator_warning
from titanlite.cli import doctor
from titanlite.cli.doctor import ERROR, OK, WARNING, checks
from titanlite.cli.main import main
from titanlite.plan.hardware import INSTANCES

DOCS = ROOT / "docs" / "launch"


def found(check: Callable[[], Iterator[tuple[str, ...]]], status: str) -> str:
    return "\n".join(" ".join(words) for one, *words in check() if one == status)


def test_every_check_is_documented_and_no_secret_is_shown(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    flags = [f"--job.dump_folder={tmp_path}/new/run", "--model.tokenizer_path=/no"]
    flags += ["--checkpoint.enable_checkpoint", "--training.compile"]
    code = main(["doctor", "llama3_8b.toml", *flags, "--float8.enable_float8_linear"])
    text = capsys.readouterr().out
    table = re.findall(r"^\| (`.*`) \| \w", (DOCS / "local.md").read_text(), re.MULTILINE)
    documented = re.findall("`([^`]+)`", " ".join(table))
    assert documented == [*checks(), "run folder", "config"]
    assert all(re.search(rf"^\w+ +{name} ", text, re.MULTILINE) for name in documented)
    assert f"{tmp_path} (for {tmp_path}/new/run, which is not there yet)" in text
    assert "hf_secret" not in text
    assert "model.tokenizer_path: /no does not exist" in text
    assert code == 1 and "a CPU has no float8 products" in text  # the 8B wants them


def test_folders(monkeypatch, tmp_path):
    assert "cannot be written to" in found(lambda: doctor._folder("/proc"), ERROR)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 60)
    said = found(lambda: doctor._folder(str(tmp_path)), WARNING)
    assert re.search(r"differs by \+[3-6]\d s", said)


def test_gpus_with_faults(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    rows = (
        "0, NVIDIA A100, 550.1, 40960, 12, 8.0, 3\\n1, NVIDIA H100, 550.1, 81920, 5000, 9.0, "
        "[N/A]\\n"
    )
    tool.write_text(
        f'#!/bin/sh\ncase "$1" in --query*) printf "{rows}" ;; *) echo "Driver 550.1  CUDA '
        'Version: 12.4 " ;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    healthy, errors, warnings = (found(doctor._gpus, status) for status in (OK, ERROR, WARNING))
    assert "GPU 0: NVIDIA A100, 40960 MiB, capability 8.0, driver 550.1" in healthy
    assert "GPU 0: 3 uncorrected memory errors" in errors
    assert "GPU 1: 5000 MiB are in use" in warnings
    assert "GPU 1" not in errors and "GPU 0" not in warnings
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "torch is built for the CPU" in found(doctor._torch, ERROR)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "the driver knows CUDA 12, torch needs 13.0" in found(doctor._torch, ERROR)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert "nvidia-smi fails" in found(doctor._gpus, ERROR)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=64 << 20, free=0))
    assert "NCCL needs more" in found(doctor._limits, ERROR)


def test_the_documented_table_of_instances_is_that_of_the_code():
    row = r"^\| (`.*) \| (\d x \S+, \d+ GB) \| (\S+) \|$"
    documented = {
        name: (machine, int(efa.replace("–", "0")))
        for names, machine, efa in re.findall(row, (DOCS / "README.md").read_text(), re.M)
        for name in re.findall(r"`([^`]+)`", names)
    }
    assert documented == {
        name: (f"{one[1]} x {one[0]}, {one[2]} GB", one[3]) for name, one in INSTANCES.items()
    }


# Machines that titanlite is not tested on


# Modules that Python lacks on Windows.
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


def test_windows_is_refused_in_one_line():
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
def test_what_is_said_of_an_accelerator(monkeypatch, accelerator, hip, warning):
    device = torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: accelerator == "cuda")
    assert accelerator_warning() == warning
