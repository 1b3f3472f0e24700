"""A pin keeps a checkpoint while another process reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.checkpoints import write
from tests.support.processes import environment
from titanlite.checkpoint.manifest import PIN, step_folder
from titanlite.checkpoint.pin import _TEXT, pinned
from titanlite.checkpoint.retention import delete, is_pinned, unpublish
from titanlite.cli.checkpoint_folders import list_checkpoints


def test_a_pin_keeps_a_checkpoint_while_it_is_read_and_one_of_the_user_stays(
    tmp_path: Path,
) -> None:
    write(tmp_path, 4, 8)
    folder = step_folder(tmp_path, 4)
    with pinned(folder):
        assert unpublish(folder) is None
        assert (folder / "manifest.json").is_file()
    assert not (folder / PIN).exists()
    (folder / PIN).touch()
    with pinned(folder):
        pass
    assert (folder / PIN).exists()
    other = step_folder(tmp_path, 8)
    with pinned(other):
        (other / PIN).write_text("mine")
    assert (other / PIN).read_text() == "mine"


def test_a_pin_goes_also_where_a_file_system_sets_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refused)
    with pinned(tmp_path):
        assert is_pinned(tmp_path)
    assert not (tmp_path / PIN).exists()


#: Pins a folder, and says so.
PINS = """
import sys, time
from pathlib import Path
from titanlite.checkpoint.pin import _TEXT, pinned
with pinned(Path(sys.argv[1])):
    print("pinned", flush=True)
    time.sleep(600)
"""


def _killed(folder: Path) -> None:
    """Leave the pin of a process that was killed, which held while it lived."""
    command = [sys.executable, "-c", PINS, str(folder)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"pinned\n"
        assert unpublish(folder) is None
        process.kill()
    assert (folder / PIN).is_file()


def test_the_pin_of_another_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PINS, str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"pinned\n"
        before = (tmp_path / PIN).read_bytes()
        with pinned(tmp_path):
            assert is_pinned(tmp_path)
        assert (tmp_path / PIN).read_bytes() == before
        process.kill()
    # Of a user, who may make anything of that name.
    (tmp_path / PIN).unlink()
    (tmp_path / PIN).symlink_to("nowhere")
    with pinned(tmp_path):
        pass
    assert is_pinned(tmp_path)


def test_a_pin_ends_with_its_process_and_one_that_a_user_has_touched_stays(tmp_path: Path) -> None:
    write(tmp_path, 4, 8, 12)
    folders = [step_folder(tmp_path, step) for step in (4, 8, 12)]
    _killed(folders[0])
    assert [entry.pinned for entry in list_checkpoints(tmp_path)] == [False] * 3
    left = unpublish(folders[0])
    assert left is not None
    assert delete(left)
    assert not left.exists()
    # The next push takes it.
    _killed(folders[1])
    with pinned(folders[1]):
        assert unpublish(folders[1]) is None
    assert not (folders[1] / PIN).exists()
    _killed(folders[1])
    (folders[1] / PIN).touch()
    with pinned(folders[1]):
        pass
    assert unpublish(folders[1]) is None
    # Of another machine it ends after a day.
    pin = folders[2] / PIN
    for age, is_over in ((3600, False), (90_000, True)):
        written = int(time.time()) - age
        holder = {"process": {"id": 1, "started": 1, "space": "elsewhere"}, "written": written}
        pin.write_bytes(_TEXT + json.dumps(holder).encode())
        os.utime(pin, (written, written))
        assert is_pinned(folders[2]) != is_over
