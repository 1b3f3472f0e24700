"""The settings of torch's flight recorder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

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
    with recording(f"{tmp_path}/traces", size):
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
