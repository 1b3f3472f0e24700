"""The debug flavor of each family learns: a real run of its whole depth beats a bigram model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.processes import ROOT, python
from tests.support.tiny import KEPT_TOKENS
from titanlite.models import SPECS

#: Families with flavors; a model of transformers brings its own config.json.
FAMILIES = [name for name, spec in SPECS.items() if spec.flavors]
#: Two ranks, 300 steps of 2,048 tokens: a quarter of the bundled text.
RUN = [
    "--nproc-per-node=2",
    "--training.steps=300",
    "--training.batch_size=4",
    "--training.seq_len=256",
    "--training.warmup_steps=20",
    "--optimizer.name=Muon",
    "--optimizer.lr=0.01",
    KEPT_TOKENS,
]


@pytest.fixture(scope="module")
def bigram() -> float:
    """Held-out loss of a bigram model of all of the bundled text, in nats per token."""
    done = python("benchmarks/bigram_baseline.py")
    assert done.returncode == 0, done.stderr
    return float(re.findall(r"^bigram +([\d.]+) nats", done.stdout, re.M)[0])


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_a_debug_flavor_beats_a_bigram_model(family: str, bigram: float, tmp_path: Path) -> None:
    shape = SPECS[family].flavors["debugmodel"]
    has_bf16 = torch.cpu._is_avx512_bf16_supported()
    done = python(
        "-m",
        "titanlite",
        "train",
        "debug_model.toml",
        *RUN,
        f"--model.name={family}",
        # The file cuts its own flavor.
        f"--model.overrides.n_layers={shape.n_layers}",
        f"--training.mixed_precision_param={'bfloat16' if has_bf16 else 'float32'}",
        f"--job.dump_folder={tmp_path}",
        cwd=ROOT,
        timeout=7200,
    )
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"validation at 300: loss ([\d.]+)", done.stdout)
    assert float(loss) < bigram
