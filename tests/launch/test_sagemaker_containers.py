"""Jobs in containers of SageMaker: the real toolkit starts train.py unchanged."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import namespaces
from tests.launch.sagemaker_container import TOOLKIT, make_folder, python_with
from tests.support.processes import ROOT, python
from tests.support.train_runs import rows
from titanlite.config.toml import loads

_TORCHRUN = {"SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main"}
_DISTRIBUTED = {
    "sagemaker_torch_distributed_enabled": True,
    "sagemaker_instance_type": "ml.c5.xlarge",
    "sagemaker_distribution_instance_groups": ["homogeneousCluster"],
}
_VALUES = {
    "config_file": "run.toml",
    "checkpoint.enable_checkpoint": True,
    "checkpoint.keep_latest_k": 5,
    "training.tokens": None,
    "data.skip_steps": [2],
    "float8.filter_fqns": ["output"],
    "optimizer.lr": 1e-3,
    "launch.environment": {"A_B": "1", "C": "x,y"},
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[namespaces.Host]]:
    with namespaces.hosts(2, "algo") as both:
        yield both


@pytest.fixture(scope="module")
def train(hosts: list[namespaces.Host]) -> Path:
    return python_with("sagemaker-toolkit", *TOOLKIT) / "train"


def _start(train: Path, host: namespaces.Host, ml: Path, **env: str) -> subprocess.Popen[str]:
    env = {"SAGEMAKER_BASE_DIR": str(ml), "CURRENT_HOST": host.name, **env}
    return host.popen([train], env=env, stdout=(ml / "log").open("w"), stderr=subprocess.STDOUT)


@pytest.mark.soak
def test_the_toolkit_starts_train_py_with_its_words(
    train: Path, hosts: list[namespaces.Host], tmp_path: Path
) -> None:
    ml = make_folder(tmp_path / "ml", "algo-1", ["algo-1"], _VALUES)
    assert _start(train, hosts[0], ml).wait(600) == 0, (ml / "log").read_text()
    assert (ml / "output" / "success").exists()
    assert not (ml / "output" / "failure").exists()
    config = (ml / "checkpoints" / "config.toml").read_text()
    assert f'dataset_path = "{ml}/input/data/train/text.jsonl"' in config
    assert loads(config)["launch"]["environment"] == {"A_B": "1", "C": "x,y"}
    # The same words on a command line of ours give the same losses.
    flags = [
        "--config_file=run.toml",
        "--data.skip_steps=2",
        "--optimizer.lr=1e-3",
        f"--job.dump_folder={tmp_path}/run",
    ]
    variables = {"SM_CHANNEL_TRAIN": str(ml / "input/data/train")}
    done = python(
        "-m",
        "titanlite",
        "train",
        *flags,
        cwd=ml / "code",
        env={"PYTHONPATH": str(ROOT), **variables},
    )
    assert done.returncode == 0, done.stderr
    assert rows(ml / "checkpoints") == rows(tmp_path / "run")
    assert len(rows(tmp_path / "run")) == 4


@pytest.mark.soak
def test_two_processes_of_the_toolkit_resume_and_a_failure_has_its_reason(
    train: Path, hosts: list[namespaces.Host], tmp_path: Path
) -> None:
    values = {**_VALUES, **_DISTRIBUTED, "sagemaker_mpi_num_of_processes_per_host": "2"}
    ml = make_folder(tmp_path / "ml", "algo-1", ["algo-1"], values)
    assert _start(train, hosts[0], ml, **_TORCHRUN).wait(600) == 0, (ml / "log").read_text()
    other = make_folder(tmp_path / "other", "algo-1", ["algo-1"], {**values, "training.steps": 6})
    (other / "checkpoints").rmdir()
    (ml / "checkpoints").rename(other / "checkpoints")  # as SageMaker brings them back
    assert _start(train, hosts[0], other, **_TORCHRUN).wait(600) == 0, (other / "log").read_text()
    assert [row[0] for row in rows(other / "checkpoints")] == [1, 2, 3, 4, 5, 6]
    assert "mesh             dp_replicate 1 x dp_shard 2 = 2 ranks" in (other / "log").read_text()
    wrong = make_folder(
        tmp_path / "wrong", "algo-1", ["algo-1"], {**_VALUES, "optimizer.lr": "fast"}
    )
    assert _start(train, hosts[0], wrong).wait(300) == 1
    assert "optimizer.lr: expected a number" in (wrong / "output" / "failure").read_text()
