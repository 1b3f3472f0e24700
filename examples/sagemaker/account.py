"""Region, role and bucket of the account, as SageMaker's own SDK finds them."""

from __future__ import annotations

import boto3

session = boto3.session.Session()
region = session.region_name
identity = session.client("sts").get_caller_identity()
number = identity["Account"]
#: The execution role. In Studio the caller is arn:aws:sts::NUMBER:assumed-role/NAME/SageMaker.
role = session.client("iam").get_role(RoleName=identity["Arn"].split("/")[1])["Role"]["Arn"]
#: The default bucket; it is made if it does not exist.
bucket = f"sagemaker-{region}-{number}"
s3 = session.client("s3")
if bucket not in [one["Name"] for one in s3.list_buckets()["Buckets"]]:
    place = {} if region == "us-east-1" else {"LocationConstraint": region}
    s3.create_bucket(Bucket=bucket, **({"CreateBucketConfiguration": place} if place else {}))
image = f"{number}.dkr.ecr.{region}.amazonaws.com/titanlite:1"
