"""Weights & Biases gets the numbers, from a thread whose troubles are not the training's."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any
from unittest import mock

import pytest

from tests.support.steps import train_rows
from tests.support.tiny import TWENTY_STEPS
from tests.support.words import listening
from titanlite.config.errors import ConfigError
from titanlite.config.toml import loads
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics import boards
from titanlite.metrics.boards import BackgroundWriter, tags
from titanlite.metrics.tracker_base import TrackedRun
from titanlite.metrics.wandb import WandbTracker
from titanlite.resolve.load import load_config
from titanlite.runs.read_jsonl import read_metrics


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def _train(world: DistEnv, folder: str) -> tuple[list[Any], list[Any]]:
    """Train; return the rows that wandb's own run is given, and its summary at the end."""
    import wandb

    rows: list[Any] = []
    about: list[Any] = []
    log, finish = wandb.Run.log, wandb.Run.finish

    def note_row(run: Any, values: Any, step: int) -> None:
        rows.append((step, values))
        log(run, values, step=step)

    def note_end(run: Any, exit_code: int) -> None:
        about.extend((run.id, run.name, run.notes, run.project, dict(run.config), exit_code))
        finish(run, exit_code=exit_code)

    # Without other contents: this machine's load, its packages.
    os.environ.update(WANDB_MODE="offline", WANDB__DISABLE_STATS="true", WANDB_PROJECT="llamas")
    flags = [*TWENTY_STEPS, "--training.steps=4", "--metrics.enable_wandb", "--validation.freq=2"]
    flags += ["--metrics.log_freq=2", "--metrics.layer_norms=1", "--job.description=a test"]
    with mock.patch.multiple(wandb.Run, log=note_row, finish=note_end):
        train_rows(world, folder, *flags)
    del os.environ["WANDB_PROJECT"]
    return rows, about


@pytest.mark.slow
def test_an_offline_run_gets_the_rows_of_metrics_jsonl(pool, tmp_path):
    """The real library, in a real run."""
    folder = tmp_path / "my run"
    rows, (number, *about, config, code) = pool(2).run(_train, str(folder))[0]
    # wandb takes no row of a step that is over.
    assert [step for step, _ in rows] == sorted(step for step, _ in rows)
    assert rows == [(row["step"], tags(row)) for row in read_metrics(folder / "metrics.jsonl")]
    assert {"loss_metrics/global_avg_loss", "validation_metrics/loss", "grad_norm/layers.1"} <= {
        tag for _, row in rows for tag in row
    }
    written = loads((folder / "config.toml").read_text())
    assert {name: config[name] for name in written} == written
    assert about == ["my run", "a test", "llamas"], "the environment goes before"
    assert code == 0
    assert (folder / "wandb-run-id").read_text().strip() == number


def test_a_resumed_run_goes_on_under_its_id_and_the_environment_goes_before(tmp_path, monkeypatch):
    # It leaves the environment alone, which the real library reads in the test above.
    monkeypatch.setitem(sys.modules, "wandb", library := mock.MagicMock())

    def begun(resumed):
        WandbTracker(TrackedRun(tmp_path, {}, resumed=resumed)).close()
        return library.init.call_args.kwargs

    first, resumed, fresh = begun(False), begun(True), begun(False)
    assert first["id"] == resumed["id"] != fresh["id"]
    assert [run.get("resume") for run in (first, resumed, fresh)] == [None, "allow", None]
    assert (tmp_path / "wandb-run-id").read_text().strip() == fresh["id"]
    assert (first["project"], first["dir"]) == ("titanlite", str(tmp_path))
    for name in ("PROJECT", "NAME", "NOTES", "DIR", "RESUME", "RUN_ID"):
        monkeypatch.setenv(f"WANDB_{name}", "theirs")
    given = begun(True)
    assert library.init.call_count == 4
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


def test_a_service_that_hangs_stops_neither_writing_nor_closing(monkeypatch):
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


def test_a_folder_of_its_name_is_no_package(tmp_path, monkeypatch):
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
