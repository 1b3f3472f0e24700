"""Weights & Biases gets the numbers, from a thread whose troubles are not the training's."""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Pools
from tests.support.steps import train_rows
from tests.support.tiny import TWENTY_STEPS
from tests.support.words import listening
from titanlite.config.errors import ConfigError
from titanlite.config.toml import loads
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics import boards
from titanlite.metrics.boards import BackgroundWriter, tags
from titanlite.metrics.trackers import TrackedRun
from titanlite.metrics.wandb import WandbTracker
from titanlite.resolve.load import load_config
from titanlite.runs.lines import read_metrics


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def _chunks(data: bytes) -> Iterator[bytes]:
    """The records of wandb's file of an offline run: in blocks of 32 KiB, as LevelDB logs
    are made.
    """
    record = b""
    at = 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7]) if left >= 7 else (0, 0)
        if kind == 0:
            at += left
            continue
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def offline(folder: Path) -> dict[str, Any]:
    """The run in the one offline folder below `folder`: its names, config, and history by step."""
    from wandb.proto import wandb_internal_pb2 as messages

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[str, Any] = {"history": {}, "config": {}, "exit": None}
    for chunk in _chunks(path.read_bytes()):
        record = messages.Record.FromString(chunk)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {
                name: getattr(record.run, name)
                for name in ("run_id", "display_name", "project", "notes")
            }
            found["tags"] = list(record.run.tags)
            found["config"] |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
        elif kind == "history":
            row = {
                "/".join(i.nested_key) or i.key: json.loads(i.value_json)
                for i in record.history.item
            }
            found["history"][int(row.pop("_step"))] = row
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def _train(world: DistEnv, folder: str, steps: int) -> None:
    # Without other contents: this machine's load, its packages.
    os.environ.update(WANDB_MODE="offline", WANDB__DISABLE_STATS="true", WANDB_PROJECT="llamas")
    flags = [*TWENTY_STEPS, f"--training.steps={steps}", "--metrics.enable_wandb"]
    flags += [
        "--validation.freq=2",
        "--metrics.log_freq=2",
        "--metrics.layer_norms=1",
        "--job.description=a test",
    ]
    train_rows(world, folder, *flags)
    del os.environ["WANDB_PROJECT"]


@pytest.mark.slow
def test_an_offline_run_holds_the_rows_of_metrics_jsonl(pool: Pools, tmp_path: Path) -> None:
    """The real library, in a real run, read back from the file that `wandb sync` would send."""
    pool(2).run(_train, str(tmp_path / "my run"), 4)
    folder = tmp_path / "my run"
    run = offline(folder)
    rows: dict[int, dict[str, float]] = {}
    for row in read_metrics(folder / "metrics.jsonl"):
        rows.setdefault(row["step"], {}).update(tags(row))
    assert sorted(rows) == [1, 2, 4]
    shown = {
        step: {key: value for key, value in row.items() if not key.startswith("_")}
        for step, row in run["history"].items()
    }
    assert shown == rows
    assert {"loss_metrics/global_avg_loss", "validation_metrics/loss", "grad_norm/layers.1"} <= set(
        shown[4]
    )
    assert run["config"]["training"]["steps"] == 4
    assert run["config"]["model"]["overrides"]["n_layers"] == 2
    written = loads((folder / "config.toml").read_text())
    assert {name: run["config"][name] for name in written} == written
    assert run["display_name"] == "my run"
    assert run["notes"] == "a test"
    assert run["project"] == "llamas", "the environment goes before"
    assert run["exit"] == 0
    assert (folder / "wandb-run-id").read_text().strip() == run["run_id"]


class Settings(types.SimpleNamespace):
    def update_from_env_vars(self, environ: dict[str, str]) -> None:
        """Leave the environment alone: the real library reads it in the tests above."""


class Backend(types.ModuleType):
    """Stands in for wandb, and keeps what it is given at a start."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.setup = lambda settings: None
        self.Settings = Settings

    def init(self, **given: Any) -> Any:
        self.begun.append(given)
        return types.SimpleNamespace(url="", dir="", finish=lambda exit_code: None)


def test_a_resumed_run_goes_on_under_its_id_and_the_environment_goes_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", backend := Backend())
    for resumed in (False, True, False):
        WandbTracker(TrackedRun(tmp_path, {"a": {"b": 1}}, "words", resumed)).close()
    first, resumed, fresh = backend.begun
    assert first["id"] == resumed["id"] != fresh["id"]
    assert resumed["resume"] == "allow"
    assert "resume" not in first
    assert "resume" not in fresh
    assert (tmp_path / "wandb-run-id").read_text().strip() == fresh["id"]
    assert first["config"] == {"a": {"b": 1}}
    assert first["notes"] == "words"
    assert first["name"] == tmp_path.name
    assert first["project"] == "titanlite"
    assert first["dir"] == str(tmp_path)
    assert first["settings"].silent
    assert first["settings"].console == "off"
    for name in ("PROJECT", "NAME", "NOTES", "DIR", "RESUME", "RUN_ID"):
        monkeypatch.setenv(f"WANDB_{name}", "theirs")
    WandbTracker(TrackedRun(tmp_path, {}, resumed=True)).close()
    given = backend.begun[-1]
    assert given["id"] == "theirs"
    assert not {"project", "name", "notes", "dir", "resume"} & set(given)
    assert (tmp_path / "wandb-run-id").read_text().strip() == "theirs"


class Hanging(BackgroundWriter):
    """A service that answers late, and the steps that it gets then."""

    name = "a service"

    def __init__(self) -> None:
        self.release = threading.Event()
        self.steps: list[int] = []
        super().__init__()

    def send(self, rows: Any) -> None:
        self.release.wait(600)
        self.steps += [step for step, _ in rows]


def test_a_service_that_hangs_stops_neither_writing_nor_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boards, "_CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(boards, "MOST_ROWS", 100)
    with listening() as said:
        board = Hanging()
        began = time.perf_counter()
        for step in range(1_000):
            board.write(step, {"loss": 1.0})
        board.close()
        # The service itself would hold it up for ten minutes.
        assert 0.2 <= time.perf_counter() - began < 200
    assert "did not end within 0.2 s" in said[-1]
    board.write(1_001, {"loss": 1.0})
    assert sum("does not keep up" in line for line in said) == 1
    board.release.set()
    board._thread.join(300)
    assert not board._thread.is_alive(), "what is left goes on, and ends"
    assert board.steps == list(range(901, 1_000)), "the oldest are dropped, none of the latest"


def test_a_folder_of_its_name_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb leaves a folder `wandb` in the working directory, which Python finds as a package
    without a file.
    """
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        ConfigError,
        match=r"metrics\.enable_wandb.*needs the package wandb.*\n?.*titanlite\[wandb\]",
    ):
        load_config("debug_model.toml", 1, ["--metrics.enable_wandb"])
