"""A folder may come from somebody else: no file is written or uploaded through a link in it."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import ROOT, titanlite
from tests.support.texts import contents
from titanlite import exit_codes
from titanlite.assembly.folders import lock_folders
from titanlite.checkpoint import retention
from titanlite.checkpoint.manifest import REASON
from titanlite.checkpoint.store_paths import write_new, write_whole
from titanlite.config.errors import ConfigError
from titanlite.config.sections import Checkpoint
from titanlite.runs.lock import RunLock
from titanlite.utils import LinkError, append_line, atomic_write, new_file

#: Files of runs with other settings than those of the golden one.
MORE = (
    "anomalies.jsonl",
    "comet-run-id",
    "comm_traces/rank_0",
    "config-2.toml",
    "documents-rank_1.jsonl",
    "git.diff",
    "git-1.diff",
    "memory_snapshot/iteration_5/rank0_memory_snapshot.pickle",
    "metrics-1.jsonl",
    "run.lock",
    "wandb",
    "wandb-run-id",
    ".hub",
    ".hub/titanlite-push-0123",
    ".hub/titanlite-push-0123/weights/model.safetensors",
)
#: Calls that write to a path by its name: into a new folder or a file with a name that cannot be
#: guessed, to a store, or below a place that the user's environment names.
BY_NAME = Counter(
    {
        "checkpoint/hf_save.py": 4,
        "checkpoint/store_paths.py": 2,
        "checkpoint/retention.py": 2,
        "data/tokenizer/hf_export.py": 1,
        "exit_codes.py": 1,
        "contrib/hub/command.py": 1,
        "features/lora/peft.py": 2,
        "assembly/error_exit.py": 2,
        "runs/lock.py": 5,
        "assembly/rank_checks.py": 1,
        "cli/launch.py": 2,
        "utils.py": 1,
    }
)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "file").write_text('{"step": 1}\n{"step": 9}\n')
    return folder


def _link(path: Path, target: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def _places(run: Path) -> list[str]:
    """Return what a run has left in its folder; of a checkpoint the folder alone."""
    found = [str(path.relative_to(run)) for path in run.rglob("*")]
    return [name for name in found if not name.startswith("checkpoint/")]


def test_a_run_begins_in_no_folder_with_a_link_at_a_place_of_its_own(golden, tmp_path, victim):
    before = contents(victim)
    places = _places(golden.folder)
    assert {"metrics.jsonl", "logs", "logs/rank_1.log", "tb", "checkpoint", "guard.jsonl"} < {
        *places
    }
    for number, name in enumerate((*places, *MORE)):
        run = tmp_path / f"run-{number}"
        target = victim if (golden.folder / name).is_dir() else victim / "file"
        link = _link(run / name, target)
        others = [str(run / each) for each in ("tb", "profile_traces", "memory_snapshot")]
        section = Checkpoint(folder=str(run / "checkpoint"))
        with (
            pytest.raises(ConfigError, match=f"{link} is a link"),
            lock_folders(run, section, others=others),
        ):
            pytest.fail(f"{name} is followed")
    assert contents(victim) == before


def test_a_folder_of_ones_own_may_be_a_link_and_steps_and_other_files_too(tmp_path):
    real = tmp_path / "scratch" / "real"
    for name in ("run", "elsewhere/step-5", "tb/2024", "else"):
        (real / name).mkdir(parents=True)
    (tmp_path / "outputs").symlink_to(tmp_path / "scratch")
    (real / "tb" / "link").symlink_to(real / "else")
    run = _link(tmp_path / "outputs" / "mine", real / "run")
    for name in ("notes.txt", "data", "wandb/latest-run", "checkpoint/step-5"):
        _link(run / name, real / "elsewhere" / "step-5")
    section = Checkpoint(enable_checkpoint=True, folder=str(run / "checkpoint"))
    with lock_folders(run, section, others=["", str(real / "tb")]):
        assert (real / "run" / "run.lock").exists()


def test_a_resume_in_a_folder_with_links_writes_nothing(golden, tmp_path, victim):
    run = golden.copy(tmp_path / "run", newest=10)
    (run / "metrics.jsonl").unlink()
    _link(run / "metrics.jsonl", victim / "file")
    before = contents(victim)
    done = titanlite("train", "--job.config_file=debug_model.toml", f"--job.dump_folder={run}")
    assert done.returncode == exit_codes.CONFIG, done.stderr
    assert f"{run / 'metrics.jsonl'} is a link, and is not followed" in done.stderr
    assert contents(victim) == before


def _aside(link: Path) -> None:
    link.rename(link.parent / f".x.{os.getpid()}")
    atomic_write(link.parent / "x", "new")


def _part(link: Path) -> None:
    link.rename(link.parent / "x.part")
    write_new(link.parent / "x", b"new")


def _reason(link: Path) -> None:
    folder = link.parent / "step-1"
    folder.mkdir()
    link.rename(folder / REASON)
    retention.quarantine(folder, "damage")


def _reason_of_a_linked_step(link: Path) -> None:
    step = _link(link.parent / "step-1", link.readlink().parent)
    retention.quarantine(step, "damage")


def _refused(write: Callable[[Path], object]) -> Callable[[Path], None]:
    def refused(link: Path) -> None:
        with pytest.raises(LinkError, match="is a link"):
            write(link)

    return refused


def _lock(link: Path) -> None:
    link.rename(link.parent / "run.lock")
    RunLock(link.parent).__enter__()


def _dangling_lock(link: Path) -> None:
    """Once this was an endless loop."""
    _link(link.parent / "run.lock", link.parent / "nowhere")
    RunLock(link.parent).__enter__()


WRITES = {
    "whole": lambda link: atomic_write(link, "new"),
    "whole, aside": _aside,
    "whole or store": lambda link: write_whole(link, b"new"),
    "new": lambda link: new_file(link).close(),
    "new, part": _part,
    "reason": _reason,
    "reason of a linked step": _reason_of_a_linked_step,
    "append": _refused(lambda link: append_line(link, {"a": 1})),
    "lock": _refused(_lock),
    "dangling lock": _refused(_dangling_lock),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_at_the_place_of_a_link_leaves_its_target_alone(tmp_path, victim, write):
    before = contents(victim)
    write(_link(tmp_path / "theirs" / "x", victim / "file"))
    assert contents(victim) == before


def test_no_other_code_writes_to_a_path_by_its_name():
    """A new file of a run goes through `atomic_write`, `new_file` or `not_a_link`."""
    found: Counter[str] = Counter()
    for path in sorted((ROOT / "titanlite").rglob("*.py")):
        name = str(path.relative_to(ROOT / "titanlite"))
        found[name] = sum(map(_writes, ast.walk(ast.parse(path.read_text()))))
    assert {name: count for name, count in found.items() if count} == BY_NAME


def _writes(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in ("write_text", "write_bytes", "touch", "copyfile", "copy2", "save_file"):
        return True
    words = {keyword.arg for keyword in node.keywords}
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    modes = [str(one.value) for one in given if isinstance(one, ast.Constant)]
    writes = any(re.fullmatch("[rbt]*[wax+][wax+bt]*", mode) for mode in modes)
    return name == "open" and writes and "opener" not in words
