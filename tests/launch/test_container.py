"""The image's entry point: as process 1 of a PID namespace, with real ranks, and as SageMaker
starts it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.launch.slurm_jobs import until_step
from tests.support.processes import ROOT, environment
from titanlite import exit_codes
from titanlite.checkpoint.manifest import read_manifest
from titanlite.launch.container_start import sagemaker_job

NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def _start(*words: str, **variables: str) -> subprocess.Popen[str]:
    """Start the entry point as process 1 of a namespace."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode
    ):
        warnings.warn(message := "no PID namespace can be made here", stacklevel=1)
        pytest.skip(message)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [*NAMESPACE, str(ROOT / "deploy" / "entrypoint.sh"), *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(PATH=path, **variables), stdout=-1, stderr=-2, text=True
    )


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal to process 1 of the namespace, as `docker stop` does."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), number)


@pytest.mark.parametrize(
    ("words", "code"), [(["sh", "-c", "exit 42"], 42), (["no-such-command"], 127)]
)
def test_the_code_of_the_command_comes_back(words, code):
    with _start(*words) as process:
        process.communicate()
    assert process.returncode == code


def test_a_sagemaker_job_becomes_a_torchrun_command(tmp_path, monkeypatch):
    monkeypatch.setenv("NGPU", "8")
    command, variables = sagemaker_job(_opt_ml(tmp_path, ["algo-1", "algo-2"], "algo-2"))
    assert command[command.index("--nnodes") :] == [
        "--nnodes",
        "2",
        "--nproc_per_node",
        "8",
        "--node_rank",
        "1",
        "--master_addr",
        "algo-1",
        "--master_port",
        "7777",
        "-m",
        "titanlite",
        "train",
        "--job.config_file=debug_model.toml",
        "--job.description=two words",
        "--training.compile=false",
        "--training.steps=1000",
    ]
    assert variables["SM_CHANNEL_TRAIN"] == f"{tmp_path}/input/data/train"
    assert variables["NCCL_SOCKET_IFNAME"] == "eth7"
    assert variables["FI_EFA_USE_DEVICE_RDMA"] == "1"


def test_an_entry_point_of_an_estimator_is_left_to_the_toolkit(tmp_path, monkeypatch):
    base = _opt_ml(tmp_path / "ml", ["algo-1"], "algo-1", sagemaker_program="train.py")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="entry_point needs sagemaker-pytorch-training"):
        sagemaker_job(base)
    (tmp_path / "train").touch(mode=0o755)
    command, variables = sagemaker_job(base)
    assert command == ["train"]
    module = "sagemaker_pytorch_container.training:main"
    assert variables["SAGEMAKER_TRAINING_MODULE"] == module
    assert variables["FI_PROVIDER"] == "efa"


def _opt_ml(base: Path, hosts: list[str], here: str, **more: object) -> Path:
    config = base / "input" / "config"
    config.mkdir(parents=True)
    values = {"config_file": "debug_model.toml", "training.steps": 1000, "training.compile": False}
    parameters = {name: json.dumps(value) for name, value in {**values, **more}.items()}
    parameters |= {"job.description": "two words", "sagemaker_region": '"us-east-1"'}
    resources = {
        "hosts": hosts,
        "current_host": here,
        "network_interface_name": "eth7",
        "current_instance_type": "ml.p5.48xlarge",
    }
    (config / "hyperparameters.json").write_text(json.dumps(parameters))
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    (config / "inputdataconfig.json").write_text('{"train": {}}')
    return base


@pytest.mark.slow
def test_a_sagemaker_job_that_is_stopped_leads_to_a_checkpoint(tmp_path):
    """The container ends with code 5."""
    run = tmp_path / "run"
    flags = {
        "job.dump_folder": str(run),
        "training.seq_len": "64",
        "training.batch_size": "2",
        "metrics.log_freq": "1",
        "checkpoint.enable_checkpoint": True,
        "checkpoint.interval": "1000",
        "validation.enable": False,
    }
    base = _opt_ml(tmp_path / "ml", ["localhost"], "localhost", **flags)
    variables = {"SAGEMAKER_BASE_DIR": str(base), "GLOO_SOCKET_IFNAME": "lo", "NGPU": "2"}
    with _start("train", **variables) as process:
        until_step(run, 3)
        _signal(process, signal.SIGTERM)
        said = process.communicate(timeout=300)[0]
        assert process.returncode == exit_codes.PREEMPTED, said
        (saved,) = (run / "checkpoint").glob("step-*")
        assert read_manifest(saved).step >= 3
        assert "SIGTERM: stopping" in said
