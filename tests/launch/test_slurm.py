"""Jobs of `titanlite launch slurm`: as text, and on a real Slurm, where a run that is stopped
or loses a node ends with the same weights.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from benchmarks import lost_nodes
from tests.launch.examples import EXAMPLES
from tests.launch.slurm_cluster import Cluster
from tests.launch.slurm_jobs import ENDS, STEPS, read_log, submit, until_step
from tests.support.processes import ROOT
from tests.support.train_runs import rows, unequal
from titanlite import exit_codes
from titanlite.cli import main as cli
from titanlite.cli.launch import prepare
from titanlite.config.errors import ConfigError
from titanlite.launch import slurm as launch_slurm
from titanlite.launch.job import limit_seconds

FOLDER = ROOT / "deploy" / "examples" / "slurm"


@pytest.mark.slow
def test_a_job_that_is_asked_to_stop_saves_and_goes_on_later(
    slurm: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    """Stop the job by the signal that Slurm sends before a time limit."""
    folder = tmp_path / "run"
    umask = os.umask(0o022)
    try:
        job = submit(slurm, folder)
    finally:
        os.umask(umask)
    until_step(folder, 3)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert slurm.wait(job, *ENDS) == "COMPLETED", read_log(folder, job)
    assert rows(folder) == rows(undisturbed)
    assert unequal(undisturbed, folder, STEPS) == []
    assert "SIGUSR1: stopping" in read_log(folder, job)
    assert slurm.field(job, "Restarts") == "1"
    launch = folder / "launch"
    modes = {file.name: file.stat().st_mode & 0o777 for file in [launch, *launch.iterdir()]}
    names = ("config.toml", "job.sbatch", "failures.log", f"slurm-{job}.log")
    assert modes == {"launch": 0o700, **dict.fromkeys(names, 0o600)}


@pytest.mark.soak
def test_a_spare_node_replaces_one_that_is_lost_without_the_queue(
    slurm: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    """Lose a node and its disk in a step: the other node has a copy of its part."""
    loss = lost_nodes.lose_one(slurm, tmp_path, lost_nodes.MOMENTS[1], undisturbed)
    # As `Held` stops there.
    assert (loss.done, loss.resumed) == (10, 8)
    assert 0 < loss.ended <= loss.started < loss.stepped < 300
    assert loss.told == pytest.approx(loss.stepped, abs=5)


def _render(*flags: str) -> str:
    return launch_slurm.files(prepare(list(flags)))[launch_slurm.FILE]


def _example(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Render an example as on a cluster whose shared folder has a checkout and its virtual
    environment. A name may end with _spare: with one spare node.
    """
    model = name.removesuffix("_spare")
    monkeypatch.setattr(Path, "cwd", lambda: Path("/fsx/titanlite"))
    monkeypatch.setattr(sys, "executable", "/fsx/titanlite/.venv/bin/python")
    flags = [
        "--launch.shared_dir=/fsx",
        f"--job.dump_folder=/fsx/runs/{name}",
        "--launch.time_limit=2-0",
    ]
    if name != model:
        flags.append("--launch.spare_nodes=1")
    return _render(*EXAMPLES[model], *flags)


#: The job of each model, and one with a spare node.
_STORED = [*EXAMPLES, "llama3_1_8b_spare"]


@pytest.mark.parametrize("name", _STORED)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python tests/launch/test_slurm.py --write` writes them anew."""
    assert _example(name, monkeypatch) == (FOLDER / f"{name}.sbatch").read_text()


def test_a_container_mounts_the_shared_folder_and_starts_python_of_its_own() -> None:
    folders = ["--job.dump_folder=/fsx/runs/8b", "--launch.shared_dir=/fsx"]
    probe = "--launch.environment.NCCL_DEBUG=INFO"
    text = _render(*EXAMPLES["llama3_1_8b"], *folders, _IMAGE, probe)
    mounts = re.search("^mounts=(.*)", text, re.M)
    assert mounts and set(mounts[1].split(",")) == {"/fsx:/fsx", f"{ROOT}:{ROOT}"}
    assert re.search(r"^variables=\S*,NCCL_DEBUG ", text, re.M)
    assert "exec python -m" in text


_FOLDERS = [
    "--launch.gpus_per_node=8",
    "--launch.shared_dir=/fsx",
    "--job.dump_folder=/fsx/run",
    "--checkpoint.enable_checkpoint",
]
_IMAGE = "--launch.image=/fsx/my image.sqsh"


@pytest.mark.parametrize(
    ("flags", "key", "text"),
    [
        (["--launch.instance_type=p5.48xl"], "launch.instance_type", "p5.48xlarge"),
        ([], "launch.gpus_per_node", "not known"),
        (
            ["--launch.instance_type=ml.p5.48xlarge", "--launch.gpus_per_node=16"],
            "launch.gpus_per_node",
            "has 8 GPU",
        ),
        (["--launch.environment.HF_TOKEN=(removed)"], "launch.environment.HF_TOKEN", "secret"),
        (
            ["--launch.gpus_per_node=8", "--launch.shared_dir=/fsx"],
            "job.dump_folder",
            "/fsx: not all machines",
        ),
        (
            [*_FOLDERS, "--checkpoint.folder=/tmp/x"],
            "checkpoint.folder",
            "outside of launch.shared_dir",
        ),
        (
            [*_FOLDERS, "--launch.shared_dir=", _IMAGE, "--checkpoint.folder=/x"],
            "checkpoint.folder",
            "the container's",
        ),
        (
            ["--launch.gpus_per_node=8", "--launch.time_limit=0:03:59"],
            "launch.notice_seconds",
            "120 s",
        ),
    ],
)
def test_a_job_that_cannot_work_is_refused(flags: list[str], key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){key}: .*{text}"):
        _render("--job.config_file=llama3_8b.toml", *flags)


def test_variables_of_a_job() -> None:
    flags = ["--job.config_file=llama3_8b.toml", "--launch.instance_type=ml.p5.48xlarge"]
    text = _render(*flags, "--launch.environment.TORCH_ELASTIC_SHUTDOWN_TIMEOUT=60")
    assert re.findall("SHUTDOWN_TIMEOUT=(.*)", text) == ["60"]
    assert "export FI_" not in text
    assert "gpus-per-node=8" in text
    assert "export FI_EFA_USE_DEVICE_RDMA=1" in _render(*flags, "--launch.nodes=2")


def test_a_time_limit_is_read_as_slurm_does() -> None:
    seconds = {"": None, "1:30": 90, "01:30:00": 5400, "2:00:00": 7200}
    seconds |= {"1-0": 86400, "2-00": 172800, "1-2:30": 95400, "0-0:00:07": 7}
    assert {text: limit_seconds(text) for text in seconds} == seconds


def test_a_dry_run_prints_the_job_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "llama3_8b.toml",
        f"--job.dump_folder={tmp_path / 'run'}",
        "--launch.gpus_per_node=8",
        "--launch.nodes=2",
    ]
    assert cli.main(["launch", "slurm", *flags, "--dry-run"]) == exit_codes.DONE
    said = capsys.readouterr()
    assert "#SBATCH --nodes=2\n" in said.out
    assert not (tmp_path / "run").exists()
    assert said.err == ""
    assert cli.main(["launch", "slurm", *flags, "--no-checkpoint.enable_checkpoint"]) == 0
    assert "begins at step 0" in capsys.readouterr().err


if __name__ == "__main__" and "--write" in sys.argv:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for one in _STORED:
        with pytest.MonkeyPatch.context() as patch:
            (FOLDER / f"{one}.sbatch").write_text(_example(one, patch))
