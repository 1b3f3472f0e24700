"""Keys of local saves: what is refused and told."""

from __future__ import annotations

import pytest

from titanlite.config.errors import ConfigError
from titanlite.resolve.load import check_config
from titanlite.run.config import RunConfig

FOLDER = "--checkpoint.local_folder=/local/saves"


def _read(*flags: str) -> RunConfig:
    words = ["--job.config_file=debug_model.toml", "--checkpoint.enable_checkpoint", *flags]
    return check_config(words, 2, training=False)[1]


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--checkpoint.local_folder=s3://bucket/saves"], "is a store, which all nodes share"),
        (["--checkpoint.local_folder=saves"], "does not begin with /"),
        (["--checkpoint.local_folder=/local/{rank}"], "has another field than {local_rank}"),
        ([FOLDER, "--checkpoint.interval=50"], "saves as often"),
        ([FOLDER, "--checkpoint.local_interval=500"], "saves as often"),
        ([FOLDER, "--checkpoint.local_interval=0"], "checkpoint.local_interval"),
        ([FOLDER, "--checkpoint.local_keep_latest_k=0"], "checkpoint.local_keep_latest_k"),
    ],
)
def test_what_cannot_work_is_refused(flags: list[str], shown: str) -> None:
    with pytest.raises(ConfigError, match="problem") as refused:
        _read(*flags)
    assert shown in str(refused.value)


@pytest.mark.parametrize(
    "folder", ["/local/saves", "/disk{local_rank}/saves", "/dev/shm/saves", "~/saves"]
)
def test_folders_of_a_node(folder: str) -> None:
    run = _read(f"--checkpoint.local_folder={folder}")
    assert run.features.local_saves is not None


def test_an_interval_in_seconds_is_longer_than_any_number_of_steps() -> None:
    more = ["--checkpoint.interval_type=seconds", "--checkpoint.interval=10"]
    assert _read(FOLDER, *more).checkpoint.local_interval == 50


def test_without_a_folder_the_other_keys_are_named() -> None:
    run = _read("--checkpoint.local_interval=10")
    assert any("checkpoint.local_interval" in note.text for note in run.notes)
    assert run.features.local_saves is None
