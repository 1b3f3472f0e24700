from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from titanlite.config.load import load_file
from titanlite.config.plans import ObservePlan, Plans, TrainPlan
from titanlite.config.resolve import resolve
from titanlite.models.shapes import SHAPES
from titanlite.observe.console import colorize, console_handler, setup_console
from titanlite.observe.observer import Observer
from titanlite.observe.report import start_report
from titanlite.observe.stepline import StepFigures, fsdp_line, titan_line
from titanlite.parallel.world import World
from titanlite.prepare import load_plans
from titanlite.runs.logs import rank_log
from titanlite.tools import cli
from titanlite.utils import Table, human_bytes, human_count, human_time, logger, render

FIGURES = StepFigures(
    step=1990,
    loss=3.437,
    norm=1.23456,
    lr=3e-4,
    memory_gib=68.57,
    memory_percent=86.69,
    tps=6785.2,
    mfu=39.73,
    tokens_seen=12_345_678,
    seconds_left=5025.4,
    samples_per_second=9.41,
)
ANSI = re.compile(r"\033\[\d+m")


@pytest.fixture
def console() -> Iterator[logging.Logger]:
    """The logger, put back afterwards."""
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


def test_step_line_begins_as_other_tools_read_it() -> None:
    known = "step: 1990  loss:  3.4370  memory: 68.57GiB(86.69%)  tps: 6,785  mfu: 39.73%"
    assert titan_line(FIGURES) == f"{known}  grad_norm: 1.2346  lr: 3.00e-04  tokens: 12.3M  left: 1:23:45"


def test_step_line_without_what_is_unknown() -> None:
    line = titan_line(replace(FIGURES, step=1, memory_gib=0.5, memory_percent=None, mfu=None, seconds_left=None))
    assert (
        line == "step:  1  loss:  3.4370  memory:  0.50GiB  tps: 6,785  grad_norm: 1.2346  lr: 3.00e-04  tokens: 12.3M"
    )


def test_fsdp_line_is_the_published_one_and_found_by_hyperpods_monitors() -> None:
    figures = replace(FIGURES, step=90, loss=7.24291, lr=1e-5)
    line = fsdp_line(figures, datetime(2025, 6, 20, 14, 17, 10))
    assert line == (
        "2025-06-20 14:17:10 I [train.py:103] Batch 90 Loss: 7.24291, Speed: 9.41 samples/sec, lr: 0.000010"
    )
    assert re.match(r".*Loss:.*", line)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (3.21, "3.2s"), (59.97, "0:01:00"), (5025.4, "1:23:45"), (3599.6, "1:00:00"), (4e5, "111:06:40")],
)
def test_human_time(seconds: float, text: str) -> None:
    assert human_time(seconds) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(999, "999"), (1000, "1.0K"), (12_345_678, "12.3M"), (999_960, "1.0M"), (8_030_261_248, "8.0B"), (15e12, "15.0T")],
)
def test_human_count(n: float, text: str) -> None:
    assert human_count(n) == text


@pytest.mark.parametrize(
    ("n", "text"), [(512, "512 B"), (1536, "1.5 KiB"), (80 * 1024**3, "80.0 GiB"), (1024**4, "1.0 TiB")]
)
def test_human_bytes(n: float, text: str) -> None:
    assert human_bytes(n) == text


def test_log_lines_carry_local_time_and_only_problems_their_level(console: logging.Logger) -> None:
    out = io.StringIO()
    setup_console(0, stream=out)
    console.debug("quiet")
    console.info("hello")
    console.warning("disk full")
    stamps, texts = zip(*((line[:19], line[20:]) for line in out.getvalue().splitlines()), strict=True)
    assert texts == ("hello", "WARNING: disk full")
    assert abs((datetime.now() - datetime.strptime(stamps[0], "%Y-%m-%d %H:%M:%S")).total_seconds()) < 60


def test_other_ranks_only_warn_and_say_who_they_are(console: logging.Logger) -> None:
    out = io.StringIO()
    setup_console(3, stream=out)
    console.info("quiet")
    console.error("disk full")
    assert [line[20:] for line in out.getvalue().splitlines()] == ["[rank 3] ERROR: disk full"]


def test_a_second_set_up_replaces_the_first_and_nothing_is_printed_twice(console: logging.Logger) -> None:
    out, first, root = io.StringIO(), io.StringIO(), io.StringIO()
    elsewhere = logging.StreamHandler(root)
    logging.getLogger().addHandler(elsewhere)
    try:
        setup_console(0, stream=first)
        setup_console(0, stream=out)
        console.info("once")
    finally:
        logging.getLogger().removeHandler(elsewhere)
    assert out.getvalue().count("once") == 1
    assert first.getvalue() == root.getvalue() == ""


def test_the_console_follows_a_replaced_standard_output(
    console: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_console(0)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    console.info("here")
    assert out.getvalue().endswith(" here\n")


def test_an_error_of_the_view_does_not_reach_the_training(
    console: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def add(self, figures: StepFigures, line: str) -> None:
            raise ValueError("no such terminal")

    setup_console(0, stream=io.StringIO())
    handler = console_handler()
    assert handler is not None
    handler.view = Broken()  # type: ignore[assignment]
    console.info("step", extra={"figures": FIGURES})
    assert "ValueError: no such terminal" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("color", "stream", "colored"),
    [
        (None, io.StringIO(), False),
        (None, Terminal(), True),
        (True, io.StringIO(), True),
        (False, Terminal(), False),
    ],
)
def test_colours_only_where_wanted(
    console: logging.Logger, color: bool | None, stream: io.StringIO, colored: bool
) -> None:
    setup_console(0, color, stream)
    line = titan_line(FIGURES)
    painted = colorize(line)
    assert ("\033[32mloss:  3.4370\033[0m" in painted) is colored
    assert len(ANSI.findall(painted)) == (18 if colored else 0)  # nine fields, on and off
    assert ANSI.sub("", painted) == line
    console.warning("careful")
    assert bool(ANSI.search(stream.getvalue())) is colored


#: A title of the terminal, red to the end, a line gone, the C1 form of an escape; then what may stay.
HOSTILE = "a\x1b]0;owned\x07b\x1b[31mc\rd\x9b2Je\x7f\tf\r\ng é"
HARMLESS = "a\\x1b]0;owned\\x07b\\x1b[31mc\\x0dd\\x9b2Je\\x7f\tf\r\ng é"


@pytest.mark.parametrize("color", [True, False])
def test_the_log_holds_no_control_characters_but_our_colours(
    console: logging.Logger, tmp_path: Path, color: bool
) -> None:
    stream = io.StringIO()
    setup_console(0, color, stream)
    with rank_log(tmp_path, 0):
        console.info(f"reading {HOSTILE}")
        console.error(HOSTILE)
        console.info(colorize(titan_line(FIGURES)), extra={"figures": FIGURES})
    shown = stream.getvalue()
    painted = f"\033[31mERROR: {HARMLESS}\033[0m" if color else f"ERROR: {HARMLESS}"
    assert f"reading {HARMLESS}\n" in shown and f"{painted}\n" in shown
    assert len(ANSI.findall(shown)) == (20 if color else 0), "the error's and the nine fields', on and off"
    log = (tmp_path / "logs" / "rank_0.log").read_bytes().decode()
    assert HARMLESS.replace("\\x1b[31m", "") in log and titan_line(FIGURES) in log and "\x1b" not in log


def test_commands_show_foreign_names_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal in (True, False):
        drawn = render(Table((HOSTILE, "state"), [("x\x1b[2Jy", "done")], title="t\x07"), terminal)
        assert "x\\x1b[2Jy" in drawn and "a\\x1b]0;owned\\x07b" in drawn and "t\\x07" in drawn
        assert not re.search(r"\x1b(?!\[[0-9;]*m)|\x07", drawn)
    file = tmp_path / "a\x1b]0;owned\x07.toml"
    assert cli.main(["checkpoint", "inspect", str(file)]) == 4
    told = capsys.readouterr().err
    assert "a\\x1b]0;owned\\x07.toml" in told and "\x1b" not in told
    file.write_text("")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert cli.main(["config", "check", str(file)]) == 0
    assert isinstance(sys.stdout, Terminal)
    shown = sys.stdout.getvalue()
    assert "a\\x1b]0;owned\\x07.toml" in shown and "\x1b]" not in shown
    assert "\x1b[" in shown, "our colours stay"


@pytest.mark.parametrize("color", [None, True])
def test_a_dumb_terminal_gets_no_escape_codes(
    console: logging.Logger, monkeypatch: pytest.MonkeyPatch, color: bool | None
) -> None:
    """Not with FORCE_COLOR and metrics.enable_color_printing either."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = Terminal()
    setup_console(0, color, out)
    console.warning("careful")
    console.info(colorize(titan_line(FIGURES)))
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["config", "explain", "train_configs/debug_model.toml"]) == 0
    assert "careful" in out.getvalue() and "training.steps" in out.getvalue() and "\033" not in out.getvalue()


def report(plans: Plans, device: str = "CPU (some model)", peak_flops: float | None = None) -> list[str]:
    return start_report(
        plans,
        parameters={"tok_embeddings": 1000, "layers": 5000, "norm": 10, "output": 1000},
        flops_per_token=42_000_000,
        device=device,
        world_size=2,
        versions={"torch": "2.13.0"},
        tokenizer="bundled",
        documents=7,
        tokens_per_epoch=163_840,
        memory_bytes=2 * 1024**3,
        peak_flops=peak_flops,
        folders={"metrics": "out/metrics.jsonl"},
    )


def test_the_report_states_the_derived_numbers() -> None:
    plans = Plans(observe=ObservePlan(description="a try"), notes=("because",), warnings=("careful",))
    lines = report(plans)
    text = "\n".join(lines)
    assert lines[0].endswith("  a try")
    assert "7,010 parameters (7.0K)" in text
    assert "tok_embeddings 1,000, layers 5,000, norm 10, output 1,000" in text
    assert "16,384 = 8 sequences x 2,048 tokens" in text
    assert "10,000 steps, 163,840,000 tokens = 1e+03 epochs" in text
    assert "2 x CPU (some model), 2.0 GiB" in text and "dp_replicate 1 x dp_shard 1 = 1 rank\n" in text
    assert "out/metrics.jsonl" in text
    assert lines[-2:] == ["note: because", "warning: careful"]
    column = lines[1].index("torch 2.13.0")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines[:-2])


def test_the_report_says_nothing_twice() -> None:
    plans = resolve(load_file("train_configs/debug_model.toml"), world_size=2, shapes=SHAPES)
    lines = report(plans)
    assert len(lines) <= 25
    for said in ("tokens per step", "global batch", "data_parallel_shard", "accumulation"):
        assert any(note.startswith(said) for note in plans.notes) or said == "accumulation"
        assert not any(line.startswith(f"note: {said}") for line in lines)
    assert "8 sequences = 4 per micro-batch x 1 micro-batch x 2 data-parallel ranks" in "\n".join(lines)


def test_the_report_is_wrapped_between_words_and_its_warnings_have_their_level(
    console: logging.Logger, tmp_path: Path
) -> None:
    """In 80 columns on a terminal; whole in a pipe, and with the level in the log of the rank."""
    lines = [*report(Plans(warnings=("some " * 20 + "word",))), "resumed from /a/folder/" + "of/long/names/" * 5]
    plan = ObservePlan(dump_folder=str(tmp_path), progress=False)
    world = World(0, 0, 1, torch.device("cpu"))
    pipe, out = io.StringIO(), Terminal()
    observer = Observer(Plans(observe=plan), world, replace(SHAPES["llama3"]["debugmodel"], vocab_size=512))
    setup_console(0, stream=pipe)
    observer.start(0, lines)
    assert [line[20:] for line in pipe.getvalue().splitlines()] == [
        line.replace("warning:", "WARNING:") for line in lines
    ]
    setup_console(0, False, out)
    with rank_log(tmp_path, 0):
        observer.start(0, lines)
    observer.close()
    shown = out.getvalue().splitlines()
    assert all(len(line) <= 80 for line in shown if "/long/" not in line) and len(shown) > len(lines)
    assert [word for line in shown for word in line[20:].split()] == " ".join(lines).replace(
        "warning:", "WARNING:"
    ).split()
    (first,) = [n for n, line in enumerate(shown) if line[20:].startswith("checkpoints")]
    column = len(lines[0]) - len(lines[0].split("  ", 1)[1].lstrip())
    assert shown[first + 1][: 20 + column].isspace() and shown[first + 1][20 + column] != " ", "below the text"
    written = (tmp_path / "logs" / "rank_0.log").read_text()
    for line in lines:
        level, text = ("WARNING", line[9:]) if line.startswith("warning: ") else ("INFO", line)
        assert f" {level} {text}\n" in written


def test_one_of_a_kind_is_told_in_the_singular() -> None:
    flags = ["--training.steps=1", "--training.batch_size=1", "--training.warmup_steps=1", "--validation.steps=1"]
    flags += ["--validation.freq=1", "--checkpoint.enable_checkpoint", "--checkpoint.interval=1"]
    plans = load_plans("debug_model.toml", 1, [*flags, "--validation.enable", "--training.global_batch_size=1"])
    text = "\n".join([*report(plans), *plans.notes])
    for said in (
        "every 1 step and at the end, 1 batch of",
        "1 sequence = 1 per micro-batch x 1 micro-batch x 1 data-pa",
    ):
        assert said in text
    assert not re.search(r"(?<![\d.,])1 [a-z-]+(?<!s)s\b", text)


def test_a_run_counted_in_epochs_says_so_before_its_text_is_counted() -> None:
    plans = Plans(train=TrainPlan(steps=None))
    plans = replace(plans, data=replace(plans.data, epochs=3))
    assert any(line.startswith("length") and line.endswith("3 epochs") for line in report(plans))


def test_only_an_unknown_accelerator_needs_a_peak() -> None:
    assert "metrics.peak_tflops" in report(Plans(), device="NVIDIA L40S")[-1]
    for lines in (report(Plans()), report(Plans(), device="NVIDIA H200", peak_flops=989e12)):
        assert not any("metrics.peak_tflops" in line for line in lines)
    assert any("989 TFLOPS" in line for line in report(Plans(), device="NVIDIA H200", peak_flops=989e12))
