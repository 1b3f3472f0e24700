"""The container of a SageMaker job on this machine: its folder /opt/ml, and the programs that AWS
starts in it.
"""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT

TOOLKIT = (["sagemaker-training==5.1.4"], ["--no-deps", "sagemaker-pytorch-training==3.0.0"])


def python_with(name: str, *packages: Sequence[str]) -> Path:
    """Return the `bin` of a virtual environment with packages from PyPI beside those of here; it is
    kept for later.
    """
    folder = (
        Path(tempfile.gettempdir())
        / f"titanlite-{name}-{sys.version_info.major}.{sys.version_info.minor}"
    )
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", folder], check=True)
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "parent.pth").write_text("\n".join(site.getsitepackages()))
        for words in packages:
            pip = [folder / "bin" / "pip", "install", "--quiet", *words]
            done = subprocess.run(pip, capture_output=True, text=True, timeout=900)
            if done.returncode:
                message = f"{' '.join(words)} cannot be installed from PyPI: {done.stderr[-300:]}"
                warnings.warn(message, stacklevel=1)
                pytest.skip(message)
        (folder / "done").touch()
    return folder / "bin"


def make_folder(
    ml: Path,
    host: str,
    hosts: Sequence[str],
    hyperparameters: Mapping[str, Any],
    channels: Sequence[str] = ("train",),
) -> Path:
    """Make /opt/ml of one host as SageMaker does."""
    group = {
        "instance_group_name": "homogeneousCluster",
        "instance_type": "ml.c5.xlarge",
        "hosts": list(hosts),
    }
    hyperparameters = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": "s3://none",
        **hyperparameters,
    }
    config = {
        "hyperparameters": {name: json.dumps(value) for name, value in hyperparameters.items()},
        "resourceconfig": {
            "current_host": host,
            "hosts": list(hosts),
            "network_interface_name": "net0" if len(hosts) > 1 else "lo",
            "current_instance_type": "ml.c5.xlarge",
            "current_group_name": "homogeneousCluster",
            "instance_groups": [group],
        },
        "inputdataconfig": {name: {"TrainingInputMode": "File"} for name in channels},
    }
    for part in ("input/config", "input/data/train", "output", "code", "checkpoints", "model"):
        (ml / part).mkdir(parents=True)
    for name, content in config.items():
        (ml / "input" / "config" / f"{name}.json").write_text(json.dumps(content))
    shutil.copy(ROOT / "train.py", ml / "code")
    texts = [
        json.dumps({"text": f"story {i} of a boy who counts {7 * i} sheep " * 5})
        for i in range(100)
    ]
    (ml / "input" / "data" / "train" / "text.jsonl").write_text("\n".join(texts) + "\n")
    (ml / "code" / "run.toml").write_text(CONFIG)
    return ml


CONFIG = f"""\
[job]
extends = ["{ROOT}/train_configs/debug_model.toml"]
dump_folder = "../checkpoints"
[training]
steps = 4
seq_len = 64
batch_size = 2
dataset = "jsonl"
dataset_path = "${{SM_CHANNEL_TRAIN}}/text.jsonl"
[validation]
enable = false
[metrics]
log_freq = 1
[checkpoint]
enable_checkpoint = true
"""
