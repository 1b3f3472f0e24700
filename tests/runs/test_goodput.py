"""The share of a run's time that went into kept steps, from records made up to the second."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_folders import EPOCH, begin, end, training_row, write_metrics, written
from titanlite.runs.goodput import goodput_of
from titanlite.runs.read import read_run


def test_the_share_counts_kept_steps_alone(tmp_path: Path) -> None:
    """Step 6 to 10 of the first attempt are trained again by the second one, which is slower."""
    written(
        tmp_path,
        begin(1, 10, 30),
        end(1, 80, 10, "failed"),
        begin(2, 90, 100, step=5),
        end(2, 210, 15),
    )
    rows = [(5, 40, 2.0), (10, 60, 2.0), (10, 130, 3.5), (15, 180, 3.0)]
    write_metrics(
        tmp_path,
        [
            training_row(step, 4.0, time=EPOCH + at, seconds_per_step=seconds, data_seconds=0.5)
            for step, at, seconds in rows
        ],
    )
    assert goodput_of(read_run(tmp_path)) == pytest.approx(5 * (1.5 + 3 + 2.5) / 200)


def test_a_folder_without_attempts_or_rows_has_no_share(tmp_path: Path) -> None:
    write_metrics(tmp_path, [training_row(5, 4.0, seconds_per_step=2.0)])
    assert goodput_of(read_run(tmp_path)) is None
    written(tmp_path, begin(1, 10, 30), end(1, 80, 0, "failed"))
    (tmp_path / "metrics.jsonl").unlink()
    assert goodput_of(read_run(tmp_path)) == 0
