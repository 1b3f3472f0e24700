"""MLflow, Comet and Trackio get the numbers, each through its real client in a local folder."""

from __future__ import annotations

import json
import math
import sqlite3
import sys
import threading
import time
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.words import listening
from titanlite import doors
from titanlite.config.load import load
from titanlite.contrib.trackers.mlflow import metric_name
from titanlite.metrics import boards
from titanlite.metrics.boards import BackgroundWriter, close_all
from titanlite.metrics.tracker_base import TrackedRun, Tracker

LOSS = "loss_metrics/global_avg_loss"
#: Where each service writes below a folder, without a network.
LOCAL: dict[str, Callable[[Path], dict[str, str]]] = {
    "mlflow": lambda folder: {
        "MLFLOW_TRACKING_URI": f"file:{folder / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    },
    "comet": lambda folder: {"COMET_OFFLINE_DIRECTORY": str(folder / "comet")},
    "trackio": lambda folder: {"TRACKIO_DIR": str(folder / "trackio")},
}


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    return doors.load(doors.OURS["trackers"][name])(run)


@dataclass
class Tracked:
    """What a service holds of one run.

    history: step -> values by name; of a step that was sent twice, the last ones. sent: rows, with
    those that were sent twice. state: "" where the service has none.
    """

    history: dict[int, dict[str, float]]
    config: dict[str, Any]
    sent: int
    state: str = ""


def read_mlflow(folder: Path, run_id: str) -> Tracked:
    from mlflow import MlflowClient

    client = MlflowClient()
    run = client.get_run(run_id)
    found = Tracked({}, run.data.params, 0, run.info.status.lower())
    for name in run.data.metrics:
        for one in client.get_metric_history(run_id, name):
            found.history.setdefault(one.step, {})[name] = one.value
            found.sent += name == LOSS
    return found


def read_comet(folder: Path, run_id: str) -> Tracked:
    """Read Comet's archives: of a run, and of each resume of it."""
    archives = sorted((folder / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime)
    found = Tracked({}, {}, 0)
    for path in archives:
        with zipfile.ZipFile(path) as archive:
            if json.loads(archive.read("experiment.json"))["offline_id"] != run_id:
                continue
            lines = archive.read("messages.json").decode().splitlines()
        for message in map(json.loads, lines):
            payload = message["payload"]
            if message["type"] == "metric_msg":
                metric = payload["metric"]
                if metric["metricName"] == "process duration":
                    continue
                values = found.history.setdefault(metric["step"], {})
                values[metric["metricName"]] = metric["metricValue"]
                found.sent += metric["metricName"] == LOSS
            elif message["type"] == "parameter_msg":
                # "params" is a parameter that is a list.
                parameter = payload.get("param") or payload["params"]
                found.config[parameter["paramName"]] = parameter["paramValue"]
            elif message["type"] == "log_other" and payload["key"] == "state":
                found.state = payload["value"]
    return found


def read_trackio(folder: Path, run_id: str) -> Tracked:
    """Read Trackio's database."""
    database = sqlite3.connect(folder / "trackio" / "titanlite.db")
    found = Tracked({}, {}, 0)
    of_run = "where run_name = ? order by id"
    query = f"select step, metrics, run_id from metrics {of_run}"
    ids = set()
    for step, values, own_id in database.execute(query, [run_id]):
        row = json.loads(values)
        found.history.setdefault(step, {}).update(row)
        found.sent += LOSS in row
        ids.add(own_id)
    assert len(ids) == 1, "a resumed run is the same run"
    (config,) = database.execute(f"select config from configs {of_run}", [run_id]).fetchone()
    found.config = json.loads(config)
    return found


READERS = {"mlflow": read_mlflow, "comet": read_comet, "trackio": read_trackio}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", LOCAL)
def test_a_service_holds_each_row_once_and_a_resumed_run_continues_there(
    tmp_path, monkeypatch, name
):
    folder = tmp_path / "my run"
    folder.mkdir()
    for variable, value in LOCAL[name](folder).items():
        monkeypatch.setenv(variable, value)
    config = {"training": {"steps": 3, "names": ["a", "b"]}, "long": {"text": "x" * 10_000}}
    rows: dict[int, dict[str, float]] = {
        1: {LOSS: 1.5, "mfu(%)": math.nan},
        2: {LOSS: math.inf, "experts/max_share/layers.0": 0.5},
        3: {LOSS: 1.25},
    }
    ids = []
    with listening() as said:
        for resumed, steps in ((False, (1, 2)), (True, (3,)), (False, ())):
            tracker = open_tracker(name, TrackedRun(folder, config, "words", resumed=resumed))
            for step in steps:
                tracker.write(step, rows[step])
            # A busy machine may need more than the second that a failed run leaves.
            monkeypatch.setattr(type(tracker), "failed_seconds", 60.0)
            monkeypatch.setattr(boards, "_CLOSE_SECONDS", 60.0)
            tracker.close(failed=resumed)
            ids.append(tracker.run_id)
    assert not [text for text in said if "is off" in text or "did not end" in text]
    assert ids[0] == ids[1] != ids[2]
    found = READERS[name](folder, ids[0])
    if name == "mlflow":
        rows = {
            step: {metric_name(tag): value for tag, value in row.items()}
            for step, row in rows.items()
        }
    numbers = {
        step: {tag: float(row[tag]) for tag in rows[step]} for step, row in found.history.items()
    }
    assert str(numbers) == str(rows)
    assert found.sent == 3, "no step was sent twice"
    assert found.state == ("" if name == "trackio" else "failed")
    steps = found.config["training"]["steps"] if name == "trackio" else None
    assert int(steps or found.config["training.steps"]) == 3


def test_comet_leaves_the_hook_of_errors_and_torch_alone(tmp_path, monkeypatch):
    import torch

    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    hook, backward = sys.excepthook, torch.Tensor.backward
    open_tracker("comet", TrackedRun(tmp_path, {})).close()
    assert sys.excepthook is hook
    assert torch.Tensor.backward is backward


def test_a_service_that_fails_costs_one_warning(tmp_path, monkeypatch):
    broken = types.ModuleType("trackio")

    def refuse(**_):
        raise ConnectionError("no route to host")

    broken.init = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", broken)
    with listening() as said:
        tracker = open_tracker("trackio", TrackedRun(tmp_path, {}))
        for step in range(100):
            tracker.write(step, {"loss": 1.0})
        tracker.close()
    off = [text for text in said if "Trackio is off from here on" in text]
    assert len(off) == 1
    assert "ConnectionError: no route to host" in off[0]


class Hanging(BackgroundWriter):
    name = "a service"
    failed_seconds = 0.5

    def __init__(self, release: threading.Event) -> None:
        self.release = release
        super().__init__()

    def send(self, rows: Any) -> None:
        self.release.wait(600)


def test_the_limits_of_time_of_several_services_do_not_add_up():
    """The other ranks leave three seconds after a failure."""
    release = threading.Event()
    hanging = [Hanging(release) for _ in range(8)]
    began = time.monotonic()
    close_all(hanging, failed=True)
    seconds = time.monotonic() - began
    release.set()
    assert 0.5 <= seconds < 2.0, "eight times 0.5 s would be 4 s"


def test_names_are_taken_once():
    loaded = load(["--metrics.trackers", "mlflow", "wandb", "--metrics.enable_wandb"])
    assert loaded.sections.metrics.tracker_names == ["wandb", "mlflow"]
