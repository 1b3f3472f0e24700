"""A real S3 server on loopback."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.pool import RankPool
from titanlite.checkpoint.store_paths import AnyPath, StorePath, _filesystem

if TYPE_CHECKING:
    from titanlite.dist.dist_env import DistEnv


@dataclass(frozen=True)
class Bucket:
    """An empty bucket; boto3, which titanlite does not use, shows its objects."""

    name: str
    port: int

    @property
    def root(self) -> str:
        return f"s3://{self.name}/run/checkpoint"

    @property
    def path(self) -> StorePath:
        return StorePath(self.root)

    @property
    def environment(self) -> dict[str, str]:
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing")
        return {
            **keys,
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self.port}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @property
    def client(self) -> Any:
        import boto3

        keys = {
            "aws_access_key_id": "testing",
            "aws_secret_access_key": "testing",
            "region_name": "us-east-1",
        }
        return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}", **keys)

    def objects(self) -> dict[str, int]:
        """Key → bytes."""
        return {
            entry["Key"]: entry["Size"]
            for entry in self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        }


@contextmanager
def serving() -> Iterator[int]:
    """The port of a server that lives as long as the block."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(
        logging.ERROR
    )  # else each request is a line on standard error
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def new_bucket(port: int) -> Bucket:
    """Return a bucket of a server that has just started."""
    bucket = Bucket(f"bucket-{uuid.uuid4().hex[:8]}", port)
    bucket.client.create_bucket(Bucket=bucket.name)
    return bucket


def there(
    world: DistEnv,
    variables: dict[str, str],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """For the ranks of a pool: `function(world, …)` with a store's address and keys in the
    environment.
    """
    if any(os.environ.get(name) != value for name, value in variables.items()):
        os.environ.update(variables)
        _filesystem.cache_clear()
    return function(world, *args, **kwargs)


def use(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """The same for the test's own process."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _filesystem.cache_clear()


@dataclass(frozen=True)
class Storage:
    """A folder of checkpoints that ranks of a pool use."""

    root: AnyPath
    environment: Mapping[str, str]

    def run(
        self, ranks: RankPool, function: Callable[..., Any], *arguments: Any, **more: Any
    ) -> list[Any]:
        return ranks.run(there, self.environment, function, *arguments, **more)
