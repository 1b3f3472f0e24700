"""The step lines, and the log on standard output."""

from __future__ import annotations

import io
import re
from datetime import datetime

import pytest

from tests.support.processes import python
from titanlite.cli import main as cli
from titanlite.metrics.aws_fsdp_lines import aws_fsdp_line, aws_fsdp_step
from titanlite.metrics.console import setup_console
from titanlite.metrics.step_line import titan_line
from titanlite.runs.rank_logs import rank_log
from titanlite.runs.text_tables import Table, render
from titanlite.utils import logger

FIGURES = {
    "step": 1990,
    "loss": 3.437,
    "grad_norm": 1.23456,
    "lr": 3e-4,
    "tps": 6785.2,
    "mfu": 39.73,
    "reserved_gib": 68.57,
    "reserved_percent": 86.69,
    "memory_gib": 60.0,
    "memory_percent": 75.0,
    "tokens_seen": 12_345_678,
    "seconds_left": 5025.4,
    "samples_per_second": 9.41,
    "waits_percent": 5.0,
}
ANSI = re.compile(r"\033\[\d+m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_step_lines_are_those_that_other_tools_read():
    known = "step: 1990  loss:  3.4370  memory: 68.57GiB(86.69%)  tps: 6,785  mfu: 39.73%"
    assert (
        titan_line(FIGURES)
        == f"{known}  grad_norm: 1.2346  lr: 3.00e-04  tokens: 12.3M  left: 1:23:45"
    )
    cpu = ("step", "loss", "grad_norm", "lr", "tps", "tokens_seen", "memory_gib", "memory_percent")
    first = {**{name: FIGURES[name] for name in cpu}, "step": 1, "waits_percent": 12.3}
    short = "step:  1  loss:  3.4370  memory: 60.00GiB(75.00%)  tps: 6,785"
    assert (
        titan_line(first) == f"{short}  grad_norm: 1.2346  lr: 3.00e-04  tokens: 12.3M  data: 12%"
    )
    figures = {**FIGURES, "step": 90, "loss": 7.24291, "lr": 1e-5}
    assert aws_fsdp_line(103, aws_fsdp_step(figures), datetime(2025, 6, 20, 14, 17, 10)) == (
        "2025-06-20 14:17:10 I [train.py:103] Batch 90 Loss: 7.24291, Speed: 9.41 samples/sec, "
        "lr: 0.000010"
    )


@pytest.mark.parametrize(
    ("rank", "shown"), [(0, ["hello", "WARNING: disk full"]), (3, ["[rank 3] WARNING: disk full"])]
)
def test_lines_carry_local_time_problems_their_level_and_other_ranks_their_number(rank, shown):
    out = io.StringIO()
    setup_console(rank, stream=out)
    logger.debug("quiet")
    logger.info("hello")
    logger.warning("disk full")
    lines = out.getvalue().splitlines()
    assert [line[20:] for line in lines] == shown
    began = datetime.strptime(lines[0][:19], "%Y-%m-%d %H:%M:%S")
    assert abs((datetime.now() - began).total_seconds()) < 60


@pytest.mark.parametrize(
    ("color", "terminal", "variables", "colored"),
    [
        (None, True, {}, True),
        (None, False, {"FORCE_COLOR": "1"}, True),
        (None, True, {"NO_COLOR": "1"}, False),
        (True, False, {}, True),
        (True, True, {"TERM": "dumb"}, False),
        (False, True, {}, False),
    ],
)
def test_colours_only_where_wanted(monkeypatch, color, terminal, variables, colored):
    for name, value in {"NO_COLOR": "", "FORCE_COLOR": "", "TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    stream = Terminal() if terminal else io.StringIO()
    setup_console(0, color, stream)
    line = titan_line(FIGURES)
    logger.info(line, extra={"figures": FIGURES})
    painted = stream.getvalue()[20:-1]
    assert ("\033[32mloss:  3.4370\033[0m" in painted) is colored
    assert len(ANSI.findall(painted)) == (18 if colored else 0)  # nine fields, on and off
    assert ANSI.sub("", painted) == line
    logger.warning("careful")
    assert ("\033[33mWARNING: careful" in stream.getvalue()) is colored


#: A title of the terminal, red to the end, a line gone, the C1 form of an escape; then what may
#: stay.
HOSTILE = "a\x1b]0;owned\x07b\x1b[31mc\rd\x9b2Je\x7f\tf\r\ng é"
HARMLESS = "a\\x1b]0;owned\\x07b\\x1b[31mc\\x0dd\\x9b2Je\\x7f\tf\r\ng é"


@pytest.mark.parametrize("color", [True, False])
def test_the_log_holds_no_control_characters_but_our_colours(tmp_path, color):
    stream = io.StringIO()
    setup_console(0, color, stream)
    with rank_log(tmp_path, 0):
        logger.info(f"reading {HOSTILE}")
        logger.error(HOSTILE)
        logger.info(titan_line(FIGURES), extra={"figures": FIGURES})
    shown = stream.getvalue()
    painted = f"\033[31mERROR: {HARMLESS}\033[0m" if color else f"ERROR: {HARMLESS}"
    assert f"reading {HARMLESS}\n" in shown
    assert f"{painted}\n" in shown
    assert len(ANSI.findall(shown)) == (20 if color else 0), (
        "the error's and the nine fields', on and off"
    )
    log = (tmp_path / "logs" / "rank_0.log").read_bytes().decode()
    assert HARMLESS.replace("\\x1b[31m", "") in log
    assert titan_line(FIGURES) in log
    assert "\x1b" not in log


def test_commands_show_foreign_names_without_control_characters(tmp_path, capsys):
    for terminal in (True, False):
        drawn = render(Table((HOSTILE, "state"), [("x\x1b[2Jy", "done")], title="t\x07"), terminal)
        assert "x\\x1b[2Jy" in drawn
        assert "a\\x1b]0;owned\\x07b" in drawn
        assert "t\\x07" in drawn
        assert not re.search(r"\x1b(?!\[[0-9;]*m)|\x07", drawn)
    file = tmp_path / "a\x1b]0;owned\x07.toml"
    assert cli.main(["checkpoint", "ls", str(file)]) == 4
    told = capsys.readouterr().err
    assert "a\\x1b]0;owned\\x07.toml" in told
    assert "\x1b" not in told


LIBRARY = """
import logging, sys, types
{before}
from titanlite import DistEnv, Trainer, build, load_config
with DistEnv.open() as world:
    flags = ["--training.steps=2", "--training.seq_len=32", "--training.batch_size=1"]
    flags += ["--metrics.log_freq=1", "--model.overrides.n_layers=1", "--model.overrides.dim=64"]
    flags += ["--job.dump_folder={folder}", "--no-validation.enable"]
    Trainer(build(load_config("debug_model.toml", world.size, flags), world)).train()
"""
#: What a notebook's server may have done: a handler for warnings, and its own module.
NOTEBOOK = "logging.basicConfig(); sys.modules['ipykernel'] = types.ModuleType('ipykernel')"
QUIET = "logging.getLogger('titanlite').setLevel(logging.ERROR)"


@pytest.mark.slow
@pytest.mark.parametrize(("before", "shown"), [(NOTEBOOK, True), (QUIET, False)])
def test_rows_appear_in_scripts_and_notebooks(tmp_path, before, shown):
    done = python("-c", LIBRARY.format(before=before, folder=tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [f"step:  {step}  " in done.stdout for step in (1, 2)] == [shown] * 2
    assert ("training done at step 2" in done.stdout) is shown
