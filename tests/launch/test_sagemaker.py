"""examples/sagemaker: the notebooks run against a fake account, and the container gets what they
ask for. docs/launch/sagemaker.md
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden_run import GoldenRun
from tests.support.hub_server import HubServer
from tests.support.processes import ROOT
from titanlite.launch.container_start import sagemaker_job
from titanlite.plan.hardware import cluster_of
from titanlite.plan.plan import make_plan
from titanlite.resolve.load import check_config

pytestmark = pytest.mark.slow
FOLDER = ROOT / "examples" / "sagemaker"
PAGE = (ROOT / "docs" / "launch" / "sagemaker.md").read_text()
ROLE = "arn:aws:iam::123456789012:role/service-role/studio"
BUCKET = "sagemaker-us-east-1-123456789012"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/titanlite:1"
#: As the text has it: tokens per second and GPU; compile, float8, float8 all-gather.
LEVELS = {
    "level1": (6475, False, False, False),
    "level2": (7166, True, False, False),
    "level3": (8624, True, True, False),
    "level4": (8950, True, True, True),
}


@dataclass
class Account:
    """Return the requests of the notebooks to the fake account."""

    folder: Path
    requests: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: The words of `sm-docker`, and what the last notebook printed.
    built: list[str] = field(default_factory=list)
    shown: str = ""


def content(key: str) -> bytes:
    """Return an object of the bucket."""
    import boto3

    body: bytes = boto3.client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read()
    return body


def copy_checkout(folder: Path) -> Path:
    """Copy what the notebooks need of a checkout; return their folder."""
    (folder / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "sagemaker_levels.py", folder / "benchmarks")
    return Path(shutil.copytree(FOLDER, folder / "examples" / "sagemaker"))


def run_cells(notebook: Path) -> str:
    """Run the cells of a notebook as Jupyter does, but for pip; return what they printed."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shown = ""
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not source.startswith("%pip"):
            with capture_output() as output:
                shell.run_cell(source).raise_error()
            shown += output.stdout
    return shown


def enter_studio(patch: pytest.MonkeyPatch) -> None:
    """Make the execution role in the fake account, and take its keys."""
    import boto3

    sagemaker = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}}
    trust = json.dumps({"Statement": [{**sagemaker, "Action": "sts:AssumeRole"}]})
    iam = boto3.client("iam")
    iam.create_role(RoleName="studio", Path="/service-role/", AssumeRolePolicyDocument=trust)
    keys = boto3.client("sts").assume_role(RoleArn=ROLE, RoleSessionName="SageMaker")
    for name in ("AccessKeyId", "SecretAccessKey", "SessionToken"):
        variable = "AWS_" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()
        patch.setenv(variable, keys["Credentials"][name])


@pytest.fixture(scope="module")
def account(golden: GoldenRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    """The three notebooks after their run in a fake account."""
    pytest.importorskip("IPython")
    moto = pytest.importorskip("moto")
    import boto3

    folder = tmp_path_factory.mktemp("sagemaker")
    notebooks = copy_checkout(folder)
    found = Account(folder)
    tokenizer = folder / "hub" / "models" / "meta-llama" / "Meta-Llama-3-8B" / "original"
    tokenizer.mkdir(parents=True)
    (tokenizer / "tokenizer.model").write_text("a tokenizer")
    stand_in = folder / "bin" / "sm-docker"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho "$*" > {folder}/built\n')
    stand_in.chmod(0o755)

    def note(params: dict[str, Any], model: Any, **_: object) -> None:
        found.requests.setdefault(model.name, []).append(params)
        if model.name == "CreateTrainingJob":
            key = params["CheckpointConfig"]["S3Uri"].removeprefix(f"s3://{BUCKET}/")
            rows = (golden.folder / "metrics.jsonl").read_bytes()
            boto3.client("s3").put_object(Bucket=BUCKET, Key=f"{key}/metrics.jsonl", Body=rows)

    with pytest.MonkeyPatch.context() as patch, HubServer(folder / "hub") as hub:
        patch.chdir(notebooks)
        patch.syspath_prepend(str(notebooks))
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
        patch.setenv("PATH", str(stand_in.parent), prepend=":")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name, value in hub.environment(folder / "hub-home").items():
            patch.setenv(name, value)
        with moto.mock_aws():
            enter_studio(patch)
            boto3.setup_default_session()
            boto3.DEFAULT_SESSION.events.register("provide-client-params.sagemaker", note)
            patch.setattr(boto3.session, "Session", lambda: boto3.DEFAULT_SESSION)
            for name in ("1_build_image", "2_prepare_data", "3_train"):
                found.shown = run_cells(notebooks / f"{name}.ipynb")
            found.built = shlex.split((folder / "built").read_text())
            yield found


def test_the_image_is_built_by_an_argument_of_the_dockerfile_each(account):
    words = account.built
    assert words[:2] == ["build", "."]
    pairs = [*zip(words[2::2], words[3::2], strict=True)]
    options = dict(pairs)
    assert options["--repository"] == "titanlite:1"
    assert (options["--role"], options["--bucket"]) == ("service-role/studio", BUCKET)
    text = (ROOT / options["--file"]).read_text()
    arguments = [word.partition("=")[0] for option, word in pairs if option == "--build-arg"]
    assert arguments == ["USER_ID", "EFA", "REQUIREMENTS"]
    assert all(re.search(f"(?m)^ARG {name}=", text) for name in arguments)


def test_c4_and_the_tokenizer_come_to_the_places_that_the_config_reads(account):
    (job,) = account.requests["CreateProcessingJob"]
    assert (job["RoleArn"], job["AppSpecification"]["ImageUri"]) == (ROLE, IMAGE)
    command = job["AppSpecification"]["ContainerEntrypoint"]
    command += job["AppSpecification"]["ContainerArguments"]
    files = account.folder / "hub" / "datasets" / "allenai" / "c4" / "en"
    files.mkdir(parents=True)
    for shard in ("00099", "00100"):
        (files / f"c4-train.{shard}-of-01024.json.gz").write_bytes(b"a shard")
    (output,) = job["ProcessingOutputConfig"]["Outputs"]
    assert output["S3Output"]["S3Uri"] == f"s3://{BUCKET}/train"
    target = account.folder / "c4"
    command[command.index(output["S3Output"]["LocalPath"])] = str(target)
    subprocess.run(command, check=True, capture_output=True)
    assert [file.name for file in target.glob("en/*.json.gz")] == [
        "c4-train.00099-of-01024.json.gz"
    ]
    assert content("tokenizer/original/tokenizer.model") == b"a tokenizer"


@pytest.mark.parametrize("level", LEVELS)
def test_a_job_trains_its_level_as_the_text_does(account, level, monkeypatch):
    """The container reads what the request says, and gets the text's run."""
    job = account.requests["CreateTrainingJob"][list(LEVELS).index(level)]
    ml = account.folder / level
    (ml / "input" / "config").mkdir(parents=True)
    channels = {}
    for channel in job["InputDataConfig"]:
        name, source = channel["ChannelName"], channel["DataSource"]["S3DataSource"]
        assert source["S3DataDistributionType"] == "FullyReplicated"
        channels[name] = source["S3Uri"]
    assert channels == {name: f"s3://{BUCKET}/{name}/" for name in ("train", "tokenizer", "config")}
    folder = ml / "input" / "data" / "config"
    folder.mkdir(parents=True)
    for file in (f"{level}.toml", "sagemaker.toml"):
        (folder / file).write_bytes(content(f"config/{file}"))
    machines = job["ResourceConfig"]
    hosts = [f"algo-{number}" for number in range(1, machines["InstanceCount"] + 1)]
    kind = machines["InstanceType"]
    resources = {"hosts": hosts, "current_host": "algo-4", "current_instance_type": kind}
    values = {
        "hyperparameters": job["HyperParameters"],
        "inputdataconfig": channels,
        "resourceconfig": resources,
    }
    for name, value in values.items():
        (ml / "input" / "config" / f"{name}.json").write_text(json.dumps(value))
    monkeypatch.setenv("NGPU", "8")
    command, variables = sagemaker_job(ml)
    for name, value in {**variables, **job["Environment"]}.items():
        monkeypatch.setenv(name, value)
    assert variables["FI_EFA_USE_DEVICE_RDMA"] == "1"
    assert command[command.index("--node_rank") + 1] == "3"
    flags = [word.replace("/opt/ml", str(ml)) for word in command[command.index("train") + 1 :]]
    config, run = check_config(flags, 32, training=False)
    sections = config.sections
    assert sections.model.tokenizer_path == f"{ml}/input/data/tokenizer/original/tokenizer.model"
    assert sections.training.dataset_path == f"{ml}/input/data/train/en/*.json.gz"
    assert sections.checkpoint.folder.startswith(f"s3://{BUCKET}/llama3-8b-{level}")
    assert sections.job.dump_folder == job["CheckpointConfig"]["LocalPath"]
    assert sections.metrics.save_tb_folder == job["TensorBoardOutputConfig"]["LocalPath"]
    assert (machines["VolumeSizeInGB"], machines["KeepAlivePeriodInSeconds"]) == (800, 900)
    float8 = sections.float8
    assert LEVELS[level][1:] == (
        sections.training.compile,
        float8.enable_float8_linear,
        float8.enable_fsdp_float8_all_gather,
    )
    recomputation = sections.activation_checkpoint
    assert (recomputation.mode, recomputation.selective_ac_option) == ("selective", "op")
    assert (run.batch.seq_len, run.batch.global_batch_size, run.steps) == (8192, 32, 2000)
    plan = make_plan(run, cluster_of(run))
    assert plan.fits
    speed, published = plan.speed.tokens_per_second, LEVELS[level][0]
    (row,) = re.findall(rf"(?m)^\| `{level}`: .*", account.shown)
    assert f" | {published:,} | " in row and f" | {speed:,.0f} | " in row
    assert row in PAGE
    assert re.search(rf"{level} +{speed:,.0f} +{published:,} ", account.shown)


def test_the_metric_definitions_find_the_figures_of_a_log(account, golden):
    (definitions,) = {
        json.dumps(job["AlgorithmSpecification"]["MetricDefinitions"])
        for job in account.requests["CreateTrainingJob"]
    }
    lines = "\n".join(line for attempt in golden.console() for line in attempt)
    lines += "\nstep: 24  loss: 3.4370  memory: 68.57GiB(86.69%)  tps: 6,785  mfu: 39.73%"
    of_notebook = {one["Name"]: one["Regex"] for one in json.loads(definitions)}
    script = (ROOT / "deploy" / "examples" / "sagemaker" / "llama3_1_8b.py").read_text()
    of_script = dict(re.findall(r'MetricDefinition\(name="(\w+)", regex=r"(.*)"\)', script))
    row = golden.rows()[24]
    for expressions in (of_notebook, of_script):
        found = {name: re.findall(regex, lines) for name, regex in expressions.items()}
        assert float(found["step"][-2]) == 24
        assert float(found["loss"][-2]) == pytest.approx(row["loss"], rel=0.001)
        assert float(found["grad_norm"][-1]) == pytest.approx(row["grad_norm"], rel=0.005)
        assert float(found["learning_rate"][-1]) == pytest.approx(row["lr"], rel=0.005)
        assert found["mfu"][-1] == "39.73"
    assert re.findall(of_notebook["memory_gib"], lines)[-1] == "68.57"


def test_the_last_cell_removes_all_that_the_notebooks_put_into_the_bucket(account):
    import boto3

    cells = json.loads((FOLDER / "3_train.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "".join(cells[-1]["source"])
    (folders,) = re.findall("for folder in (.*?); do aws s3 rm --recursive s3://BUCKET/", text)
    (pattern,) = re.findall('--include "(.*)[*]"', text)
    removed = (*(f"{folder}/" for folder in folders.split()), pattern)
    written = re.findall(f's3://{BUCKET}/([^"]*)', json.dumps(account.requests))
    listed = boto3.client("s3").list_objects_v2(Bucket=BUCKET)["Contents"]
    places = [*written, *(one["Key"] for one in listed)]
    assert len(places) > 20
    assert [place for place in places if not f"{place}/".startswith(removed)] == []
