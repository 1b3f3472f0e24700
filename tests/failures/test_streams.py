"""Whole runs on streamed text: a hub with faults, a killed run, other numbers of ranks, a source
that is lost.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import NO_FAULT, Fault
from tests.support.hub_server import HubServer
from tests.support.train_runs import (
    STEPS,
    finish,
    flags,
    global_batches,
    rows,
    saved,
    train,
    unequal,
)
from titanlite import exit_codes
from titanlite.data.text_files import BUNDLED

STREAM = ["--data.shuffle_buffer=24", "--data.lanes=4", "--data.streaming"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of the hub: 40 files of three documents, which eight steps read twice."""
    root = tmp_path_factory.mktemp("hub")
    folder = root / "datasets" / "me" / "small"
    folder.mkdir(parents=True)
    lines = gzip.decompress(min(BUNDLED["c4_test"].iterdir()).read_bytes()).splitlines()
    for n in range(40):
        texts = [json.loads(line)["text"][:200] for line in lines[3 * n : 3 * n + 3]]
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"train-{n:02}.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    return root


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(repository) as server:
        for name, value in server.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.slow
def test_a_hub_with_faults_gives_the_run_that_local_files_give(
    hub, repository, tmp_path, monkeypatch
):
    local = tmp_path / "local"
    remote = tmp_path / "remote"
    text = f"--training.dataset_path={repository / 'datasets/me/small'}"
    finish(flags(local, *STREAM, text), 2, tmp_path / "console")
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    hub.fail("*-0[0-9].jsonl.gz", status=429, retry_after=1, times=2)
    hub.fail("*-1[0-9].jsonl.gz", cut=40, times=2)
    hub.fail("*-2[0-9].jsonl.gz", stall=60, times=2)
    arguments = flags(remote, *STREAM, "--training.dataset=me/small")
    assert "40 files at revision" in finish(arguments, 2, tmp_path / "console")
    assert [fault.times for fault in hub.faults] == [0, 0, 0]
    assert rows(remote) == rows(local)
    assert global_batches(remote, 2) == global_batches(local, 2)
    # Only a listing asks for the folder `data`. For the root, threads that open files ask too, each
    # once on a rank that has not listed: how many do depends on chance.
    assert len(hub.of("*/tree/*/data")) == 1, "one rank lists the files"


@pytest.mark.slow
def test_a_killed_stream_resumes_exactly_and_on_other_ranks(repository, tmp_path):
    straight = tmp_path / "straight"
    killed = tmp_path / "killed"
    text = f"--training.dataset_path={repository / 'datasets/me/small'}"
    for folder, fault in ((straight, NO_FAULT), (killed, Fault("kill", "step", 6, 1))):
        codes, console = train(flags(folder, *STREAM, text), 2, tmp_path / "console", fault)
        assert (codes == [0, 0]) == (fault is NO_FAULT), console
    assert saved(killed)[-1] == "step-4"
    wanted = global_batches(straight, 2)
    for ranks in (1, 4):
        other = tmp_path / str(ranks)
        shutil.copytree(killed / "checkpoint", other / "checkpoint")
        finish(flags(other, *STREAM, text), ranks, tmp_path / "console")
        assert global_batches(other, ranks) == {step: wanted[step] for step in range(5, STEPS + 1)}
    assert "resume verified" in finish(flags(killed, *STREAM, text), 2, tmp_path / "console")
    assert rows(killed)[-4:] == rows(straight)[-4:]
    assert unequal(straight, killed) == []


@pytest.mark.slow
def test_a_source_that_is_lost_ends_the_run_with_a_checkpoint_and_its_name(hub, tmp_path):
    long = ["--training.steps=2000", "--checkpoint.interval=1000", "--data.retry_seconds=1"]
    long += [f"--training.dataset_path={hub.url}/datasets/me/small/"]
    hub.fail("*.jsonl.gz", after=40, times=None, status=503)
    codes, console = train(flags(tmp_path, *STREAM, *long), 2, tmp_path / "console")
    assert codes == [exit_codes.PREEMPTED] * 2, console
    (folder,) = saved(tmp_path)
    step = int(folder.removeprefix("step-"))
    assert (
        0 < step < 2000
        and f"stopped after step {step} by {hub.url}/datasets/me/small/train-" in console
    ), console
