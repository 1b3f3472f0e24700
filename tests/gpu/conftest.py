"""The GPU tests: one process, one GPU, NCCL. Without a GPU all of them are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from titanlite.parallel.dist_env import DistEnv


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def world() -> Iterator[DistEnv]:
    """A world of one rank on the GPU; one per process, since its process group is the default one."""
    with DistEnv.open(device_type="cuda") as opened:
        yield opened
