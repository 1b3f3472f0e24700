from __future__ import annotations

import builtins
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titanlite.metrics import tensorboard
from titanlite.metrics.jsonl import MetricsLog, read_metrics
from titanlite.metrics.tensorboard import TAGS, TensorBoard, tags
from titanlite.utils import logger


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Messages of the `titanlite` logger from WARNING up."""
    import logging

    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_rows_are_valid_json_and_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"step": 1, "loss": 7.5, "note": "x"})
    log.write({"step": 2, "loss": math.nan, "norm": math.inf, "low": -math.inf})
    text = path.read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert rows == [
        {"step": 1, "loss": 7.5, "note": "x"},
        {"step": 2, "loss": "nan", "norm": "inf", "low": "-inf"},
    ]
    assert read_metrics(path) == rows
    log.close()


def test_a_resumed_run_writes_no_step_twice_and_keeps_other_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"run": "first"})
    for step in range(1, 16):
        log.write({"step": step, "loss": 1.0})
    log.close()
    with open(path, "ab") as file:
        file.write(b'{"step": 16, "lo')
    log = MetricsLog(path)
    log.truncate_after(10)
    for step in range(11, 21):
        log.write({"step": step, "loss": 2.0})
    log.close()
    first, *rows = read_metrics(path)
    assert first == {"run": "first"}
    assert [(row["step"], row["loss"]) for row in rows] == [(s, 1.0 if s <= 10 else 2.0) for s in range(1, 21)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_truncation_in_the_middle_of_writing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write({"step": step})
    log.truncate_after(1)
    log.write({"step": 2})
    log.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_torn_last_line_is_dropped_even_when_no_step_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2')
    assert read_metrics(path) == [{"step": 1}]
    log = MetricsLog(path)
    log.truncate_after(5)
    log.write({"step": 2})
    log.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_complete_last_row_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}')
    log = MetricsLog(path)
    log.truncate_after(1)
    log.write({"step": 2})
    log.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_a_broken_line_elsewhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a JSON object"):
        read_metrics(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_warns_once_and_never_raises(tmp_path: Path, warnings: list[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    log = MetricsLog(path)
    for step in range(5):
        log.write({"step": step})
    log.close()
    assert len(warnings) == 1 and str(path) in warnings[0] and "No space left" in warnings[0]


def test_writes_go_on_when_the_folder_is_there_again(tmp_path: Path, warnings: list[str]) -> None:
    log = MetricsLog(tmp_path / "gone" / "metrics.jsonl")
    log.truncate_after(3)
    log.write({"step": 1})
    (tmp_path / "gone").mkdir()
    log.write({"step": 2})
    log.close()
    assert len(warnings) == 1 and read_metrics(log.path) == [{"step": 2}]


def test_a_disk_that_fills_up_tears_no_row(tmp_path: Path) -> None:
    # RLIMIT_FSIZE in a process of its own: it cannot be raised again.
    script = f"""
import resource, signal
from pathlib import Path
from titanlite.metrics.console import setup_console
from titanlite.metrics.jsonl import MetricsLog
setup_console(0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
log = MetricsLog(Path({str(tmp_path / "m.jsonl")!r}))
for step in range(1, 21):
    log.write({{"step": step}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING") == 1 and "m.jsonl" in done.stdout
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == list(range(1, 9))
    assert (tmp_path / "m.jsonl").read_bytes().endswith(b"\n")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_tags_are_those_of_known_dashboards(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, purge_step=1)
    board.write(3, {tag: float(value) for value, tag in enumerate(TAGS.values())})
    board.close()
    (dated,) = tmp_path.iterdir()
    assert dated == board.folder and time.strptime(dated.name, "%Y%m%d-%H%M")
    found = scalars(dated)
    assert found == {tag: [(3, float(value))] for value, tag in enumerate(TAGS.values())}
    assert {
        "loss_metrics/global_avg_loss",
        "loss_metrics/global_max_loss",
        "grad_norm",
        "lr",
        "n_tokens_seen",
        "throughput(tps)",
        "tflops",
        "mfu(%)",
        "time_metrics/end_to_end(s)",
        "time_metrics/data_loading(s)",
        "time_metrics/data_loading(%)",
        "memory/max_active(GiB)",
        "memory/max_active(%)",
        "memory/max_reserved(GiB)",
        "memory/max_reserved(%)",
        "memory/num_alloc_retries",
        "memory/num_ooms",
    } <= set(found)


def test_rows_are_shown_under_their_tags_and_the_rest_is_left_out() -> None:
    row = {"step": 1, "loss": 2.0, "time": 3.0, "validation_tokens": 4, "grad_norm": 5.0, "grad_norm/layers.7": 6.0}
    assert tags(row) == {"loss_metrics/global_avg_loss": 2.0, "grad_norm": 5.0, "grad_norm/layers.7": 6.0}


def test_every_figure_is_in_the_docs_with_its_tag() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split(" | ")] for line in page.splitlines() if line.startswith("| `")]
    told = {key.strip("| `"): tag.strip("`") for key, tag, *_ in rows}
    assert {key: told.get(key) for key in TAGS} == dict(TAGS)


def test_a_resumed_run_goes_on_in_its_folder_and_shows_no_step_twice(tmp_path: Path) -> None:
    (tmp_path / "20200101-0000").mkdir()
    first = TensorBoard(tmp_path, purge_step=1)
    for step in range(1, 6):
        first.write(step, {"lr": 1.0})
    first.close()
    second = TensorBoard(tmp_path, purge_step=4)
    for step in range(4, 8):
        second.write(step, {"lr": 2.0})
    second.close()
    assert second.folder == first.folder
    assert scalars(first.folder) == {"lr": [(s, 1.0 if s < 4 else 2.0) for s in range(1, 8)]}


class Broken:
    def add_scalar(self, *_: Any) -> None:
        raise OSError("gone")

    def close(self) -> None:
        raise OSError("gone")


def test_a_back_end_that_raises_is_off_after_one_warning(tmp_path: Path, warnings: list[str]) -> None:
    board = TensorBoard(tmp_path, purge_step=1)
    board._writer.close()
    board._writer = Broken()
    for step in range(3):
        board.write(step, {"lr": 1.0})
    board.close()
    assert len(warnings) == 1 and warnings[0].endswith("OSError: gone")
    board._writer = Broken()
    board.close()
    assert len(warnings) == 2


def test_a_back_end_that_hangs_stops_neither_writing_nor_closing(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    monkeypatch.setattr(tensorboard, "_CLOSE_SECONDS", 0.1)
    board = TensorBoard(tmp_path, purge_step=1)
    release = threading.Event()
    monkeypatch.setattr(RecordWriter, "write", lambda *_: release.wait(60))
    started = time.perf_counter()
    for step in range(200):
        board.write(step, {"lr": 1.0, "loss": 2.0})
    board.close()
    assert time.perf_counter() - started < 10
    release.set()
    assert len(warnings) == 1 and "not closed within" in warnings[0]


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "tb").write_text("a file")
    board = TensorBoard(tmp_path / "tb", purge_step=2)
    board.write(1, {"lr": 1.0})
    board.close()
    assert len(warnings) == 1 and "TensorBoard is off" in warnings[0]


def test_a_missing_back_end_costs_one_warning(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError("no tensorboard here")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", absent)
    board = TensorBoard(tmp_path, purge_step=1)
    board.write(1, {"lr": 1.0})
    board.close()
    assert len(warnings) == 1 and "no tensorboard here" in warnings[0]
