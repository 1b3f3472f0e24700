"""`titanlite launch sagemaker`: the script for the SDK, its regular expressions, and jobs that
cannot work there.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.golden_run import GoldenRun
from tests.support.processes import ROOT
from titanlite.cli.launch import prepare
from titanlite.cli.main import main
from titanlite.config.errors import ConfigError
from titanlite.launch import sagemaker as launch_sagemaker
from titanlite.metrics.step_line import aws_fsdp_line

EXAMPLE = ROOT / "deploy" / "examples" / "sagemaker" / "llama3_1_8b.py"
FLAGS = [
    "--job.config_file=train_configs/llama3_1_8b.toml",
    "--job.dump_folder=/home/me/llama3_1_8b",
    "--training.dataset_path=${SM_CHANNEL_TRAIN}",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.folder=s3://my-bucket/llama3-1-8b/checkpoint",
    "--launch.nodes=2",
    "--launch.instance_type=p5.48xlarge",
    "--launch.image=123456789012.dkr.ecr.us-east-1.amazonaws.com/titanlite:latest",
    "--launch.role=arn:aws:iam::123456789012:role/titanlite",
    "--launch.time_limit=3-00",
    "--launch.spot_wait=6-00",
    "--launch.checkpoint_s3=s3://my-bucket/llama3-1-8b",
    "--launch.channels.train=s3://my-bucket/c4",
]


def _example() -> str:
    return launch_sagemaker.files(prepare(FLAGS))[launch_sagemaker.FILE]


def test_the_stored_example_is_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert _example() == EXAMPLE.read_text(), (
        "rewrite it: python -m tests.launch.test_sagemaker --write"
    )


def test_only_the_config_goes_to_the_container() -> None:
    patterns = ast.literal_eval(re.findall(r"ignore_patterns=(.*),", _example())[0])
    names = [
        "config.toml",
        "config.yaml",
        "job.yaml",
        "local.sh",
        "job.sbatch",
        "sagemaker_job.py",
        "failures.log",
    ]
    assert set(names) - shutil.ignore_patterns(*patterns)("", names) == {"config.toml"}


def test_the_config_of_the_job_keeps_its_variables_and_the_command_its_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*FLAGS[2:], f"--job.dump_folder={tmp_path}/run"]
    assert main(["launch", "sagemaker", str(ROOT / "train_configs/llama3_1_8b.toml"), *flags]) == 0
    folder = tmp_path / "run" / "launch"
    assert str(folder / "sagemaker_job.py") in capsys.readouterr().out
    assert 'dataset_path = "${SM_CHANNEL_TRAIN}"' in (folder / "config.toml").read_text()
    script = (folder / "sagemaker_job.py").read_text()
    assert '"--job.dump_folder=/opt/ml/checkpoints"' in script
    assert f'source_dir="{folder}"' in script


def test_the_regular_expressions_find_the_figures_of_a_real_log(golden: GoldenRun) -> None:
    rows = golden.rows()
    found: dict[str, list[float]] = {}
    for line in (line for attempt in golden.console() for line in attempt):
        for name, regex in launch_sagemaker.METRICS["titan"].items():
            found.setdefault(name, []).extend(float(text) for text in re.findall(regex, line))
    assert (
        set(found["step"]) == {float(step) for step in rows} and not found["mfu"]
    )  # a CPU has no peak
    for row in (row for row in rows.values() if isinstance(row["loss"], float)):
        for name, key in {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}.items():
            assert any(abs(row[key] - value) <= 0.005 * abs(row[key]) for value in found[name]), (
                name,
                row,
            )


def test_the_regular_expressions_find_the_figures_of_the_other_style() -> None:
    from datetime import datetime

    line = aws_fsdp_line(
        {"step": 12, "loss": 2.5, "samples_per_second": 3.25, "lr": 3e-4}, datetime.now()
    )
    found = {
        name: float(re.findall(regex, line)[0])
        for name, regex in launch_sagemaker.METRICS["aws_fsdp"].items()
    }
    assert found == {"step": 12, "loss": 2.5, "samples_per_second": 3.25, "learning_rate": 3e-4}


def test_jobs_that_cannot_work_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as error:
        launch_sagemaker.files(prepare(["--launch.gpus_per_node=1"]))
    keys = [problem.key for problem in error.value.problems]
    assert sorted(keys) == ["launch.checkpoint_s3", "launch.image", "launch.instance_type"]
    with pytest.raises(ConfigError, match="each machine alone.*\n.*s3://.*FSx"):
        launch_sagemaker.files(prepare([*FLAGS, "--checkpoint.folder=checkpoint"]))
    launch_sagemaker.files(prepare([*FLAGS, "--checkpoint.folder=/opt/ml/input/data/fsx/run"]))
    launch_sagemaker.files(prepare([*FLAGS, "--checkpoint.folder=${SM_CHANNEL_TRAIN}/run"]))
    one = [*FLAGS, "--launch.nodes=1", "--launch.max_restarts=0"]
    script = launch_sagemaker.files(prepare([*one, "--checkpoint.folder=checkpoint"]))[
        launch_sagemaker.FILE
    ]
    assert (
        "etry" not in script and "FI_PROVIDER" not in script
    )  # no retries, and no EFA for one machine
    for folder in ("/tmp/run", "../run"):
        with pytest.raises(ConfigError, match="ends with the machine"):
            launch_sagemaker.files(prepare([*one, f"--checkpoint.folder={folder}"]))
    with pytest.raises(
        ConfigError, match="training.dataset_path: .* no environment variable NOT_THERE"
    ):
        launch_sagemaker.files(prepare([*FLAGS, "--training.dataset_path=${NOT_THERE}/a"]))
    with pytest.raises(ConfigError, match="shorter than launch.time_limit"):
        launch_sagemaker.files(prepare([*FLAGS, "--launch.spot_wait=1-00"]))


def test_nothing_is_submitted_without_the_sdk_and_secrets_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = str(ROOT / "train_configs/llama3_1_8b.toml")
    secret = "--launch.environment.A_TOKEN=1"
    assert (
        main(
            [
                "launch",
                "sagemaker",
                config,
                *FLAGS[2:],
                f"--job.dump_folder={tmp_path}",
                secret,
                "--submit",
            ]
        )
        == 1
    )
    said = capsys.readouterr().err
    assert "SDK of SageMaker 3 is not installed: nothing is submitted; start it with" in said
    assert "warning: DescribeTrainingJob shows launch.environment.A_TOKEN" in said


if __name__ == "__main__" and "--write" in sys.argv:
    EXAMPLE.parent.mkdir(parents=True, exist_ok=True)
    EXAMPLE.write_text(_example())
