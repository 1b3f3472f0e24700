"""Run a job script of the SDK against moto, and write what SageMaker would get: job.json and the
channels' files.

usage: sagemaker_service.py SCRIPT FOLDER
"""

import json
import os
import runpy
import sys
from pathlib import Path

os.environ.update(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="y", AWS_DEFAULT_REGION="us-east-1")

import boto3  # noqa: E402
import sagemaker.train.defaults  # noqa: E402
from moto import mock_aws  # noqa: E402

# It simulates policies, which moto does not know.
sagemaker.train.defaults.resolve_and_validate_role = lambda provided_role, **_: provided_role
with mock_aws():
    script = sys.argv[1]
    folder = Path(sys.argv[2])
    runpy.run_path(script, run_name="__main__")
    service = boto3.client("sagemaker")
    s3 = boto3.client("s3")
    (summary,) = service.list_training_jobs()["TrainingJobSummaries"]
    job = service.describe_training_job(TrainingJobName=summary["TrainingJobName"])
    for channel in job["InputDataConfig"]:
        bucket, _, prefix = channel["DataSource"]["S3DataSource"]["S3Uri"][5:].partition("/")
        if channel["ChannelName"] not in ("code", "sm_drivers"):
            continue
        for found in s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
            file = folder / channel["ChannelName"] / found["Key"][len(prefix) :].lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, found["Key"], str(file))
    (folder / "job.json").write_text(json.dumps(job, default=str))
