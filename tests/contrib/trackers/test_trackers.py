"""MLflow, Comet and Trackio get the numbers, each through its real client in a local folder."""

from __future__ import annotations

import importlib.util
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
from titanlite.config.checks import missing_packages
from titanlite.config.load import load
from titanlite.contrib.trackers.mlflow import metric_name
from titanlite.metrics import boards
from titanlite.metrics.boards import BackgroundWriter, close_all
from titanlite.metrics.trackers import TrackedRun, Tracker

NAMES = ["mlflow", "comet", "trackio"]
#: Where each service writes below a folder, without a network.
LOCAL: dict[str, Callable[[Path], dict[str, str]]] = {
    "mlflow": lambda folder: {
        "MLFLOW_TRACKING_URI": f"file:{folder / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    },
    "comet": lambda folder: {"COMET_OFFLINE_DIRECTORY": str(folder / "comet")},
    "trackio": lambda folder: {"TRACKIO_DIR": str(folder / "trackio")},
}


def open_trackers(names: list[str], run: TrackedRun) -> list[Tracker]:
    return [doors.load(doors.OURS["trackers"][name])(run) for name in names]


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
    name: str = ""


def read_mlflow(folder: Path, run_id: str) -> Tracked:
    """Read MLflow's folder by the layout of its files, not by its client."""
    (run,) = (folder / "mlruns").glob(f"*/{run_id}")
    found = Tracked({}, {}, 0)
    for path in (run / "metrics").rglob("*"):
        if path.is_dir():
            continue
        name = path.relative_to(run / "metrics").as_posix()
        for line in path.read_text().splitlines():
            _, value, step, *_ = line.split()
            found.history.setdefault(int(step), {})[name] = float(value)
            found.sent += name == "loss_metrics/global_avg_loss"
    for path in (run / "params").iterdir():
        found.config[path.name] = path.read_text()
    lines = (run / "meta.yaml").read_text().splitlines()
    meta = dict(line.split(": ", 1) for line in lines if ": " in line)
    found.state = {"3": "done", "4": "failed", "1": "running"}[meta["status"]]
    found.name = meta["run_name"]
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
                found.sent += metric["metricName"] == "loss_metrics/global_avg_loss"
            elif message["type"] == "parameter_msg":
                # "params" is a parameter that is a list.
                parameter = payload.get("param") or payload["params"]
                found.config[parameter["paramName"]] = parameter["paramValue"]
            elif message["type"] == "log_other" and payload["key"] == "state":
                found.state = payload["value"]
            elif message["type"] == "log_other" and payload["key"] == "Name":
                found.name = payload["value"]
    return found


def read_trackio(folder: Path, run_id: str) -> Tracked:
    """Read Trackio's database."""
    database = sqlite3.connect(folder / "trackio" / "titanlite.db")
    found = Tracked({}, {}, 0, name=run_id)
    of_run = "where run_name = ? order by id"
    query = f"select step, metrics, run_id from metrics {of_run}"
    ids = set()
    for step, values, own_id in database.execute(query, [run_id]):
        row = json.loads(values)
        found.history.setdefault(step, {}).update(row)
        found.sent += "loss_metrics/global_avg_loss" in row
        ids.add(own_id)
    assert len(ids) == 1, "a resumed run is the same run"
    (config,) = database.execute(f"select config from configs {of_run}", [run_id]).fetchone()
    found.config = json.loads(config)
    return found


READERS = {"mlflow": read_mlflow, "comet": read_comet, "trackio": read_trackio}


LOSS = "loss_metrics/global_avg_loss"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_service_holds_each_row_once_and_a_resumed_run_continues_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
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
            (tracker,) = open_trackers([name], TrackedRun(folder, config, "words", resumed=resumed))
            for step in steps:
                tracker.write(step, rows[step])
            # A busy machine may need more than the second that a failed run leaves.
            monkeypatch.setattr(type(tracker), "failed_seconds", 60.0)
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
    assert found.name.startswith("my run")
    steps = found.config["training"]["steps"] if name == "trackio" else None
    assert int(steps or found.config["training.steps"]) == 3


def test_names_for_mlflow_are_allowed_and_stay_different() -> None:
    names = [metric_name(tag) for tag in boards.TAGS.values()]
    assert len(set(names)) == len(names)
    from mlflow.utils.validation import _validate_metric_name

    for name in names:
        _validate_metric_name(name)


def test_comet_leaves_the_hook_of_errors_and_torch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    hook, backward = sys.excepthook, torch.Tensor.backward
    open_trackers(["comet"], TrackedRun(tmp_path, {}))[0].close()
    assert sys.excepthook is hook
    assert torch.Tensor.backward is backward


def test_a_service_that_fails_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = types.ModuleType("trackio")

    def refuse(**_: Any) -> None:
        raise ConnectionError("no route to host")

    broken.init = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", broken)
    with listening() as said:
        (tracker,) = open_trackers(["trackio"], TrackedRun(tmp_path, {}))
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


def test_the_limits_of_time_of_several_services_do_not_add_up() -> None:
    """The other ranks leave three seconds after a failure."""
    release = threading.Event()
    hanging = [Hanging(release) for _ in range(8)]
    began = time.monotonic()
    close_all(hanging, failed=True)
    seconds = time.monotonic() - began
    release.set()
    assert 0.5 <= seconds < 2.0, "eight times 0.5 s would be 4 s"


def test_names_are_taken_once_and_an_unknown_one_is_refused() -> None:
    loaded = load(["--metrics.trackers", "mlflow", "wandb", "--metrics.enable_wandb"])
    assert loaded.sections.metrics.tracker_names == ["wandb", "mlflow"]
    with pytest.raises(Exception, match=r"metrics\.trackers.*mlfow|mlfow.*mlflow"):
        load(["--metrics.trackers", "mlfow"])


def test_without_the_package_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "comet_ml" else real(n, *a)
    )
    (problem,) = missing_packages(load(["--metrics.trackers", "comet"]))
    assert "metrics.trackers" in str(problem)
    assert problem.remedy == "pip install 'titanlite[comet]', or leave the key out"
