"""Spare processes of torchrun: a rank that had one is as a rank without."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.processes import ROOT, environment, python
from tests.support.train_runs import STEPS, flags, rows, train, unequal
from titanlite import exit_codes
from titanlite.parallel import spares

#: A rank that says what it is, and dies by a signal in its first three starts.
_RANK = """
import sys
early = "titanlite.trainer" in sys.modules
import json, os, signal, time
from pathlib import Path
from titanlite.runs.provenance import launched
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank = int(os.environ["RANK"])
print("out of rank", rank, "in start", start)
print("err of rank", rank, "in start", start, file=sys.stderr)
line = {
    "start": start, "rank": rank, "early": early, "pid": os.getpid(), "parent": os.getppid(),
    "launched": launched(), "now": time.time(), "argv": sys.argv, "path": sys.path[0],
    "name": __name__, "session": os.getsid(0), "folder": os.getcwd(),
    "handlers": [repr(signal.getsignal(one)) for one in (signal.SIGTERM, signal.SIGINT)],
    "environment": dict(os.environ),
}
time.sleep(1.5)
line["spares"] = 0
for file in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        words = file.read_bytes().decode(errors="replace")
    except OSError:
        continue
    line["spares"] += "titanlite.parallel.spares" in words and sys.argv[1] in words
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(line) + "\\n")
while len(Path(sys.argv[1]).read_text().splitlines()) < 2 * (start + 1):
    time.sleep(0.1)
if start < 3 and rank == start % 2:
    os.kill(os.getpid(), signal.SIGKILL)
if start < 3:
    time.sleep(300)
from titanlite.main import exit_now
exit_now(3)
"""
#: What torchrun changes from start to start.
_OTHER = (
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
    "MASTER_PORT",
    "TITANLITE_ROUND",
)


def _run(folder: Path, seconds: str) -> tuple[list[dict[str, Any]], str, int]:
    """Return the lines of the ranks by start and rank, the output of torchrun, and its code."""
    (folder / "rank.py").write_text(_RANK)
    options = ["--nproc_per_node=2", "--max-restarts=3", "--redirects=1:3"]
    options += [
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0",
        f"--log-dir={folder / 'logs'}",
    ]
    words = ["-m", "titanlite.torchrun", *options, str(folder / "rank.py"), str(folder / "lines")]
    variables = environment(TITANLITE_SPARES=seconds, OMP_NUM_THREADS="1")
    done = python(*words, env=variables)
    lines = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
    lines.sort(key=lambda line: (line["start"], line["rank"]))
    return lines, done.stdout + done.stderr, done.returncode


@pytest.mark.slow
def test_ranks_that_are_killed_again_and_again_start_from_spares_and_are_as_those_without(
    tmp_path: Path,
) -> None:
    lines, output, code = _run(tmp_path, "0")
    assert code == 3
    assert [line["early"] for line in lines] == [False, False] + [True] * 6
    assert len({line["pid"] for line in lines}) == 8
    for cold, warm in zip(lines[:2] * 3, lines[2:], strict=True):
        for name in ("parent", "argv", "path", "name", "folder", "handlers", "rank"):
            assert warm[name] == cold[name], name
        assert warm["session"] == warm["pid"]
        # Times begin with the restart, not with the spare.
        assert 0 <= warm["now"] - warm["launched"] < warm["now"] - cold["now"]
        without = [
            {name: value for name, value in line["environment"].items() if name not in _OTHER}
            for line in (cold, warm)
        ]
        assert without[0] == without[1]
        assert warm["environment"]["TORCHELASTIC_RESTART_COUNT"] == str(warm["start"])
    for start in range(4):
        # Rank 0 writes to torchrun's own output, rank 1 to a file of each start.
        assert output.count(f"out of rank 0 in start {start}\n") == 1
        assert output.count(f"err of rank 0 in start {start}\n") == 1
        (log,) = (tmp_path / "logs").glob(f"*/attempt_{start}/1/stdout.log")
        assert log.read_text() == f"out of rank 1 in start {start}\n"
    assert lines[-1]["spares"] == 2, "the ranks themselves: the last start needs none"
    assert not _processes(str(tmp_path))


_KILLER = """
import os, signal, sys
from titanlite import Callback
VARIABLE
class Killer(Callback):
    def on_start(self, trainer):
        if os.environ["RANK"] == "0":
            print("spare:", "titanlite.parallel.spares" in " ".join(sys.orig_argv), flush=True)
    def on_step_end(self, trainer, result):
        start = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if (start, trainer.step, os.environ["RANK"]) in {("0", 3, "1"), ("1", 6, "0")}:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
@pytest.mark.parametrize("variable", ["", 'os.environ["TORCH_LOGS"] = "-all"'])
def test_a_run_on_spares_trains_as_one_that_nobody_kills(variable: str, tmp_path: Path) -> None:
    """variable: what code of the user sets, which torch's compiler must find when it is
    imported.
    """
    (tmp_path / "killer.py").write_text(_KILLER.replace("VARIABLE", variable))
    undisturbed = tmp_path / "undisturbed"
    codes, output = train(flags(undisturbed), 2, tmp_path / "console")
    assert codes == [0, 0], output
    folder = tmp_path / "run"
    torchrun = ["-m", "titanlite.torchrun", "--nproc_per_node=2", "--max-restarts=2"]
    torchrun += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", "titanlite.main"]
    callbacks = "--job.callbacks=killer:Killer"
    variables = {"TITANLITE_SPARES": "0", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = python(*torchrun, *flags(folder), callbacks, env=variables)
    assert done.returncode == 0, done.stderr
    # A rank that finds the variable too late has begun again.
    was_spare = str(not variable)
    assert re.findall("spare: (.*)", done.stdout) == ["False", was_spare, was_spare]
    assert rows(folder)[-1] == rows(undisturbed)[-1]
    assert unequal(undisturbed, folder, STEPS) == []


def _processes(word: str) -> list[str]:
    """Return the command lines that have a word."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_bytes().decode(errors="replace"))
    return [line for line in found if word in line]


def test_a_rank_with_other_variables_or_an_ended_spare_starts_without(tmp_path: Path) -> None:
    command = (sys.executable, "-u", "-m", "none")
    given = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "OMP_NUM_THREADS": "1"}
    for change, kept in (({"OMP_NUM_THREADS": "2"}, True), ({"RANK": "1"}, False)):
        spare = spares._Spare(command, given)
        if not kept:
            spare.process.kill()
            spare.process.wait()
        assert not spare.become(command, {**given, **change}, [1, 2])
        assert spare.process.poll() is not None


@pytest.mark.slow
def test_spares_that_no_restart_would_use_are_refused_in_words(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import time; time.sleep(0.5)")
    words = ["-m", "titanlite.torchrun", "--standalone", script]
    done = python(*words, env={"TITANLITE_SPARES": "0"})
    assert done.returncode == 0
    assert done.stderr.count("TITANLITE_SPARES does nothing without --max-restarts\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("safe", [{}, {"PYTHONSAFEPATH": "1"}])
def test_a_spare_looks_for_modules_where_the_rank_does(
    safe: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text("import sys; print(sys.path)")
    command = (sys.executable, "-u", str(tmp_path / "rank.py"))
    given = environment(PYTHONPATH=str(ROOT), **safe)
    spare = spares._Spare(command, given)
    with (tmp_path / "out").open("w") as file:
        assert spare.become(command, given, [file.fileno(), file.fileno()])
    assert spare.process.wait(120) == 0
    cold = python(command[2], env=given).stdout
    assert (tmp_path / "out").read_text() == cold


#: Is installed anew when a spare has imported all.
_INSTALLED = """
import gc, os, sys, threading, time
def install():
    while "torch._dynamo" not in sys.modules or not gc.isenabled():
        time.sleep(0.1)
    time.sleep(0.5)
    os.utime(__file__, (1, 1))
    open(__file__ + ".done", "x").close()
if "titanlite.parallel.spares" in sys.orig_argv:
    threading.Thread(target=install, daemon=True).start()
"""


@pytest.mark.slow
def test_a_rank_begins_without_its_spare_where_a_package_was_installed_since(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_INSTALLED)
    (tmp_path / "rank.py").write_text("import sys; print('torch' in sys.modules, sys.argv[1:])")
    command = (sys.executable, "-u", str(tmp_path / "rank.py"), "word")
    given = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    spare = spares._Spare(command, given)
    while not (tmp_path / "sitecustomize.py.done").exists():
        assert spare.process.poll() is None
        time.sleep(0.1)
    with (tmp_path / "out").open("w") as file:
        assert spare.become(command, given, [file.fileno(), file.fileno()])
    assert spare.process.wait(120) == 0
    assert (tmp_path / "out").read_text() == "False ['word']\n"


@pytest.mark.parametrize(
    ("words", "good"), [("-u -m none", True), ("-u a.py -m", True), ("-u -X dev a.py", False)]
)
def test_only_commands_of_torchrun_get_spares(words: str, good: bool) -> None:
    assert spares._is_python((sys.executable, *words.split())) == good
    assert not spares._is_python(("./rank.sh",))


def test_ranks_train_on_where_no_spare_can_be_started(capsys: pytest.CaptureFixture[str]) -> None:
    kept = spares._Spares(0, lambda *_: "rank")
    handler = SimpleNamespace(local_rank_id=0, _stdout=None, _stderr=None)
    command = (sys.executable, "-u", "-m", "none")
    given = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "1"}
    with patch.object(spares.subprocess, "Popen", side_effect=BlockingIOError(11, "full")) as popen:
        for _ in range(2):
            assert kept.start(handler, command, given) == "rank"
            kept.prepare()
            kept.prepare()
    assert popen.call_count == 2, "one try for each start"
    assert "no spare processes are kept: [Errno 11] full" in capsys.readouterr().err


def test_a_wrong_variable_is_named_before_anything_starts() -> None:
    done = python("-m", "titanlite.torchrun", "none.py", env=environment(TITANLITE_SPARES="often"))
    assert done.returncode == exit_codes.CONFIG
    assert done.stderr == "error: TITANLITE_SPARES is 'often', expected seconds, as 60\n"
