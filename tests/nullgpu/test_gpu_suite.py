"""GPU tests and the GPU benchmark on the null GPU; only assertions on numbers may fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.nullgpu.cases import ROOT

pytestmark = pytest.mark.nullgpu


def run(*command: str, folder: Path, **variables: str) -> None:
    given = {**os.environ, "NULLGPU_DIR": str(folder), "NULLGPU_ZERO": "1", **variables}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("name", ["attention", "features", "memory_plan", "training"])
def test_gpu_tests_end_at_numbers_alone(nullgpu, name):
    run(
        "tests/nullgpu/run.sh",
        str(nullgpu),
        "-m",
        "pytest",
        "-q",
        f"tests/gpu/test_{name}.py",
        folder=nullgpu,
    )


def test_a_dry_run_goes_through_both_quick_calls(nullgpu, tmp_path):
    for part in ("1", "2"):
        words = ("quick", part, "--dry-run", "--budget", "1200", "--out", str(tmp_path))
        run("benchmarks/gpu.sh", *words, folder=nullgpu)
    text = (tmp_path / "gpu.md").read_text()
    for name in ("bf16", "float8", "rival", "kahan"):
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
        assert "| 6 of " in line
    for config in ("llama3_8b_h200", "rival_8b", "llama3_8b_kahan"):
        (page,) = tmp_path.glob(f"{config}_nvidia*.md")
        assert "| steps | 6 |" in page.read_text()


def kernels_of_attention(folder: Path, tmp_path: Path, *flags: str) -> set[str]:
    """Train a step and return which kernels of attention it launched."""
    log = tmp_path / "calls"
    words = ("--job.config_file=debug_model.toml", f"--job.dump_folder={tmp_path}")
    more = ("--training.steps=1", "--no-training.compile", *flags)
    run(
        *("tests/nullgpu/run.sh", str(folder), "train.py", *words, *more),
        "--training.mixed_precision_param=bfloat16",
        folder=folder,
        NULLGPU_LOG=str(log),
    )
    names = ("cudnn_attention", "flash_fwd", REPEATABLE)
    return {name for name in names if name in log.read_text()}


#: Flash attention's backward pass without atomic additions.
REPEATABLE = "flash_bwd_dot_do_o_kernelILb0E"


@pytest.mark.parametrize(
    ("chosen", "kernel"), [("auto", "cudnn_attention"), ("flash", "flash_fwd")]
)
def test_a_run_launches_the_kernel_of_attention_that_is_chosen(nullgpu, tmp_path, chosen, kernel):
    """On Hopper torch itself would put cuDNN first, at the first call."""
    flag = f"--training.attention_kernel={chosen}"
    assert kernels_of_attention(nullgpu, tmp_path, flag) == {kernel}


def test_a_deterministic_run_takes_kernels_that_repeat_to_the_bit(nullgpu, tmp_path):
    """torch refuses cuDNN's attention then. The variable is cuBLAS'."""
    own = tmp_path / "own.py"
    own.write_text(SETTINGS)
    flags = ("--debug.deterministic", f"--job.callbacks=['{own}:Settings']")
    assert kernels_of_attention(nullgpu, tmp_path, *flags) == {"flash_fwd", REPEATABLE}
    assert (tmp_path / "settings").read_text() == "True :4096:8"


SETTINGS = """
import os, torch
from pathlib import Path
from titanlite.callbacks import Callback
class Settings(Callback):
    def on_step_end(self, trainer, result):
        strict = torch.are_deterministic_algorithms_enabled()
        text = f"{strict} {os.environ['CUBLAS_WORKSPACE_CONFIG']}"
        Path(trainer.parts.run.job.dump_folder, "settings").write_text(text)
"""
