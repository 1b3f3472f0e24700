"""The record of a run: nothing lost over attempts, dead runs found, no secrets."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.words import listening
from titanlite.config.load import load_file
from titanlite.runs import provenance
from titanlite.runs.attempts import DEAD_SECONDS, read_attempts, seconds, state_of
from titanlite.runs.folder import RunRecord, begin
from titanlite.runs.logs import rank_log
from titanlite.runs.read import read_run
from titanlite.utils import logger

Start = Callable[..., RunRecord]


def attempts(folder: Path) -> list[dict[str, Any]]:
    return read_attempts(folder / "run.json")


def test_a_record_says_what_ran_where_and_how_it_ended(tmp_path: Path, start: Start) -> None:
    record = start(tmp_path, "--optimizer.lr=0.002", "--job.description=a trial")
    (running,) = attempts(tmp_path)
    assert (running["state"], running["process"]["id"]) == ("running", os.getpid())
    record.finish("stopped", 17, "step 18: loss nan")
    (found,) = attempts(tmp_path)
    assert (found["state"], found["step"], found["steps"]) == ("stopped", 17, 40)
    assert (found["reason"], found["description"]) == ("step 18: loss nan", "a trial")
    assert (found["world_size"], found["device"]) == (2, "CPU (made up)")
    assert found["command"][:2] == ["train.py", f"--job.dump_folder={tmp_path}"]
    assert {"titanlite", "python", "torch", "numpy"} <= found["versions"].keys()
    started, ended = seconds(found["started"]), seconds(found["ended"])
    assert started and ended and abs(started - time.time()) < 60 and ended >= started
    assert load_file(tmp_path / "config.toml").value("optimizer.lr") == 0.002


def test_the_first_word_on_the_end_counts(tmp_path: Path, start: Start) -> None:
    record = start(tmp_path)
    record.finish("stopped", 3, "guard")
    record.finish("failed", 4, "later")
    assert (attempts(tmp_path)[0]["state"], attempts(tmp_path)[0]["step"]) == ("stopped", 3)


def test_a_resume_appends_an_attempt_and_keeps_the_files_of_the_former(tmp_path: Path, start: Start) -> None:
    start(tmp_path, "--optimizer.lr=0.001").finish("failed", 10, "no space")
    start(tmp_path, "--optimizer.lr=0.001", first_step=10).finish("done", 20)
    start(tmp_path, "--optimizer.lr=0.002", first_step=20, world_size=4).finish("done", 40)
    found = attempts(tmp_path)
    assert [(a["state"], a["first_step"], a["step"]) for a in found] == [
        ("failed", 0, 10),
        ("done", 10, 20),
        ("done", 20, 40),
    ]
    assert [a["config"] for a in found] == ["config-2.toml", "config-2.toml", "config.toml"]
    assert load_file(tmp_path / "config-2.toml").value("optimizer.lr") == 0.001
    assert load_file(tmp_path / "config.toml").value("optimizer.lr") == 0.002
    assert len(read_run(tmp_path).attempts) == 3


def test_a_run_begun_anew_in_the_folder_is_not_mixed_with_the_one_before(tmp_path: Path, start: Start) -> None:
    start(tmp_path).finish("done", 40)
    start(tmp_path).finish("failed", 5)
    assert len(attempts(tmp_path)) == 2
    run = read_run(tmp_path)
    assert (run.state, run.step, len(run.attempts)) == ("failed", 5, 1)


def test_a_killed_run_shows_as_died_and_the_next_attempt_writes_it_down(tmp_path: Path, start: Start) -> None:
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from titanlite.config.plans import Plans; from titanlite.runs.folder import begin\n"
        "begin(Path(sys.argv[1]), Plans(), world_size=1, device='x')\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert read_run(tmp_path).state == "running"
        process.kill()
        process.wait()
        assert read_run(tmp_path).state == "died"
    beat = attempts(tmp_path)[0]["heartbeat"]
    start(tmp_path).finish("done", 40)
    assert [(a["state"], a["ended"] == beat) for a in attempts(tmp_path)] == [("died", True), ("done", False)]


def test_on_another_machine_the_last_sign_of_life_decides() -> None:
    beat = "2026-01-02T03:04:05.000+00:00"
    elsewhere = {"state": "running", "heartbeat": beat, "process": {"id": os.getpid(), "started": 1, "space": "other"}}
    at = seconds(beat)
    assert at is not None
    assert state_of(elsewhere, now=at + DEAD_SECONDS - 1) == "running"
    assert state_of(elsewhere, now=at + DEAD_SECONDS + 1) == "died"
    assert state_of({**elsewhere, "state": "done"}, now=at + 1e9) == "done"


def test_the_heart_beats_until_the_end(tmp_path: Path, start: Start) -> None:
    record = start(tmp_path, heartbeat_seconds=0.02)
    first = attempts(tmp_path)[0]["heartbeat"]
    deadline = time.monotonic() + 10
    while attempts(tmp_path)[0]["heartbeat"] == first and time.monotonic() < deadline:
        time.sleep(0.02)
    assert attempts(tmp_path)[0]["heartbeat"] > first
    record.finish("done", 40)
    ended = (tmp_path / "run.json").read_bytes()
    time.sleep(0.1)
    assert (tmp_path / "run.json").read_bytes() == ended
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.toml", "run.json"]


def test_secrets_are_not_written_down(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "SLURM_JWT": "s3cret-1",
        "TORCH_HUB_TOKEN": "s3cret-2",
        "NCCL_PRIVATE_KEY": "s3cret-3",
        "SLURM_DB_Password": "s3cret-4",
        "CUDA_LICENSE_SECRET": "s3cret-5",
        "HF_HOME": "s3cret-6",
        "TORCHINDUCTOR_REMOTE": "redis://me:s3cret-7@host:1/0",
    }
    kept = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": "x", "SLURM_JOB_ID": "7"}
    for name, value in {**secrets, **kept}.items():
        monkeypatch.setenv(name, value)
    argv = ["--launch.environment.HF_TOKEN", "s3cret-8", "--launch.environment.MY_KEY=s3cret-9"]
    start(tmp_path, *argv, "--launch.environment.NCCL_IB=1").finish("done", 40)
    for name in ("run.json", "config.toml"):
        assert "s3cret" not in (tmp_path / name).read_text()
    (found,) = attempts(tmp_path)
    assert kept.items() <= found["environment"].items()
    assert found["environment"]["TORCHINDUCTOR_REMOTE"] == "redis://(removed)@host:1/0"
    assert found["command"][-4:] == [
        "--launch.environment.HF_TOKEN",
        "(removed)",
        "--launch.environment.MY_KEY=(removed)",
        "--launch.environment.NCCL_IB=1",
    ]
    config = load_file(tmp_path / "config.toml").value("launch.environment")
    assert config == {"HF_TOKEN": "(removed)", "MY_KEY": "(removed)", "NCCL_IB": "1"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    package = tmp_path / "checkout" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *identity, *words], cwd=package.parent, check=True)
    return package


def test_commit_changes_and_their_diff_are_kept(checkout: Path) -> None:
    clean = provenance.git_state(checkout)
    assert (len(clean.record["commit"]), clean.record["dirty"], clean.diff) == (40, False, None)
    (checkout / "__init__.py").write_text("x = 2\n")
    (checkout / "new.py").write_text("")
    dirty = provenance.git_state(checkout)
    assert dirty.record == {**clean.record, "dirty": True, "untracked": ["package/new.py"]}
    assert dirty.diff is not None and b"-x = 1\n+x = 2\n" in dirty.diff
    (checkout / "ignored").mkdir()
    (checkout / "ignored" / "__init__.py").write_text("")
    assert provenance.git_state(checkout / "ignored").record == {"unknown": "the package is not run from a checkout"}


def test_a_large_diff_is_cut_at_a_line_and_says_so(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "DIFF_LIMIT", 1000)
    (checkout / "__init__.py").write_text("".join(f"x = {i}\n" for i in range(2000)))
    found = provenance.git_state(checkout)
    assert found.diff is not None and len(found.diff) <= 1000 and found.diff.endswith(b"\n")
    assert found.record["diff_cut"].startswith("git.diff holds the first 1,000 of ")


def test_without_git_the_reason_is_kept(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert provenance.git_state(checkout).record == {"unknown": "git is not installed"}


def test_a_diff_that_changes_between_attempts_is_kept_for_each(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first_step, diff in ((0, b"one\n"), (10, b"two\n"), (20, None)):
        monkeypatch.setattr(provenance, "git_state", lambda diff=diff: provenance.GitState({"dirty": bool(diff)}, diff))
        start(tmp_path, first_step=first_step).finish("done", first_step + 10)
    names = [a.get("diff") for a in attempts(tmp_path)]
    assert names == ["git-1.diff", "git-2.diff", None]
    assert [(tmp_path / name).read_bytes() for name in names if name] == [b"one\n", b"two\n"]


def test_a_broken_record_is_put_aside_and_training_goes_on(tmp_path: Path, start: Start) -> None:
    (tmp_path / "run.json").write_text('{"attempts": [')
    start(tmp_path).finish("done", 40)
    assert (tmp_path / "run-broken-1.json").read_text() == '{"attempts": ['
    assert [a["state"] for a in attempts(tmp_path)] == ["done"]


def test_a_folder_that_cannot_be_written_to_stops_nothing(tmp_path: Path, start: Start) -> None:
    (tmp_path / "file").write_text("")
    with listening() as messages:
        start(tmp_path / "file" / "run", heartbeat_seconds=0.01).finish("done", 40)
    assert sum("without a record of the run" in message for message in messages) == 1


def test_recording_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; import titanlite.tools.cli, titanlite.runs.folder, titanlite.runs.logs, titanlite.runs.compare\n"
        "import titanlite.runs.list, titanlite.runs.page, titanlite.runs.plots\n"
        "assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_rank_logs_into_a_file_of_its_own_with_its_last_words(tmp_path: Path) -> None:
    logger.setLevel(logging.INFO)
    with rank_log(tmp_path, 0):
        logger.info("\x1b[31mstep: 1\x1b[0m")
    with pytest.raises(RuntimeError), rank_log(tmp_path, 3):
        logger.warning("odd")
        raise RuntimeError("shard 7 is gone")
    logger.info("after")
    zero, three = ((tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 3))
    assert " INFO step: 1\n" in zero and "odd" not in zero and "after" not in zero + three
    assert " WARNING odd\n" in three and "Traceback" in three and three.endswith("RuntimeError: shard 7 is gone\n")
    with rank_log(tmp_path, 0):
        pass
    assert (tmp_path / "logs" / "rank_0.log").read_text().startswith(zero)
    assert not any(isinstance(handler, logging.FileHandler) for handler in logger.handlers)


def test_begin_takes_the_command_from_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titanlite.config.plans import Plans

    monkeypatch.setattr(sys, "argv", ["train.py", "--training.steps", "5"])
    begin(tmp_path, Plans(), world_size=1, device="x").finish("done", 5)
    assert json.loads((tmp_path / "run.json").read_text())["attempts"][0]["command"] == sys.argv
