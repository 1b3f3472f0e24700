"""Both versions of SageMaker's SDK run the cells of examples/sagemaker/3_train_with_sdk.ipynb and
the script of deploy/examples/sagemaker against a fake endpoint. docs/launch/sagemaker.md
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_sagemaker import (
    BUCKET,
    FOLDER,
    IMAGE,
    ROLE,
    content,
    copy_checkout,
    enter_studio,
)
from tests.support.processes import ROOT
from tests.support.s3 import serving

pytestmark = pytest.mark.soak
SCRIPT = ROOT / "deploy" / "examples" / "sagemaker" / "llama3_1_8b.py"
#: Their packages exclude each other and titanlite's. That of version 3 holds what sagemaker 3.27.0
#: has for training; mlflow, two thirds of its size, is not imported.
SDKS = {2: ["sagemaker==2.257.7"], 3: ["sagemaker-train==1.27.0"]}
NOT_NEEDED = ("mlflow", "sagemaker-mlflow")
#: No request leaves the machine, not even the SDKs' reports of their use.
OFFLINE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
SETTINGS = f"""
SchemaVersion: "1.0"
SageMaker:
  PythonSDK:
    Modules:
      Session:
        DefaultS3Bucket: {BUCKET}
"""
CELLS = "3_train_with_sdk.ipynb"
ANSWER = (
    "<SimulatePrincipalPolicyResponse xmlns='https://iam.amazonaws.com/doc/2010-05-08/'>"
    "<SimulatePrincipalPolicyResult><IsTruncated>false</IsTruncated><EvaluationResults/>"
    "</SimulatePrincipalPolicyResult></SimulatePrincipalPolicyResponse>"
)


@dataclass
class Endpoint:
    """What reaches CreateTrainingJob, and a folder like a checkout for the clients."""

    folder: Path
    requests: list[dict[str, Any]] = field(default_factory=list)

    def run(self, python: str, code: str) -> list[dict[str, Any]]:
        """Run code as a notebook does; return its requests."""
        self.requests.clear()
        done = subprocess.run(
            [python, "-c", code],
            cwd=self.folder / "examples" / "sagemaker",
            env={**os.environ, **OFFLINE},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return list(self.requests)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    import boto3
    from moto.iam.responses import IamResponse
    from moto.sagemaker.responses import SageMakerResponse

    found = Endpoint(tmp_path_factory.mktemp("checkout"))
    copy_checkout(found.folder)
    shutil.copy(ROOT / "train.py", found.folder)
    create = SageMakerResponse.create_training_job

    def note(response: Any) -> Any:
        found.requests.append(json.loads(response.body))
        return create(response)

    with pytest.MonkeyPatch.context() as patch, serving() as port:
        patch.setattr(SageMakerResponse, "create_training_job", note)
        # The SDK 3 asks whether the role may do what it needs. moto has no answer.
        answer = (200, {}, ANSWER)
        patch.setattr(IamResponse, "simulate_principal_policy", lambda _: answer, raising=False)
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }
        for name, value in variables.items():
            patch.setenv(name, value)
        # For version 3, which asks AWS's own address whose account it is.
        settings = found.folder / "settings.yaml"
        settings.write_text(SETTINGS)
        patch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(settings))
        patch.delenv("PYTHONPATH", raising=False)
        boto3.setup_default_session()
        enter_studio(patch)
        boto3.setup_default_session()
        yield found


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The Python of a version's own environment; uv keeps its packages in the user's cache."""

    @cache
    def made(version: int) -> str:
        folder = tmp_path_factory.mktemp(f"sdk{version}")
        never = folder / "overrides.txt"
        never.write_text("".join(f"{name}; python_version < '3'\n" for name in NOT_NEEDED))
        uv = [sys.executable, "-m", "uv", "--quiet"]
        subprocess.run([*uv, "venv", "--python", sys.executable, folder / "env"], check=True)
        python = str(folder / "env" / "bin" / "python")
        options = ["--python", python, "--override", never]
        subprocess.run([*uv, "pip", "install", *options, *SDKS[version]], check=True)
        return python

    return made


def cells(notebook: str, *parts: str) -> str:
    """Return the cells of code with one of these parts, in the order of the notebook."""
    every = json.loads((FOLDER / notebook).read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in every if cell["cell_type"] == "code"]
    found = [source for source in sources if any(part in source for part in parts)]
    assert len(found) == len(parts)
    return "\n".join(found)


def expected(name: str) -> dict[str, Any]:
    """Return the request for the level of the notebook, as the text's estimator describes it."""
    metrics: dict[str, Any] = {}
    exec((FOLDER / "metrics.py").read_text(), metrics)
    place = f"s3://{BUCKET}/{name}"
    return {
        "TrainingJobName": name,
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": IMAGE,
            "TrainingInputMode": "File",
            "MetricDefinitions": [
                {"Name": key, "Regex": regex} for key, regex in metrics["METRICS"].items()
            ],
        },
        "HyperParameters": {"config_file": "/opt/ml/input/data/config/level4.toml"},
        "InputDataConfig": [
            {
                "ChannelName": channel,
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3Uri": f"s3://{BUCKET}/{channel}/",
                        "S3DataDistributionType": "FullyReplicated",
                    }
                },
            }
            for channel in ("train", "tokenizer", "config")
        ],
        "OutputDataConfig": {"S3OutputPath": place},
        "CheckpointConfig": {"S3Uri": f"{place}/run", "LocalPath": "/opt/ml/checkpoints"},
        "Environment": {"CHECKPOINTS": f"{place}/checkpoint"},
        "TensorBoardOutputConfig": {
            "S3OutputPath": f"s3://{BUCKET}/tensorboard/{name}",
            "LocalPath": "/opt/ml/output/tensorboard",
        },
        "ResourceConfig": {
            "InstanceType": "ml.p5.48xlarge",
            "InstanceCount": 4,
            "VolumeSizeInGB": 800,
            "KeepAlivePeriodInSeconds": 900,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 6 * 3600},
    }


def test_boto3_asks_for_the_job(endpoint):
    code = cells("3_train.ipynb", "from account", "def train") + '\ntrain("level4")'
    (request,) = endpoint.run(sys.executable, code)
    assert request == expected(request["TrainingJobName"])


def test_the_estimator_asks_for_the_same_job(endpoint, sdk):
    (request,) = endpoint.run(sdk(2), cells(CELLS, "from account", "import Estimator"))
    assert request.pop("ProfilerConfig") == {"DisableProfiler": True}
    assert request == expected(request["TrainingJobName"])


def test_the_estimator_of_the_text_gives_train_py_and_the_config_to_the_toolkit(endpoint, sdk):
    code = cells(CELLS, "from account", "import Estimator", "import PyTorch")
    first, request = endpoint.run(sdk(2), code)
    name = first["TrainingJobName"]
    parameters = {key: json.loads(text) for key, text in request["HyperParameters"].items()}
    source = f"s3://{BUCKET}/{name}-entry-point/source/sourcedir.tar.gz"
    wanted = {
        "config_file": "level4.toml",
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": source,
        "sagemaker_torch_distributed_enabled": True,
    }
    assert wanted.items() <= parameters.items()
    changed = {"TrainingJobName": f"{name}-entry-point", "HyperParameters": None}
    assert {**request, "HyperParameters": None} == {**first, **changed}
    body = content(source.removeprefix(f"s3://{BUCKET}/"))
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        assert {"train.py", "level4.toml", "sagemaker.toml"} <= set(archive.getnames())


def test_the_model_trainer_asks_for_the_same_job(endpoint, sdk):
    (request,) = endpoint.run(sdk(3), cells(CELLS, "from account", "import ModelTrainer"))
    name = request["TrainingJobName"]
    # The SDK adds the time, and defaults of the API.
    own = request["OutputDataConfig"]["S3OutputPath"].rpartition("/")[2]
    assert re.fullmatch(rf"{own}-\d+", name)
    assert request["OutputDataConfig"].pop("CompressionType") == "GZIP"
    assert [channel.pop("InputMode") for channel in request["InputDataConfig"]] == ["File"] * 3
    assert request == {**expected(own), "TrainingJobName": name}


def test_the_script_runs_its_command_on_each_machine(endpoint, sdk):
    folder = endpoint.folder / "llama3_1_8b"
    folder.mkdir()
    (folder / "config.toml").write_text("[job]\n")
    code = SCRIPT.read_text().replace("/home/me/llama3_1_8b", str(folder))
    (request,) = endpoint.run(sdk(3), code.replace(f"{ROLE[:31]}titanlite", ROLE))
    wanted = {
        "RoleArn": ROLE,
        "CheckpointConfig": {
            "S3Uri": "s3://my-bucket/llama3-1-8b/run",
            "LocalPath": "/opt/ml/checkpoints",
        },
        "TensorBoardOutputConfig": {
            "S3OutputPath": "s3://my-bucket/llama3-1-8b/tensorboard",
            "LocalPath": "/opt/ml/output/tensorboard",
        },
        "ResourceConfig": {
            "InstanceType": "ml.p5.48xlarge",
            "InstanceCount": 2,
            "VolumeSizeInGB": 800,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 259200, "MaxWaitTimeInSeconds": 518400},
        "EnableManagedSpotTraining": True,
        "RetryStrategy": {"MaximumRetryAttempts": 30},
    }
    assert {key: request[key] for key in wanted} == wanted
    assert request["Environment"]["FI_PROVIDER"] == "efa"
    definitions = request["AlgorithmSpecification"]["MetricDefinitions"]
    names = ["step", "loss", "grad_norm", "learning_rate", "mfu"]
    assert [one["Name"] for one in definitions] == names
    places = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in request["InputDataConfig"]
    }
    assert places.pop("train") == "s3://my-bucket/c4"

    def uploaded(channel: str, file: str) -> str:
        return content(f"{places[channel].removeprefix(f's3://{BUCKET}/')}/{file}").decode()

    assert uploaded("code", "config.toml") == "[job]\n"
    # What ContainerArguments starts.
    assert "sm_drivers/sm_train.sh" in request["AlgorithmSpecification"]["ContainerArguments"][1]
    driver = uploaded("sm_drivers", "sm_train.sh")
    assert "exec python -m titanlite.torchrun" in driver
    assert "--job.dump_folder=/opt/ml/checkpoints" in driver
