"""metrics.jsonl and TensorBoard: every row once, and their troubles are not the training's."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.whole_runs import scalars
from tests.support.words import listening
from titanlite.metrics.boards import TAGS, TensorBoard, tags
from titanlite.runs.metrics_jsonl import MetricsLog
from titanlite.runs.read_jsonl import read_metrics


def test_rows_are_valid_json_and_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"step": 1, "loss": 7.5, "note": "x"})
    log.write({"step": 2, "loss": math.nan, "norm": -math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert rows == [
        {"step": 1, "loss": 7.5, "note": "x"},
        {"step": 2, "loss": "nan", "norm": "-inf"},
    ]
    assert read_metrics(path) == rows


@pytest.mark.parametrize(
    ("before", "step", "after"),
    [
        (b'{"a": 1}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n', 1, b'{"a": 1}\n{"step": 1}\n'),
        (b'{"step": 1}\n{"step": 2', 5, b'{"step": 1}\n'),  # torn, even when no step is dropped
        (b'{"step": 1}', 1, b'{"step": 1}\n'),  # complete without its newline
    ],
)
def test_a_resumed_run_writes_no_step_twice_and_keeps_other_rows(tmp_path, before, step, after):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    log = MetricsLog(path)
    log.truncate_after(step)
    log.write({"step": 2})
    assert path.read_bytes() == after + b'{"step": 2}\n'
    log.truncate_after(1)  # in the middle of writing
    log.write({"step": 2})
    assert path.read_bytes() == after + b'{"step": 2}\n'
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_torn_last_line_is_passed_over_and_another_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2')
    assert read_metrics(path) == [{"step": 1}]
    path.write_bytes(b'{"step": 1}\nnonsense\n{"step": 2}\n')
    with listening() as said:
        assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    (line,) = said
    assert f"{path}:2: no JSON" in line


def test_a_full_disk_and_a_missing_folder_warn_once_and_never_raise(tmp_path):
    full = Path("/dev/full")
    gone = tmp_path / "gone" / "metrics.jsonl"
    with listening() as said:
        for path in (full, gone):
            log = MetricsLog(path)
            for step in range(5):
                log.write({"step": step})
        log.truncate_after(3)
        gone.parent.mkdir()
        log.write({"step": 5})
    first, second = said
    assert str(full) in first and "No space left" in first
    assert str(gone) in second
    assert read_metrics(gone) == [{"step": 5}], "writes go on when the folder is there again"


def test_rows_are_shown_under_the_tags_of_known_dashboards_which_the_docs_list():
    row = {
        "step": 1,
        "loss": 2.0,
        "time": 3.0,
        "validation_tokens": 4,
        "grad_norm": 5.0,
        "grad_norm/layers.7": 6.0,
    }
    assert tags(row) == {
        "loss_metrics/global_avg_loss": 2.0,
        "grad_norm": 5.0,
        "grad_norm/layers.7": 6.0,
    }
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE))
    assert TAGS.items() <= told.items()


def test_a_resumed_run_goes_on_in_its_folder_and_shows_no_step_twice(tmp_path):
    (tmp_path / "20200101-0000").mkdir()
    first = TensorBoard(tmp_path, purge_step=1)
    for step in range(1, 6):
        first.write(step, {"lr": 1.0, "mfu(%)": 40.0})
    first.close()
    second = TensorBoard(tmp_path, purge_step=4)
    for step in range(4, 8):
        second.write(step, {"lr": 2.0})
    second.close()
    assert second.folder == first.folder != tmp_path / "20200101-0000"
    assert time.strptime(first.folder.name, "%Y%m%d-%H%M")
    assert scalars(first.folder) == {
        "lr": [(s, 1.0 if s < 4 else 2.0) for s in range(1, 8)],
        "mfu(%)": [(s, 40.0) for s in (1, 2, 3)],
    }


@pytest.mark.parametrize("where", ["no package", "at a row", "at its end"])
def test_an_error_of_tensorboard_costs_one_warning(tmp_path, monkeypatch, where):
    from torch.utils.tensorboard import SummaryWriter

    def fail(*_):
        raise OSError("gone")

    if where == "no package":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    else:
        monkeypatch.setattr(SummaryWriter, "add_scalar" if where == "at a row" else "close", fail)
    with listening() as said:
        board = TensorBoard(tmp_path / "tb", purge_step=1)
        for step in range(3):
            board.write(step, {"lr": 1.0})
        board.close()
        board.close()
    (warning,) = said
    assert "TensorBoard" in warning
    assert "metrics.jsonl" in warning
