"""A collective that fails leaves a record of every rank that `torchfrtrace` can read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from titanlite.dist.dist_env import DistEnv
from titanlite.dist.flight_recorder import recording

SIZE = "TORCH_FR_BUFFER_SIZE"
ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
OLD_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
OLD_PREFIX = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
NAMES = [SIZE, OLD_SIZE, ON_TIMEOUT, PREFIX, OLD_PREFIX]
#: The user's own, under the older names, which torch passes over when the newer ones are there.
OWN = {OLD_SIZE: "3", ON_TIMEOUT: "0", OLD_PREFIX: "/elsewhere/rank_"}


@pytest.mark.parametrize(
    ("own", "size", "expected"),
    [
        ({}, 7, {SIZE: "7", ON_TIMEOUT: "1", PREFIX: "FOLDER/rank_"}),
        ({}, 0, {SIZE: "0"}),  # without it torch keeps 2,000
        (OWN, 7, OWN),
    ],
    ids=["nccl", "off", "the user's"],
)
def test_torch_gets_its_settings_unless_the_user_set_them(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    own: Any,
    size: int,
    expected: dict[str, str],
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with recording(f"{tmp_path}/traces", size, torch.device("cuda")):
        seen = {
            name: os.environ[name].replace(f"{tmp_path}/traces", "FOLDER")
            for name in NAMES
            if name in os.environ
        }
        assert seen == expected
        # NCCL's watchdog opens the file, and makes no folder.
        assert (tmp_path / "traces").is_dir() is (size > 0)
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == own, (
        "a later run is not affected"
    )


def _fail(world: DistEnv, folder: str, text: str) -> None:
    with pytest.raises(RuntimeError), recording(folder, 20_000, torch.device("cpu")):
        dist.barrier()  # the other record must be newer than the beginning here
        raise RuntimeError(text)
    for name in NAMES:
        os.environ.pop(name, None)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", []),
        ("Timed out waiting 3000ms for recv operation to complete", ["rank_0", "rank_1"]),
    ],
)
def test_only_errors_of_collectives_leave_a_record(
    pool: Pools, tmp_path: Path, text: str, left: list[str]
) -> None:
    pool(2).run(_fail, str(tmp_path), text)
    assert sorted(path.name for path in tmp_path.iterdir()) == left
