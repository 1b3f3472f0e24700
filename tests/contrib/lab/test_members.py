"""Runs of one config that differ, as processes: their states, kills, and who may run them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.processes import ROOT, ended, environment, until
from tests.support.sweeps import (
    BROKEN,
    CONFIG,
    HUGE,
    LARGE,
    SMALL,
    STEPS,
    attempts,
    rows,
    run_copy,
)
from titanlite import torchrun
from titanlite.contrib.lab import members
from titanlite.contrib.lab.members import (
    Member,
    MemberError,
    MemberResult,
    check_members,
    result_of,
    run_members,
)
from titanlite.resolve.load import check_config

#: Runs two members, one after the other.
SCRIPT = """
import sys
from pathlib import Path
from tests.support.sweeps import CONFIG, LARGE, SMALL
from titanlite.contrib.lab.members import run_members

run_members([SMALL, LARGE], CONFIG, Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[MemberResult]]:
    """Four members, one after the other: folder and results."""
    folder = tmp_path_factory.mktemp("sweep")
    with patch.object(members, "run", run_copy):
        return folder, run_members([BROKEN, SMALL, HUGE, LARGE], CONFIG, folder)


def started(folder: Path) -> subprocess.Popen[bytes]:
    """A sweep of two members in a process, with slow steps."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        cwd=ROOT,
        env=environment(STEP_SECONDS="0.3"),
        stderr=subprocess.DEVNULL,
    )


def holder(folder: Path) -> int:
    """The process of the run that is alive in a folder."""
    return int(json.loads((folder / "run.lock").read_text())["process"]["id"])


def has_rows(folder: Path, count: int) -> bool:
    file = folder / "metrics.jsonl"
    return file.exists() and file.read_text().count('"grad_norm"') >= count


@pytest.mark.slow
def test_a_member_that_fails_or_diverges_does_not_end_the_others(sweep):
    _, results = sweep
    assert [one.name for one in results] == ["broken", "small", "huge", "large"]
    assert [one.state for one in results] == ["failed", "done", "diverged", "done"]
    assert [one.steps for one in results if one.state == "done"] == [STEPS, STEPS]
    broken, small, huge, large = results
    assert "this callback breaks" in broken.reason
    assert "not finite" in huge.reason
    assert small.reason == large.reason == ""


@pytest.mark.slow
def test_a_second_call_runs_only_what_failed(sweep):
    folder, first = sweep
    names = ("small", "large", "huge")
    before = {name: attempts(folder / name) for name in names}
    results = run_members([BROKEN, SMALL, HUGE, LARGE], CONFIG, folder)
    assert {name: attempts(folder / name) for name in names} == before
    assert attempts(folder / "broken").count('"event": "start"') == 2
    assert results[1:] == first[1:]


@pytest.mark.slow
def test_after_ctrl_c_and_a_kill_the_same_call_goes_on_where_it_was(sweep, tmp_path):
    whole, _ = sweep
    process = started(tmp_path)
    until(lambda: has_rows(tmp_path / "small", 4))
    run = holder(tmp_path / "small")
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert not Path(f"/proc/{run}").exists()
    assert not (tmp_path / "run.lock").exists()
    assert not (tmp_path / "large").exists()
    stopped = result_of(SMALL, tmp_path)
    assert stopped.state == "unfinished"

    process = started(tmp_path)
    until(lambda: has_rows(tmp_path / "large", 4))
    run = holder(tmp_path / "large")
    process.kill()
    process.wait()
    assert ended(run, 120)
    assert result_of(LARGE, tmp_path).state == "unfinished"
    done = attempts(tmp_path / "small")
    assert f'"began": "resumed from step {stopped.steps}"' in done

    results = run_members([SMALL, LARGE], CONFIG, tmp_path)
    assert [one.state for one in results] == ["done", "done"]
    assert attempts(tmp_path / "small") == done
    assert '"began": "resumed from step ' in attempts(tmp_path / "large")
    for name in ("small", "large"):
        assert rows(tmp_path / name) == rows(whole / name)


def test_a_folder_of_another_config_is_refused_and_one_of_an_older_version_is_not(tmp_path):
    config, _ = check_config(SMALL.arguments(CONFIG, tmp_path), 1)
    kept = tmp_path / "small" / "config.toml"
    kept.parent.mkdir()
    lines = config.to_toml().splitlines()
    older = "\n".join(line for line in lines if not line.startswith("z_loss"))
    kept.write_text(older.replace("[data]", "[data]\nlog_documents = false"))
    assert "log_documents" in kept.read_text()
    described = Member("small", [*SMALL.flags, "--job.description=again"])
    assert len(check_members([described], CONFIG, tmp_path, 1)) == 1
    changed = Member("small", ["--optimizer.lr=2e-3", "--model.overrides.norm_eps=1e-4"])
    with pytest.raises(MemberError, match=r"small: optimizer\.lr: 0\.001 -> 0\.002") as error:
        check_members([changed], CONFIG, tmp_path, 1)
    assert "norm_eps: " in str(error.value)


def test_other_ranks_are_a_change_where_the_batch_follows_from_them(tmp_path):
    config, _ = check_config(SMALL.arguments(CONFIG, tmp_path), 1)
    own = tmp_path / "small"
    own.mkdir()
    (own / "config.toml").write_text(config.to_toml())
    (own / "attempts.jsonl").write_text('{"event": "start", "attempt": 1, "ranks": 1}\n')
    with pytest.raises(MemberError, match="ranks: 1 -> 2"):
        check_members([SMALL], CONFIG, tmp_path, 2)


@pytest.mark.parametrize("flag", ["--checkpoint.folder=../together", "--checkpoint.hub=ada/tiny"])
def test_a_place_that_all_runs_would_share_is_refused(flag, tmp_path):
    with pytest.raises(MemberError, match="all runs would share"):
        run_members([SMALL, LARGE], [*CONFIG, flag], tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchrun_starts_as_many_ranks_as_asked_and_ids_of_trackers_are_no_runs(
    ranks, tmp_path, monkeypatch
):
    calls = []

    def run(command, console, **more):
        calls.append((command, more["environment"]))
        console.write_text("it broke\n")
        return 1

    monkeypatch.setenv("WANDB_RUN_ID", "one")
    monkeypatch.setattr(members, "run", run)
    run_members([SMALL], CONFIG, tmp_path, nproc=ranks)
    ((command, variables),) = calls
    assert command == torchrun.command(ranks, ["train", *SMALL.arguments(CONFIG, tmp_path)])
    assert "WANDB_RUN_ID" not in variables
