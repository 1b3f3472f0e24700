"""The live view beside other writers, on terminals that stop or go away, in runs that are killed, under torchrun."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.metrics.terminal import Clock, Terminal, log_step, show, texts
from tests.tiny import TWO_LAYERS
from titanlite.metrics import live
from titanlite.metrics.console import console_handler, setup_console
from titanlite.metrics.live import LiveView, start_view
from titanlite.utils import logger

pytestmark = pytest.mark.usefixtures("clean_console")
ESCAPE = re.compile(r"\033")
ROOT = Path(__file__).resolve().parents[2]


def test_other_processes_may_write_to_the_terminal(terminal: Terminal) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    log_step(12)
    terminal.read()
    for n in range(3):
        os.write(terminal.end, f"[rank 1] WARNING: something {n}\n".encode())
        clock.now += 1
        view.tick(13 + n)
        terminal.read()
    rows = terminal.rows()
    assert rows[:4] == [
        "[rank 1] WARNING: something 0",
        "[rank 1] WARNING: something 1",
        "[rank 1] WARNING: something 2",
        "",
    ]
    assert len(rows) == 7 and rows[6].startswith("15/60 ")


def test_warnings_of_other_ranks_on_the_same_terminal_are_whole(terminal: Terminal) -> None:
    """Several lines between two drawings: none has an end of the table in it."""
    clock = Clock()
    view = show(terminal, clock=clock)
    for step in range(1, 9):
        log_step(step)
    clock.now += 1
    view.tick(9)
    handlers = logger.handlers[:]
    for rank in (1, 2, 3):
        setup_console(rank, stream=terminal.stream)  # takes rank 0's place, as that of a process of its own would
        guest = start_view(0, 60)
        assert guest is not None and not isinstance(guest, LiveView)
        guest.tick(3)
        logger.warning("no space")
        logger.info("not for the console")
        guest.close()
    logger.handlers[:] = handlers
    clock.now += 1
    view.tick(10)
    rows = texts(terminal.rows())
    assert rows[:4] == [f"[rank {rank}] WARNING: no space" for rank in (1, 2, 3)] + [""]
    assert rows[-1].startswith("10/60 ") and len(rows) == 4 + 1 + 8 + 1


def test_what_libraries_print_goes_above(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    error = os.fdopen(os.dup(terminal.end), "w", buffering=1)
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    monkeypatch.setattr(sys, "stderr", error)
    setup_console(0)
    view = start_view(0, 60)
    assert isinstance(view, LiveView)
    for step in range(1, 9):
        log_step(step)
    print("one\ntwo\nthree")
    print("four\nfive", file=sys.stderr)
    logger.info("ours")
    rows = texts(terminal.rows())
    assert rows[:7] == ["one", "two", "three", "four", "five", "ours", ""]
    for percent in (10, 20):
        error.write(f"\rreading: {percent}%")  # a progress bar of tqdm's kind, which knows nothing of the view
        error.flush()
        time.sleep(0.11)
        view.tick(9)
    rows = texts(terminal.rows())
    assert rows[6] == "reading: 20%" and terminal.screen.cursor.x == len("reading: 20%")
    assert rows[7].split()[0] == "step" and rows[-1].startswith("9/60 ") and len(rows) == 17
    view.close()
    assert sys.stdout is terminal.stream and sys.stderr is error
    error.close()


def test_a_terminal_that_is_gone_ends_the_view_and_nothing_else(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    terminal.hang_up()
    for step in range(1, 5):
        clock.now += 1
        log_step(step)
        view.tick(step)
    logger.info("into nothing")
    view.close()


def test_a_stopped_terminal_does_not_hold_the_training(terminal: Terminal) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    log_step(1)
    terminal.read()

    def train() -> None:
        for step in range(2, 20):
            clock.now += 1
            view.tick(step)

    with terminal.stopped():
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        thread.join(5)
        waits = thread.is_alive()
    assert not waits and terminal.rows()[-1].startswith("19/60 ")


@pytest.mark.parametrize("how", ["Ctrl-S", "asleep"])
def test_a_stopped_terminal_holds_up_no_line_and_no_end(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Log lines, prints and `close` go on; awake, the terminal shows all of it in order."""
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    clock = Clock()
    setup_console(0)
    handler = console_handler()
    assert handler is not None
    handler.view = view = LiveView(handler, 0, 60, clock)
    log_step(1)
    terminal.read()
    said, long = [f"line {n}" for n in range(1000)], "x" * 60  # together more than a terminal's buffer holds
    took: list[float] = []

    def train() -> None:
        began = time.perf_counter()
        for n, line in enumerate(said):
            if n % 2:
                print(line, long)
            else:
                logger.info(f"{line} {long}")
            clock.now += 1
            view.tick(2 + n // 20)
        log_step(52)
        view.close(0.2)
        logger.info("after")
        print("at last", flush=True)
        took.append(time.perf_counter() - began)

    with terminal.stopped(how):
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        thread.join(20)
    assert took and took[0] < 6
    deadline = time.monotonic() + 20
    while (rows := texts(terminal.rows()))[-1] != "at last" and time.monotonic() < deadline:
        pass
    assert rows[:1000] == [f"{line} {long}" for line in said]
    assert [row.split()[0] for row in rows[1002:1004]] == ["1", "52"] and rows[1004].startswith("52/60 ━")
    assert rows[1005:] == ["after", "at last"]


def test_of_too_much_for_a_stopped_terminal_the_oldest_goes(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_WAITING_BYTES", 3000)
    show(terminal)
    terminal.read()
    with terminal.stopped():
        for n in range(500):
            logger.info(f"line {n}")
    rows = texts(terminal.rows())
    (gap,) = [n for n, row in enumerate(rows) if "dropped" in row]
    first, last = rows[:gap], rows[gap + 1 : rows.index("", gap)]
    dropped = 500 - len(first) - len(last)
    assert rows[gap] == f"({dropped} lines dropped: the terminal took none)" and 50 < len(last) < 110
    assert first + last == [f"line {n}" for n in (*range(len(first)), *range(500 - len(last), 500))]


def test_a_step_waits_for_nobody_who_is_at_the_view(terminal: Terminal) -> None:
    clock = Clock()
    view = show(terminal, clock=clock)
    clock.now += 1
    thread = threading.Thread(target=view.tick, args=(7,), daemon=True)
    with view._pen._change:
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
    clock.now += 1
    view.tick(8)
    assert terminal.rows()[-1].startswith("8/60 ")


def test_a_stream_that_is_closed_under_the_view_harms_nothing(terminal: Terminal, tmp_path: Path) -> None:
    """Nor the file that gets its number."""
    setup_console(0, stream=(stream := os.fdopen(os.dup(terminal.end), "w")))
    number = stream.fileno()
    view = start_view(0, 60)
    assert isinstance(view, LiveView)
    stream.close()
    with open(tmp_path / "other", "wb") as file:
        assert file.fileno() == number
        time.sleep(0.11)
        view.tick(3)
        log_step(4)
        view.close()
    assert (tmp_path / "other").read_bytes() == b""


def test_a_descriptor_of_any_number_will_do(terminal: Terminal) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    try:
        os.dup2(terminal.end, 1050)
        with os.fdopen(1050, "w") as stream:
            setup_console(0, stream=stream)
            view = start_view(0, 60)
            assert isinstance(view, LiveView)
            time.sleep(0.11)
            view.tick(3)
            assert terminal.rows()[-1].startswith("3/60 ")
            view.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_error_of_the_drawing_costs_the_view_and_no_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = show(terminal)
    terminal.read()
    monkeypatch.setattr(live, "progress", lambda *_: 1 / 0)
    logger.info("one")
    logger.info("two")
    assert texts(terminal.rows()) == ["one", "two"]
    monkeypatch.undo()
    view.close()


def test_a_forked_child_leaves_the_view_alone(terminal: Terminal) -> None:
    show(terminal)
    log_step(1)
    terminal.read()
    handler = console_handler()
    assert handler is not None
    child = os.fork()
    if not child:
        handler.target().write("child\n")
        handler.target().flush()
        os._exit(0)
    os.waitpid(child, 0)
    assert terminal.read() == b"child\r\n"


KILLED = """
import os, sys, time
from tests.metrics.terminal import log_step
from titanlite.metrics.console import setup_console
from titanlite.utils import logger
from titanlite.metrics.live import start_view
setup_console(0)
logger.info("kept")
start_view(0, 60)
log_step(1)
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_a_clean_terminal(terminal: Terminal, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=ROOT, stdout=terminal.end, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert process.stderr is not None and process.stderr.readline() == b"ready\n"
    deadline = time.monotonic() + 20
    while not any("0/60" in row or "1/60" in row for row in terminal.rows()):
        assert time.monotonic() < deadline
    process.send_signal(number)
    assert process.wait(10) == -number
    while len(terminal.rows()) > 1 and time.monotonic() < deadline:
        pass
    assert texts(terminal.rows()) == ["kept"]
    process.stderr.close()


def test_a_run_that_is_killed_with_its_terminal_leaves_no_words_of_the_shell(terminal: Terminal) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, stdout=terminal.end, stderr=subprocess.PIPE)
    assert process.stderr is not None and process.stderr.readline() == b"ready\n"
    terminal.hang_up()
    process.kill()
    assert process.communicate(timeout=20)[1] == b""


TINY = [
    *TWO_LAYERS,
    "--training.batch_size=1",
    "--training.global_batch_size=8",
    "--training.steps=12",
    "--validation.freq=6",
    "--validation.steps=1",
    "--checkpoint.enable_checkpoint",
    "--metrics.log_freq=2",
]


def torchrun(terminal: Terminal, ranks: int, *flags: str) -> int:
    """Runs train.py with the terminal as its standard output and error; the exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    process = subprocess.Popen(
        [*launcher, "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "train.py", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=terminal.end,
        stderr=terminal.end,
    )
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        terminal.read(0.1)
    process.kill()
    return process.wait()


@pytest.mark.soak
def test_torchrun_on_a_terminal(tmp_path: Path) -> None:
    """Plain `torchrun train.py`: workers inherit the terminal, and rank 0 shows the view."""
    terminal = Terminal(250, 40)
    flags = ["--job.config_file=debug_model.toml", *TINY, f"--job.dump_folder={tmp_path}"]
    assert torchrun(terminal, 2, *flags) == 0
    rows = texts(terminal.rows())
    assert rows[-1] == "training done at step 12" and rows[-2].startswith("12/12 ━") and " took " in rows[-2]
    assert [int(row.split()[0]) for row in rows[-9:-2]] == [1, 2, 4, 6, 8, 10, 12]
    assert rows[-11] == "" and rows[-12].startswith("checkpoint of step 12 written to ")
    for kept in ("a fresh run", "validation at 6: loss", "validation at 12: loss", "model "):
        assert sum(row.startswith(kept) for row in rows) == 1, kept
    assert sum("12/12" in row for row in rows) == 1 and not any("loss:" in row for row in rows)
    assert terminal.sent.count(b"\0337") > 3, "it was shown while the run went on"
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in written if "loss" in row] == [1, 2, 4, 6, 8, 10, 12]
    shown = [row.split()[1] for row in rows[-9:-2]]
    assert shown == [f"{row['loss']:.4f}" for row in written if "loss" in row]
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
        assert not ESCAPE.search(log) and log.count("INFO step: ") == 7
    terminal.close()


@pytest.mark.soak
def test_a_run_that_fails_leaves_its_last_state_above_the_reason(tmp_path: Path) -> None:
    terminal = Terminal(120, 40)
    flags = ["--job.config_file=debug_model.toml", *TINY, f"--job.dump_folder={tmp_path}", "--optimizer.lr=1e30"]
    assert torchrun(terminal, 1, *flags) == 1
    rows = texts(terminal.rows())
    (view,) = [n for n, row in enumerate(rows) if "grad norm" in row]
    (reason,) = [n for n, row in enumerate(rows) if row.startswith("error: stopped: ")]
    assert rows[view - 1] == "" and rows[reason - 1].split("/")[1].startswith("12 ") and view < reason
    assert sum("━" in row or "─" in row for row in rows) == 1
    terminal.close()


@pytest.mark.soak
@pytest.mark.parametrize("flag", ["--no-metrics.enable_progress", "--metrics.log_style=fsdp"])
def test_lines_on_a_terminal_where_they_are_wanted(tmp_path: Path, flag: str) -> None:
    terminal = Terminal(200, 40)
    flags = ["--job.config_file=debug_model.toml", *TINY, f"--job.dump_folder={tmp_path}", flag]
    assert torchrun(terminal, 1, *flags) == 0
    rows = terminal.rows()
    pattern = r"I \[train.py:103\] Batch \d+ Loss" if "fsdp" in flag else r"step: +\d+  loss: "
    assert sum(bool(re.search(pattern, row)) for row in rows) == 7
    assert b"\0337" not in terminal.sent and b"\033[J" not in terminal.sent
    terminal.close()
