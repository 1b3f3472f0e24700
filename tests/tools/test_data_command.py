"""`titanlite data`: the same tokens after any crash, and reports of a run's text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import ended
from titanlite.checkpoint.manifest import FILE, Manifest
from titanlite.config.sections import Data, Training
from titanlite.data.corpus import tokenize
from titanlite.data.loader import TrainLoader
from titanlite.data.rows import IGNORE, Stateless
from titanlite.data.sources import BUNDLED, iter_records, list_files
from titanlite.data.text import build_dataset
from titanlite.data.packing import PackedDataset
from titanlite.data.tokenizer import load_tokenizer
from titanlite.runs.lock import RunLock
from titanlite.tools import cli
from titanlite.tools.look import Run, State, sequences_of

TOKENIZER = load_tokenizer()
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `titanlite data` in this process; return its exit code and all that it prints."""

    def run(*words: object) -> tuple[int, str]:
        code = cli.main(["data", *map(str, words)])
        out, error = capfd.readouterr()
        return code, out + error

    return run


def write_records(folder: Path, files: int = 3, records: int = 20) -> Path:
    folder.mkdir()
    for n in range(files):
        texts = [f"file {n} record {i} " + "word " * (i % 7) for i in range(records)]
        (folder / f"{n}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows_of(folder: Path, **settings: Any) -> PackedDataset:
    found = build_dataset(Training(dataset_path=str(folder), seq_len=8, **settings), Data(), TOKENIZER, 2304)
    assert isinstance(found, PackedDataset)
    return found


def test_the_tokens_are_those_of_training_on_text(tmp_path: Path, command: Command) -> None:
    text = write_records(tmp_path / "text")
    code, out = command("prepare", text, "--out", tmp_path / "one", "--part-tokens", 200, "--workers", 1)
    assert code == 0 and "one: 60 documents, " in out
    corpus = tokenize(list_files(text), TOKENIZER, TOKENIZER.vocab_size)
    files = rows_of(tmp_path / "one").files
    assert files.read(0, files.size).tolist() == corpus.tokens.tolist()
    assert np.diff(files.offsets).tolist() == np.diff(corpus.offsets).tolist()
    records = list(iter_records(list_files(text)))
    assert [files.place_of(n) for n in range(60)] == [(str(record.file), record.number) for record in records]
    size = sum(len(record.text) for record in records)
    assert files.index is not None and files.index["text_bytes"] == size
    assert f"{size / files.size:.2f} bytes per token" in out
    assert len(files.parts) > 3
    command("prepare", text, "--out", tmp_path / "two", "--part-tokens", 200, "--workers", 3)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    command("prepare", text, "--out", tmp_path / "whole")
    assert rows_of(tmp_path / "whole").files.read(0, files.size).tolist() == corpus.tokens.tolist()


def test_prompts_are_masked(tmp_path: Path, command: Command) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "one two", "a": " three"}\n{"q": "four", "a": " five six"}\n')
    keys = "--prompt-key", "q", "--completion-key", "a"
    assert command("prepare", tmp_path / "a.jsonl", "--out", tmp_path / "out", *keys)[0] == 0
    rows = rows_of(tmp_path / "out", epochs=1)
    files = rows.corpus
    ids, targets = files.read(0, files.size), files.is_target(0, files.size)
    assert TOKENIZER.decode(ids[targets].tolist()) == " three<|end_of_text|> five six<|end_of_text|>"
    assert TOKENIZER.decode(ids[~targets].tolist()) == "<|begin_of_text|>one two<|begin_of_text|>four"
    config = ["--training.dataset_path", tmp_path / "out", "--training.seq_len", 16, "--training.epochs", 1]
    code, out = command("peek", *config, "--no-data.shuffle", "--ids", "--rows", 9)
    assert code == 0 and "[[one two]]" in out.replace("<|begin_of_text|>", "") and "three" in out


def test_after_kill_9_the_result_is_that_of_an_undisturbed_run(tmp_path: Path, command: Command) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    source = BUNDLED["c4_test"]
    words = ["prepare", str(source), "--part-tokens", "15000", "--workers", "2", "--out"]
    assert command(*words, whole)[0] == 0
    assert len(list(whole.glob("*.tokens"))) > 100
    process = subprocess.Popen([sys.executable, "-m", "titanlite", "data", *words, str(killed)])
    deadline = time.monotonic() + 60
    while len(list(killed.glob("part-*.json"))) < 8:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all(ended(int(worker)) for worker in workers)  # they end with their parent
    done = sorted(killed.glob("part-*.json"))
    assert 8 <= len(done) < len(list(whole.glob("*.tokens"))) and not (killed / "index.json").exists()
    kept, damaged = done[0].with_suffix(".tokens"), done[1].with_suffix(".tokens")
    inode, content = os.stat(kept).st_mtime_ns, bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    code, out = command(*words, killed)
    assert code == 0 and os.stat(kept).st_mtime_ns == inode
    assert contents(killed) == contents(whole)
    # A finished folder is checked, and what is damaged is made again.
    assert "killed is complete already, and its checksums are right" in command(*words, killed)[1]
    damaged.write_bytes(content)
    assert "complete already" not in command(*words, killed)[1]
    assert contents(killed) == contents(whole) and os.stat(kept).st_mtime_ns == inode


def test_a_changed_file_is_tokenized_again(tmp_path: Path, command: Command) -> None:
    text, out = write_records(tmp_path / "text"), tmp_path / "out"
    words = ["prepare", text, "--out", out, "--part-tokens", 100, "--workers", 1]
    (text / "2.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    code, printed = command(*words)
    assert code == 2 and "2.jsonl, line 2" in printed and not (out / "index.json").exists()
    first = {path.name: path.stat().st_mtime_ns for path in out.glob("part-00000*")}
    assert first
    (out / ".part-00000-0000.json.1").touch()  # half-written by a process that was killed
    write_records(tmp_path / "again")
    os.replace(tmp_path / "again" / "2.jsonl", text / "2.jsonl")
    assert command(*words)[0] == 0
    assert command(*words[:3], tmp_path / "fresh", *words[4:])[0] == 0
    assert contents(out) == contents(tmp_path / "fresh")
    assert all((out / name).stat().st_mtime_ns == time for name, time in first.items() if not name.endswith("json"))


def test_it_writes_into_no_other_folder(tmp_path: Path, command: Command) -> None:
    text, out = write_records(tmp_path / "text"), tmp_path / "out"
    with RunLock(out):
        code, printed = command("prepare", text, "--out", out)
        assert code == 2 and f"{out} is being prepared by another process" in printed and str(os.getpid()) in printed
    assert command("prepare", text, "--out", out)[0] == 0
    before = contents(out)
    for other in (["--text-key", "body"], ["--part-tokens", "9"]):
        code, printed = command("prepare", text, "--out", out, *other)
        assert code == 2 and "holds other tokens" in printed
    code, printed = command("prepare", text, "--out", text)
    assert code == 2 and "text holds other files (0.jsonl, …)" in printed
    assert contents(out) == before and len(contents(text)) == 3
    code, printed = command("prepare", tmp_path / "none", "--out", tmp_path / "new")
    assert code == 2 and f"SOURCE: {tmp_path / 'none'} does not exist" in printed
    (tmp_path / "empty.jsonl").touch()
    code, printed = command("prepare", tmp_path / "empty.jsonl", "--out", tmp_path / "new")
    assert code == 2 and "empty.jsonl holds no records" in printed


def test_a_disk_that_is_too_small_is_named_first(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    code, printed = command("prepare", write_records(tmp_path / "text"), "--out", tmp_path / "out")
    assert code == 2 and "or more, and 10 B are free" in printed and not list(tmp_path.glob("out/part-*"))


# Looking


class Numbered(Stateless):
    """Rows that are their numbers."""

    seq_len, total_sequences = 1, None

    def __init__(self) -> None:
        self.served: list[int] = []

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray, None]:
        self.served.append(index)
        return np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), None


def test_the_sequences_of_a_step_are_those_that_training_takes() -> None:
    """Steps 1 to 3 of 4 sequences, then two checkpoints with 6, and skipped ranges in both parts."""
    rows = Numbered()
    batches, states = [], []

    def train(loader: TrainLoader, steps: int) -> dict[str, Any]:
        for _ in range(steps):
            rows.served.clear()
            loader.next_step()
            batches.append(list(rows.served))
        state = loader.state_dict()
        left_out = tuple(tuple(one) for one in state.get("left_out", ()))
        states.append(State(len(batches), state["next_sequence"], left_out, loader.global_batch_size))
        return state

    data: Any = rows
    state = train(TrainLoader(data, 4, 4, skip=[(5, 7)]), 3)
    after = TrainLoader(data, 6, 6, skip=[(20, 21), (23, 30)])
    after.load_state_dict(state)
    train(after, 3)
    train(after, 2)

    class Batch:
        global_batch_size = 6

    class Config:
        batch, data = Batch, Data(skip_steps=[])

    config: Any = Config
    run = Run(config, TOKENIZER, data, states)
    assert [sequences_of(run, step) for step in range(1, 9)] == batches
    assert sequences_of(run, 10) == list(range(states[-1].position + 6, states[-1].position + 12))
    with pytest.raises(ValueError, match="between steps 0 and 6 the run changed its global batch or its place"):
        sequences_of(Run(config, TOKENIZER, data, states[1:]), 2)


def test_at_step_names_records(tmp_path: Path, command: Command) -> None:
    text, out = write_records(tmp_path / "text"), tmp_path / "out"
    command("prepare", text, "--out", out)
    common = ["--training.seq_len", 4, "--training.batch_size", 2, "--no-data.shuffle"]
    found = [command("at-step", 3, "--training.dataset_path", path, *common) for path in (out, text)]
    assert found[0] == found[1] and found[0][0] == 0
    lines = found[0][1].splitlines()
    assert lines[:2] == ["step 3: 2 sequences of 4 tokens", "sequence 4: 1 document"]
    assert lines[2] == f"  document 1 = {text / '0.jsonl'}, record 2: file 0 record 1 word"
    answer = json.loads(command("at-step", 3, "--json", "--training.dataset_path", out, *common)[1])
    assert answer["sequences"]["4"][0]["record"] == 2


def test_at_step_follows_the_checkpoints_of_a_run(tmp_path: Path, command: Command) -> None:
    text, run = write_records(tmp_path / "text"), tmp_path / "run"
    folder = run / "checkpoint" / "step-2"
    folder.mkdir(parents=True)
    toml = f'[training]\ndataset_path = "{text}"\nseq_len = 4\nbatch_size = 3\n[data]\nshuffle = false\n'
    (run / "config.toml").write_text(toml)
    print_of = build_dataset(Training(dataset_path=str(text), seq_len=4), Data(), TOKENIZER, 2304).fingerprint[:16]
    train = {"data": {"next_sequence": 6, "left_out": [[1, 3]]}, "global_batch": 2}
    manifest = Manifest(2, {"data": print_of}, {}, {}, train, {}, 1, time.time(), {"toml": toml})
    (folder / FILE).write_text(manifest.to_json())

    def sequences(step: int) -> list[str]:
        code, out = command("at-step", step, run, "--json")
        assert code == 0, out
        return list(json.loads(out)["sequences"])

    assert [sequences(step) for step in (1, 2, 3)] == [["0", "3"], ["4", "5"], ["6", "7", "8"]]
    (text / "1.jsonl").write_text('{"text": "other"}\n')
    code, out = command("at-step", 1, folder)
    assert code == 2 and f"the text has changed since: its fingerprint was {print_of}, and is" in out


def test_peek_shows_what_the_model_sees(tmp_path: Path, command: Command) -> None:
    text, out = write_records(tmp_path / "text", 1, 3), tmp_path / "out"
    command("prepare", text, "--out", out)
    rows = rows_of(out, epochs=1)
    config = ["--training.dataset_path", out, "--training.seq_len", 8, "--training.epochs", 1]
    code, printed = command("peek", *config, "--rows", 3, "--training.batch_size", 2)
    assert code == 0
    for n in range(3):
        row = rows.sequence(n)
        about = f"step {1 + n // 2}, sequence {n}, rank 0: 8 tokens, {(row.labels != IGNORE).sum()} target"
        shown = printed.partition(about)[2].partition("\n\nstep")[0].splitlines()[1:]
        body = "".join(line for line in shown if not line.startswith("──")).replace("[[", "").replace("]]", "")
        assert body.rstrip("\n") == TOKENIZER.decode(row.tokens.tolist()).rstrip("\n")
    code, printed = command("peek", *config, "--rank", 1, "--world-size", 2, "--training.batch_size", 1, "--rows", 2)
    assert [line.split(",")[1] for line in printed.splitlines() if line.startswith("step")] == [
        " sequence 1",
        " sequence 3",
    ]
    assert command("peek", *config, "--rank", 2, "--world-size", 2)[0] == 2


def test_stats_count_the_text(tmp_path: Path, command: Command) -> None:
    text, out = write_records(tmp_path / "text"), tmp_path / "out"
    command("prepare", text, "--out", out)
    lengths = np.diff(tokenize(list_files(text), TOKENIZER, 2304).offsets)
    for path in (out, text):
        words = ["--training.dataset_path", path, "--training.seq_len", 10, "--training.batch_size", 4]
        found = json.loads(command("stats", "--json", *words)[1])
        assert (found["documents"], found["tokens"]) == (60, lengths.sum())
        assert found["sequences_per_epoch"] == -(-lengths.sum() // 10)
        assert found["steps_per_epoch"] == found["sequences_per_epoch"] / 4
        expected = {str(low): int(((lengths >= low) & (lengths < 2 * low)).sum()) for low in (8, 16)}
        assert found["document_tokens"]["histogram"] == expected
        assert found["document_tokens"]["longest"] == lengths.max()
        size = sum(len(record.text) for record in iter_records(list_files(text)))
        assert found["bytes_per_token"] == pytest.approx(size / lengths.sum(), rel=0.05)
    assert "tokens per document" in command("stats", *words)[1]
