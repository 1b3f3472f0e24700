"""attempts.jsonl: starts, ends, changes and losses of a run; and what provenance writes down."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.words import listening
from titanlite import exit_codes
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.config.load import load_file
from titanlite.resolve.load import check_config
from titanlite.runs import ATTEMPTS, provenance, rank_logs
from titanlite.runs.attempts import read_attempts, read_entries
from titanlite.runs.rank_logs import rank_log
from titanlite.runs.record import CONFIG
from titanlite.utils import logger


def _last(folder: Path) -> dict[str, Any]:
    return read_entries(folder)[-1]


def test_a_start_and_an_end_tell_everything_about_an_attempt(tmp_path, start):
    record = start(
        tmp_path / "a" / "run", description="a trial", argv=["train.py", "--training.steps=40"]
    )
    folder = record.path.parent
    (entry,) = read_entries(folder)
    expected = {
        "event": "start",
        "attempt": 1,
        "began": "fresh",
        "after": None,
        "step": 0,
        "steps": 40,
        "ranks": 2,
        "config": "config.toml",
        "description": "a trial",
        "git": {"commit": "c0"},
        "command": ["train.py", "--training.steps=40"],
    }
    assert {key: entry[key] for key in expected} == expected
    assert {"titanlite", "python", "torch", "numpy"} <= entry["versions"].keys()
    assert load_file(folder / "config.toml").value("optimizer.lr") == 0.001
    record.saved(20, 20_000)
    record.end("preempted", 25, 25_000, 6, "SIGTERM on every rank")
    record.end("failed", 26, 26_000, 1, "only the first counts")
    end = _last(folder)
    assert end.pop("time") >= entry["time"]
    assert end == {
        "event": "end",
        "attempt": 1,
        "state": "preempted",
        "exit_code": 6,
        "reason": "SIGTERM on every rank",
        "step": 25,
        "saved_step": 20,
        "lost_steps": 5,
        "lost_tokens": 5_000,
    }
    (found,) = read_attempts(folder)
    shown = [found[key] for key in ("state", "first_step", "step", "steps")]
    assert shown == ["preempted", 0, 25, 40]


def test_a_resume_names_changes_and_keeps_the_files_of_the_former(tmp_path, start, monkeypatch):
    diffs = iter([b"one\n", b"two\n", None])
    monkeypatch.setattr(provenance, "git_state", lambda: provenance.GitState({}, next(diffs)))
    start(tmp_path).end("failed", 10, 10_000)
    start(tmp_path, step=10, tokens=10_000).end("preempted", 20, 20_000)
    record = start(
        tmp_path, 0.002, "[model.overrides]\nn_layers = 4\n", step=20, tokens=20_000, ranks=4
    )
    entry = _last(tmp_path)
    began = (3, "resumed from step 20", "preempted")
    assert (entry["attempt"], entry["began"], entry["after"]) == began
    changes = {"optimizer.lr": "0.001 -> 0.002", "model.overrides.n_layers": "(not set) -> 4"}
    assert entry["config_changes"] == changes
    assert "lost" not in entry
    assert record.lines == [
        f"config changed since attempt 2: {key}: {change}" for key, change in changes.items()
    ]
    found = read_attempts(tmp_path)
    assert [one["config"] for one in found] == ["config-2.toml", "config-2.toml", "config.toml"]
    assert [one.get("diff") for one in found] == ["git-1.diff", "git-2.diff", None]
    rates = [load_file(tmp_path / one["config"]).value("optimizer.lr") for one in found]
    assert rates == [0.001, 0.001, 0.002]
    assert [(tmp_path / one["diff"]).read_bytes() for one in found[:2]] == [b"one\n", b"two\n"]
    assert not (tmp_path / "git.diff").exists()


@pytest.mark.parametrize(
    ("step", "state", "saved", "lost"),
    [(20, "failed", 20, 3), (0, "failed", None, 23), (0, "done", None, 0)],
)
def test_the_loss_counts_from_the_last_checkpoint_and_a_finished_run_has_none(
    tmp_path, start, step, state, saved, lost
):
    start(tmp_path, step=step, tokens=1000 * step).end(state, 23, 23_000, 7)
    end = _last(tmp_path)
    assert (end["saved_step"], end["lost_steps"], end["lost_tokens"]) == (saved, lost, 1000 * lost)


def test_a_record_that_cannot_be_written_stops_nothing(tmp_path, start):
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / ATTEMPTS).mkdir(parents=True)
    for folder in (tmp_path / "run", tmp_path / "file" / "run"):
        with listening() as messages:
            start(folder).end("done", 40)
        _, last = messages
        assert f"cannot write {folder / ATTEMPTS}" in last


def test_secrets_are_not_written_down(tmp_path, start, monkeypatch):
    names = (
        "SLURM_JWT",
        "TORCH_HUB_TOKEN",
        "NCCL_PRIVATE_KEY",
        "SLURM_DB_Password",
        "CUDA_LICENSE_SECRET",
        "HF_HOME",
    )
    secrets = {
        **dict.fromkeys(names, "s3cret"),
        "TORCHINDUCTOR_REMOTE": "redis://me:s3cret-7@host:1/0",
    }
    kept = {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7"}
    for name, value in {**secrets, **kept}.items():
        monkeypatch.setenv(name, value)
    flags = ["--launch.environment.HF_TOKEN", "s3cret-8", "--launch.environment.MY_KEY=s3cret-9"]
    flags += ["--launch.environment.NCCL_IB=1"]
    for changed in ("s3cret-8", "s3cret-10"):
        words = [*flags, f"--launch.environment.HF_TOKEN={changed}"]
        resolved = check_config(words, 2, training=False)[1].toml
        assert changed in resolved, "else this shows nothing"
        launch = resolved[resolved.index("[launch]") :]
        start(tmp_path, argv=["train.py", *flags], more_config=launch)
    for name in (ATTEMPTS, CONFIG):
        assert "s3cret" not in (tmp_path / name).read_text()
    entry = read_entries(tmp_path)[0]
    assert kept.items() <= entry["environment"].items()
    assert entry["environment"]["TORCHINDUCTOR_REMOTE"] == "redis://(removed)@host:1/0"
    assert entry["command"] == [
        "train.py",
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


def test_commit_changes_and_their_diff_are_kept(checkout, monkeypatch):
    clean = provenance.git_state(checkout)
    assert (len(clean.record["commit"]), clean.record["dirty"], clean.diff) == (40, False, None)
    (checkout / "new.py").write_text("")
    assert provenance.git_state(checkout) == provenance.GitState({**clean.record, "dirty": True})
    (checkout / "__init__.py").write_text("x = 2\n")
    dirty = provenance.git_state(checkout)
    assert dirty.record["dirty"]
    assert b"-x = 1\n+x = 2\n" in dirty.diff
    monkeypatch.setenv("PATH", "/nowhere")
    assert "git" in provenance.git_state(checkout).record["unknown"]


def test_each_rank_logs_into_a_file_of_its_own_with_its_end(tmp_path):
    class Stopped(BaseException):
        exit_code = exit_codes.PREEMPTED

    logger.setLevel(logging.INFO)
    with rank_log(tmp_path, 0):
        logger.info("\x1b[31mstep: 1\x1b[0m")
    with pytest.raises(Stopped), rank_log(tmp_path, 1):
        raise Stopped("SIGTERM on rank 0")
    with pytest.raises(RuntimeError), rank_log(tmp_path, 3):
        logger.warning("odd")
        raise RuntimeError("shard 7 is gone")
    logger.info("after")
    zero, one, three = ((tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1, 3))
    assert " INFO step: 1\n" in zero
    assert "odd" not in zero
    assert "after" not in zero + three
    assert one.endswith(" INFO rank 1 ends: SIGTERM on rank 0\n")
    assert " WARNING odd\n" in three
    assert "Traceback" in three
    assert three.endswith("RuntimeError: shard 7 is gone\n")
    with rank_log(tmp_path, 0):
        pass
    assert (tmp_path / "logs" / "rank_0.log").read_text().startswith(zero)
    assert not any(isinstance(handler, logging.FileHandler) for handler in logger.handlers)


def test_a_full_disk_does_not_change_how_a_run_ends(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        rank_logs, "not_a_link", lambda path, flags: os.open("/dev/full", os.O_WRONLY)
    )
    with rank_log(tmp_path, 0):
        logger.warning("a line that is lost")
    with pytest.raises(CheckpointError, match="^the last save failed$"), rank_log(tmp_path, 0):
        raise CheckpointError("the last save failed")
    assert "No space left on device; log lines are lost" in capsys.readouterr().err
