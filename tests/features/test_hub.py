"""Checkpoints on the hub during a run: branches, failures, stops and refusals. The runs and their
uploads are processes, and the client of the hub is the real one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.support.adapters import base_folder, run_flags
from tests.support.checkpoints import write
from tests.support.hub_server import HubServer
from tests.support.processes import environment
from tests.support.pushes import ADA, leaks, make_hub, uploads_of, variables
from tests.support.ranks import Ranks
from tests.support.tiny import TWO_LAYERS
from tests.support.train_runs import flags, rows, train
from titanlite import exit_codes
from titanlite.checkpoint import pin
from titanlite.checkpoint.manifest import PIN, step_folder
from titanlite.checkpoint.pin import _TEXT, pinned
from titanlite.checkpoint.retention import delete, is_pinned, unpublish
from titanlite.cli.checkpoint_folders import list_checkpoints
from titanlite.config.errors import ConfigError
from titanlite.features.hub import company, progress
from titanlite.features.hub.branches import run_of
from titanlite.features.hub.company import Company
from titanlite.resolve.load import check_config

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
def test_each_checkpoint_goes_to_its_branch_and_the_last_one_to_main(
    hub: HubServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    more = ["--checkpoint.hub_dtype=bfloat16", "--checkpoint.async_mode=async"]
    codes, said = train(flags(run, INTERVAL, HUB, *more), 2, tmp_path / "console")
    assert codes == [0, 0], said
    uploads = uploads_of(hub)
    repository = uploads.repositories["ada/tiny"]
    assert repository.private
    assert set(repository.branches) == {"main", "step-4", "step-8"}
    weights = [uploads.branch("ada/tiny", name)["model.safetensors"] for name in ("step-8", "main")]
    assert weights[0] == weights[1]
    assert b'"BF16"' in weights[0]
    assert weights[0] != uploads.branch("ada/tiny", "step-4")["model.safetensors"]
    # Each content went up once; one rank alone asked who it is, before and for each push.
    assert len(uploads.puts) == len(set(uploads.puts)) == 2
    assert len(hub.of("/api/whoami-v2")) == 3
    card = uploads.branch("ada/tiny")["README.md"].decode()
    assert "| ranks | 2 |" in card
    assert "they differ by" in card
    assert "step 8 is on ada/tiny, step-8 and main" in said
    # The ranks have left by then: no timeout of theirs counts.
    assert re.search(r"waiting for \d uploads? to ada/tiny", said)
    assert said.index("training done") < said.index("step 8 is on ada/tiny")
    assert "not uploaded" not in said
    assert not list(run.rglob(PIN))
    assert not list((run / ".hub").glob("step-*"))
    assert _is_safe(run, said)


@pytest.mark.slow
def test_failed_uploads_change_no_loss_and_the_next_start_makes_up_for_them(
    hub: HubServer, tmp_path: Path, plain: Path
) -> None:
    run = tmp_path / "run"
    hub.fail("/api/models/*/commit/*", method="POST", status=403, times=None)
    hub.fail("/lfs/*", method="PUT", times=1)
    hub.fail("/lfs/*", method="PUT", status=500, times=1)
    codes, said = train(flags(run, INTERVAL, HUB), 1, tmp_path / "console")
    assert codes == [0], said
    assert rows(run) == rows(plain)
    uploads = uploads_of(hub)
    assert set(uploads.branch("ada/tiny")) == {".gitattributes"}
    assert said.count("step 4 was not uploaded to ada/tiny") == 1
    assert "Training continues" in said
    for step, branches in ((4, "--branch step-4"), (8, "--branch step-8 --branch main")):
        line = f"titanlite push {run} ada/tiny --step {step} {branches} --private"
        assert line in said
    assert _is_safe(run, said)
    # The exports wait; a retention that takes the checkpoint leaves them.
    shutil.rmtree(run / "checkpoint" / "step-4")
    hub.faults.clear()
    sent = len(uploads.puts)
    codes, said = train(flags(run, INTERVAL, HUB), 1, tmp_path / "console")
    assert codes == [0], said
    assert "step 8 is on ada/tiny, step-8 and main" in said
    assert "step 4 is on ada/tiny, step-4" in said
    assert len(uploads.puts) == sent
    assert "model.safetensors" in uploads.branch("ada/tiny", "step-8")
    assert rows(run) == rows(plain)
    # A third start has nothing to upload.
    asked = len(hub.requests)
    codes, said = train(flags(run, INTERVAL, HUB), 1, tmp_path / "console")
    assert codes == [0], said
    assert "is on ada/tiny" not in said
    assert not [one for one in hub.requests[asked:] if "commit" in one.path]


@pytest.mark.slow
def test_a_stop_ends_the_upload_and_the_resumed_run_goes_on_with_it(
    hub: HubServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    more = [HUB, "--checkpoint.interval=2", "--training.steps=4000", "--checkpoint.hub_every=2"]
    hub.fail("/lfs/*", method="PUT", stall=600, times=1)
    with Ranks([*flags(run), *more], 1, tmp_path / "console") as ranks:
        _until(lambda: bool(uploads_of(hub).puts))
        began = time.monotonic()
        ranks.send(signal.SIGTERM)
        assert ranks.wait() == [exit_codes.PREEMPTED], ranks.output()
        said = ranks.output()
    assert time.monotonic() - began < 60
    assert "not uploaded to ada/tiny, and the resumed run goes on with it:" in said
    assert not list(run.rglob(PIN))
    saved = [int(path.name.split("-")[1]) for path in (run / "checkpoint").glob("step-*")]
    last = max(saved)
    again = [HUB, f"--training.steps={last}", "--checkpoint.hub_every=1000000"]
    codes, said = train([*flags(run), *again], 1, tmp_path / "console")
    assert codes == [0], said
    assert set(uploads_of(hub).repositories["ada/tiny"].branches) >= {"main", f"step-{last}"}
    assert _is_safe(run, said)


@pytest.mark.slow
def test_few_exports_wait_and_the_resumed_run_uploads_them_without_their_checkpoints(
    hub: HubServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    more = [HUB, "--checkpoint.interval=100", "--training.steps=20000"]
    hub.fail("/api/models/*/commit/*", method="POST", status=403, times=None)
    with Ranks([*flags(run), *more], 1, tmp_path / "console") as ranks:
        _until(lambda: len(_refused_commits(hub)) >= 2)
        saved = len(_saved(run))
        _until(lambda: len(_saved(run)) > saved + 2)
        ranks.send(signal.SIGTERM)
        assert ranks.wait() == [exit_codes.PREEMPTED], ranks.output()
    assert len(_refused_commits(hub)) == 2
    exports = sorted(int(path.name.split("-")[1]) for path in (run / ".hub").glob("*.notes"))
    assert exports == [100, 200]
    hub.faults.clear()
    sent = list(uploads_of(hub).puts)
    last = _saved(run)[-1]
    for step in _saved(run)[:-1]:
        shutil.rmtree(run / "checkpoint" / f"step-{step}")
    codes, said = train([*flags(run), HUB, f"--training.steps={last}"], 1, tmp_path / "console")
    assert codes == [0], said
    uploads = uploads_of(hub)
    expected = {"main", "step-100", "step-200", f"step-{last}"}
    assert set(uploads.repositories["ada/tiny"].branches) == expected
    assert all("model.safetensors" in uploads.branch("ada/tiny", name) for name in expected)
    assert uploads.puts[: len(sent)] == sent
    assert len(uploads.puts) == len(set(uploads.puts))


def _refused_commits(hub: HubServer) -> set[str]:
    return {one.path for one in hub.requests if "/commit/" in one.path}


def _saved(run: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in run.glob("checkpoint/step-*/manifest.json"))


@pytest.mark.slow
def test_a_run_that_goes_on_in_a_new_folder_is_the_same_run(hub: HubServer, tmp_path: Path) -> None:
    more = [HUB, f"--checkpoint.folder={tmp_path / 'shared'}", "--checkpoint.interval=4"]
    names = set()
    for number, steps in enumerate((4, 8, 12)):
        run = tmp_path / f"machine-{number}"
        codes, said = train([*flags(run), *more, f"--training.steps={steps}"], 1, tmp_path / "said")
        assert codes == [0], said
        assert f"step {steps} is on ada/tiny, step-{steps} and main" in said
        names.add(run_of(uploads_of(hub).branch("ada/tiny")["README.md"].decode()))
    assert len(names) == 1
    # A new run with the same repository is another one.
    said = _refused(tmp_path, HUB, INTERVAL)
    assert "holds weights of another run" in said


def _until(done: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_last_save_in_hugging_faces_format_goes_up_as_it_is(
    hub: HubServer, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    last = ["--checkpoint.model_weights_only", "--checkpoint.last_save_in_hf"]
    more = [HUB, "--checkpoint.hub_dtype=float16", "--checkpoint.hub_every=3", *last]
    codes, said = train(flags(run, INTERVAL, *more), 1, tmp_path / "console")
    assert codes == [0], said
    uploads = uploads_of(hub)
    # No multiple of 3 was saved before the end.
    assert set(uploads.repositories["ada/tiny"].branches) == {"main", "step-8"}
    branch = uploads.branch("ada/tiny")
    for file in (run / "checkpoint" / "step-8-hf").iterdir():
        assert branch[file.name] == file.read_bytes()
    assert "| step | 8 of 8 |" in branch["README.md"].decode()
    assert (run / "checkpoint" / "step-8-hf" / "config.json").is_file()


@pytest.mark.slow
def test_adapters_go_up_in_pefts_format_without_the_folder_of_their_base(
    hub: HubServer, tmp_path: Path
) -> None:
    base = base_folder(tmp_path / "the-base")
    run = tmp_path / "run"
    words = [
        "--job.config_file=debug_model.toml",
        *TWO_LAYERS,
        *run_flags(base),
        f"--job.dump_folder={run}",
        "--training.steps=2",
        "--training.warmup_steps=1",
        "--training.mixed_precision_param=float32",
        HUB,
    ]
    codes, said = train(words, 1, tmp_path / "console")
    assert codes == [0], said
    branch = uploads_of(hub).branch("ada/tiny")
    assert "adapter_model.safetensors" in branch
    assert "model.safetensors" not in branch
    config = json.loads(branch["adapter_config.json"])
    assert config["base_model_name_or_path"] == "the-base"
    card = branch["README.md"].decode()
    assert "library_name: peft" in card
    assert "Adapters of the-base" in card
    assert not any(str(tmp_path).encode() in content for content in branch.values())


def _refused(folder: Path, *more: str, code: int = exit_codes.CONFIG) -> str:
    codes, said = train(flags(folder / "run", *more), 1, folder / "console")
    assert codes == [code], said
    assert not (folder / "run" / "metrics.jsonl").exists()
    return said


def test_what_cannot_be_uploaded_is_refused_before_the_first_step(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = _refused(tmp_path, "--checkpoint.hub=bob/tiny")
    assert "bob/tiny is not on the hub, and ada cannot make it" in said
    uploads = uploads_of(hub)
    uploads.make("ada/tiny")
    uploads.branch("ada/tiny")["model.safetensors"] = b"other"
    said = _refused(tmp_path, HUB)
    assert "checkpoint.hub: the branch main of ada/tiny holds weights" in said
    del uploads.branch("ada/tiny")["model.safetensors"]
    branches = uploads.repositories["ada/tiny"].branches
    branches["step-9"] = list(branches["main"])
    assert "ada/tiny holds steps of another run (branch step-9)" in _refused(tmp_path, HUB)
    del branches["step-9"]
    monkeypatch.setenv("HF_TOKEN", "hf_planted_bob")
    said = _refused(tmp_path, HUB)
    assert "checkpoint.hub: bob may not write to ada/tiny" in said
    assert "planted" not in said
    monkeypatch.setenv("HF_TOKEN", ADA)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in _refused(tmp_path, HUB)
    assert uploads.puts == []


def _problems(*words: str) -> str:
    with pytest.raises(ConfigError) as refused:
        check_config(["--job.config_file=debug_model.toml", *words])
    return str(refused.value)


def test_keys_that_contradict_each_other_are_refused() -> None:
    on = ["--checkpoint.enable_checkpoint", "--checkpoint.hub_ema"]
    assert 'OWNER/NAME, as "ada/tiny-llama"' in _problems("--checkpoint.hub=tiny")
    assert "optimizer.ema_decay is 0" in _problems(*on, HUB)
    said = _problems(*on, HUB, "--optimizer.ema_decay=0.9", "--checkpoint.model_weights_only")
    assert "finds no average in the last save" in said


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


@pytest.mark.parametrize("first", ["seen", "just before"])
def test_two_processes_that_read_a_checkpoint_pin_it_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The pin of the other one is there, or comes right after the look for it."""
    looks = [False] if first == "just before" else []
    look = pin._is_held
    monkeypatch.setattr(pin, "_is_held", lambda *about: looks.pop() if looks else look(*about))
    command = [sys.executable, "-c", PINS, str(tmp_path)]
    said: list[str] = []
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"pinned\n"

        def end(text: str) -> None:
            said.append(text)
            process.kill()

        with pinned(tmp_path, end):
            is_over = process.poll() is not None or bool(said)
            process.kill()
            process.wait()
            assert is_over and is_pinned(tmp_path)
    assert said == [f"another push reads {tmp_path}: waiting for its end"]
    assert list(tmp_path.iterdir()) == []
    # Of a user, who may make anything of that name.
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


@pytest.mark.slow
def test_other_machines_leave_after_rank_0_or_when_it_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    other = threading.Thread(target=Company(store).on_exit, args=(SimpleNamespace(requested=0),))
    monkeypatch.setattr(company, "_SILENCE", 1.0)
    other.start()
    for _ in range(15):
        store.add(company.ALIVE, 1)
        other.join(0.1)
    assert other.is_alive()
    store.add(company.DONE, 1)
    other.join(2)
    assert not other.is_alive()
    lost: Any = SimpleNamespace(requested=False)
    began = time.monotonic()
    Company(HashStore()).on_exit(lost)
    assert 1 < time.monotonic() - began < 5
    lost.requested = True
    Company(HashStore()).on_exit(lost)


@pytest.mark.slow
def test_a_push_that_reads_or_computes_makes_progress_and_one_that_waits_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.5)
    log = tmp_path / "push.log"
    log.write_text("exporting\nmain: 1 of 2: a.safetensors, 5.0 GB, 6.0 GB left\n")
    works = "import time\nwhile True: open('/dev/zero', 'rb').read(10); time.sleep(0.01)"
    for script, is_still in ((works, False), ("import time; time.sleep(600)", True)):
        with subprocess.Popen([sys.executable, "-c", script]) as process:
            time.sleep(1)
            found = progress.Progress(log)
            deadline = time.monotonic() + 5
            while not found.stands_still(process.pid, 1) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert (time.monotonic() < deadline) is is_still
            process.kill()
    assert found.line() == "main: 1 of 2: a.safetensors, 5.0 GB, 6.0 GB left"
    assert not found.stands_still(process.pid, 0), "one is done"
