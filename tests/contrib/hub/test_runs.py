"""Checkpoints on the hub during a run: branches, failures, stops and refusals. The runs and their
uploads are processes, and the client of the hub is the real one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.hub_server import HubServer
from tests.support.processes import until
from tests.support.pushes import leaks, make_hub, uploads_of, variables
from tests.support.ranks import Ranks
from tests.support.train_runs import flags, rows, train
from titanlite import exit_codes
from titanlite.checkpoint.manifest import PIN
from titanlite.config.sections import Checkpoint
from titanlite.contrib.hub import callback
from titanlite.contrib.hub.callback import HubUploads

INTERVAL = "--checkpoint.interval=4"
HUB = "--checkpoint.hub=ada/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that runs of this test reach as ada."""
    with make_hub(tmp_path / "served") as found:
        for name, value in variables(found, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without uploads, on one rank."""
    folder = tmp_path_factory.mktemp("plain")
    codes, said = train(flags(folder / "run", INTERVAL), 1, folder / "console")
    assert codes == [0], said
    return folder / "run"


def _is_safe(folder: Path, said: str) -> bool:
    return leaks(folder) == [] and "planted" not in said


@pytest.mark.slow
def test_each_checkpoint_goes_to_its_branch_and_the_last_one_to_main(hub, tmp_path):
    run = tmp_path / "run"
    more = ["--checkpoint.hub_dtype=bfloat16", "--checkpoint.async_mode=async"]
    more += ["--checkpoint.model_weights_only", "--checkpoint.last_save_in_hf"]
    codes, said = train(flags(run, INTERVAL, HUB, *more), 2, tmp_path / "console")
    assert codes == [0, 0], said
    uploads = uploads_of(hub)
    repository = uploads.repositories["ada/tiny"]
    assert repository.private
    assert set(repository.branches) == {"main", "step-4", "step-8"}
    assert b'"BF16"' in uploads.branch("ada/tiny", "step-4")["model.safetensors"]
    # The last save in Hugging Face's format goes up as it is.
    for name in ("step-8", "main"):
        branch = uploads.branch("ada/tiny", name)
        for file in (run / "checkpoint" / "step-8-hf").iterdir():
            assert branch[file.name] == file.read_bytes()
        assert "| step | 8 of 8 |" in branch["README.md"].decode()
    # One rank alone asked the hub, before and for each push.
    assert len(hub.of("/api/repos/create", "POST")) <= 8
    assert repository.messages[-1] == "Step 8"
    assert said.count("uploaded: ") == 2
    # The ranks have left by then: no timeout of theirs counts.
    assert said.index("training done") < said.index("waiting for uploads to ada/tiny")
    assert "not uploaded" not in said
    assert not [*run.rglob(PIN), *run.rglob(".reading*"), *(run / ".hub").glob("*")]
    assert _is_safe(run, said)


@pytest.mark.slow
def test_failed_uploads_change_no_loss_and_their_commands_are_told(hub, tmp_path, plain):
    run = tmp_path / "run"
    hub.fail("/api/models/*/commit/*", method="POST", status=403, times=None)
    codes, said = train(flags(run, INTERVAL, HUB), 1, tmp_path / "console")
    assert codes == [0], said
    assert rows(run) == rows(plain)
    assert uploads_of(hub).repositories["ada/tiny"].messages == []
    assert "403" in said
    for step, branches in ((4, "--branch step-4"), (8, "--branch step-8 --branch main")):
        assert f"\n  titanlite push {run}/checkpoint/step-{step} ada/tiny {branches}\n" in said
    assert _is_safe(run, said)


@pytest.mark.slow
def test_a_stop_ends_the_upload_and_tells_its_command(hub, tmp_path):
    run = tmp_path / "run"
    more = [HUB, "--checkpoint.interval=2", "--training.steps=4000", "--checkpoint.hub_every=2"]
    hub.fail("/api/models/*/commit/*", method="POST", stall=600, times=1)
    with Ranks([*flags(run), *more], 1, tmp_path / "console") as ranks:
        until(lambda: bool(hub.of("*/commit/*", "POST")))
        began = time.monotonic()
        ranks.send(signal.SIGTERM)
        assert ranks.wait() == [exit_codes.PREEMPTED], ranks.output()
        said = ranks.output()
    assert time.monotonic() - began < 60
    assert "not uploaded to ada/tiny; these commands do it:" in said
    assert not list(run.rglob(PIN))
    assert _is_safe(run, said)


def test_what_cannot_be_uploaded_is_refused_before_the_first_step(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_planted_bob")
    run = tmp_path / "run"
    codes, said = train(flags(run, HUB), 1, tmp_path / "console")
    assert codes == [exit_codes.CONFIG], said
    assert not (run / "metrics.jsonl").exists()
    assert "checkpoint.hub: ada/tiny takes no upload of the owner of this token" in said
    assert "planted" not in said


def test_milestones_multiples_and_the_last_step_go_up(tmp_path):
    section = Checkpoint(enable_checkpoint=True, hub="ada/tiny", hub_every=3, milestones=(4,))
    hub = HubUploads(section, tmp_path, "llama3")
    pushed = []
    hub._push = pushed.append  # type: ignore[method-assign, assignment]
    for step in (1, 3, 4, 5, 6, 7):
        hub.on_save(SimpleNamespace(steps=7), step, Path(f"step-{step}"), 0.0)  # type: ignore[arg-type]
    hub._pool.shutdown()
    branches = [words[5::2] for words in pushed]
    assert branches == [["step-3"], ["step-4"], ["step-6"], ["step-7", "main"]]


def test_the_wait_at_the_end_is_bounded(tmp_path, monkeypatch, caplog):
    hub = HubUploads(Checkpoint(enable_checkpoint=True, hub="ada/tiny"), tmp_path, "llama3")
    # In place of `nice -n 19 python -m titanlite push …`.
    stalled = tmp_path / "stalled"
    stalled.write_text("#!/bin/sh\nexec sleep 60\n")
    stalled.chmod(0o700)
    monkeypatch.setattr(callback.shutil, "which", lambda _: str(stalled))
    monkeypatch.setattr(callback, "_LONGEST_WAIT", 0.5)
    began = time.monotonic()
    hub.on_save(SimpleNamespace(steps=8), 4, Path("step-4"), 0.0)  # type: ignore[arg-type]
    assert time.monotonic() - began < 0.4
    hub.on_exit(SimpleNamespace(requested=False))  # type: ignore[arg-type]
    assert hub._newest is not None
    hub._newest.result(5)
    assert 0.5 < time.monotonic() - began < 5
    assert "titanlite push step-4 ada/tiny --branch step-4" in caplog.text
