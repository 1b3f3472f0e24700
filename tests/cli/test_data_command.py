"""`titanlite data`: reports of a run's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import Command
from tests.support.texts import TOKENIZER, rows_of, write_records
from titanlite.cli.look import Run, State, _history, sequences_of
from titanlite.config.data_sections import Data
from titanlite.data.corpus import tokenize
from titanlite.data.course import Course, StepSize
from titanlite.data.loader import TrainLoader
from titanlite.data.rows import IGNORE, Row, Rows
from titanlite.data.text_files import iter_records, list_files
from titanlite.runs.record import Start, begin


class Numbered(Rows):
    """Rows that are their numbers."""

    seq_len = 1
    total_sequences = None
    fingerprint = "ab" * 32
    settings: dict[str, Any] = {}

    def __init__(self) -> None:
        self.served: list[int] = []

    def sequence(self, index: int) -> Row:
        self.served.append(index)
        return self.padding()

    def padding(self) -> Row:
        return Row(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))

    def documents_in(self, index: int) -> list[tuple[int, int]]:
        return [(index, 1)]

    def describe(self) -> str:
        return "numbers"


def test_the_sequences_of_a_step_are_those_that_training_takes() -> None:
    """Steps 1 to 3 of 4 sequences, then two checkpoints with 6, and skipped ranges in both
    parts.
    """
    rows = Numbered()
    batches = []
    states = []

    def train(loader: TrainLoader, steps: int) -> dict[str, Any]:
        for _ in range(steps):
            rows.served.clear()
            loader.next_step()
            batches.append(list(rows.served))
        state = loader.state_dict()
        left_out = tuple(tuple(one) for one in state.get("left_out", ()))
        states.append(
            State(len(batches), state["next_sequence"], left_out, loader.global_batch_size)
        )
        return state

    data: Any = rows
    state = train(TrainLoader(data, 4, 4, skip=[(5, 7)]), 3)
    after = TrainLoader(data, 6, 6, skip=[(20, 21), (23, 30)])
    after.load_state_dict(state)
    train(after, 3)
    train(after, 2)

    class Config:
        course = Course.steady(StepSize(6, 1, 6))
        data = Data(skip_steps=[])

    config: Any = Config
    run = Run(config, TOKENIZER, data, states)
    assert [sequences_of(run, step) for step in range(1, 9)] == batches
    assert sequences_of(run, 10) == list(range(states[-1].position + 6, states[-1].position + 12))
    with pytest.raises(
        ValueError, match="between steps 0 and 6 the run changed its global batch or its place"
    ):
        sequences_of(Run(config, TOKENIZER, data, states[1:]), 2)


def test_at_step_names_records(tmp_path: Path, command: Command) -> None:
    text = write_records(tmp_path / "text")
    out = tmp_path / "out"
    command("prepare", text, "--out", out)
    common = ["--training.seq_len", 4, "--training.batch_size", 2, "--no-data.shuffle"]
    found = [
        command("at-step", 3, "--training.dataset_path", path, *common) for path in (out, text)
    ]
    assert found[0] == found[1]
    assert found[0][0] == 0
    lines = found[0][1].splitlines()
    assert lines[:2] == ["step 3: 2 sequences of 4 tokens", "sequence 4: 1 document"]
    place, _, start = lines[2].rpartition(": ")
    assert place == f"  document 1 = {text / '0.jsonl'}, record 2, 4 tokens"
    assert start in "file 0 record 1 word"
    source = (
        f"--data.source=[{{name='a', path='{text}', format='text', epochs=1}}, {{name='b', "
        f"path='{out}'}}]"
    )
    printed = command("at-step", 16, source, "--training.seq_len", 64, *common[2:])[1]
    assert f"document a: 2 = {text / '2.jsonl'}, record 1, 64 tokens" in printed
    answer = json.loads(command("at-step", 3, "--json", "--training.dataset_path", out, *common)[1])
    assert answer["sequences"]["4"][0]["record"] == 2
    (text / "0.jsonl").rename(text / "train.jsonl")
    (text / "1.jsonl").rename(text / "test.jsonl")
    of_split = ["--training.dataset_path", text, "--data.split", "test"]
    assert f"{text / 'test.jsonl'}, record 2," in command("at-step", 3, *of_split, *common)[1]


def test_a_run_without_a_good_checkpoint_has_the_ranks_of_its_last_attempt(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "step-1").mkdir(parents=True)
    begin(tmp_path, Start(config_toml="", steps=8, ranks=4, device="cpu"))
    assert _history(tmp_path) == ([], {}, 4)


def test_peek_shows_what_the_model_sees(tmp_path: Path, command: Command) -> None:
    text = write_records(tmp_path / "text", 1, 3)
    out = tmp_path / "out"
    command("prepare", text, "--out", out)
    rows = rows_of(out, epochs=1)
    config = ["--training.dataset_path", out, "--training.seq_len", 8, "--training.epochs", 1]
    code, printed = command("peek", *config, "--rows", 3, "--training.batch_size", 2)
    assert code == 0
    for n in range(3):
        row = rows.sequence(n)
        about = (
            f"step {1 + n // 2}, sequence {n}, rank 0: 8 tokens, {(row.labels != IGNORE).sum()} "
            "target"
        )
        shown = printed.partition(about)[2].partition("\n\nstep")[0].splitlines()[1:]
        body = (
            "".join(line for line in shown if not line.startswith("──"))
            .replace("[[", "")
            .replace("]]", "")
        )
        assert body.rstrip("\n") == TOKENIZER.decode(row.tokens.tolist()).rstrip("\n")
    code, printed = command(
        "peek", *config, "--rank", 1, "--world-size", 2, "--training.batch_size", 1, "--rows", 2
    )
    assert [line.split(",")[1] for line in printed.splitlines() if line.startswith("step")] == [
        " sequence 1",
        " sequence 3",
    ]
    assert command("peek", *config, "--rank", 2, "--world-size", 2)[0] == 2
    printed = command(
        "peek", *config, "--training.batch_size", 1, "--data.skip_steps=[1]", "--validation"
    )[1]
    assert "step 1, sequence 0, rank 0" in printed


def test_stats_count_the_text(tmp_path: Path, command: Command) -> None:
    text = write_records(tmp_path / "text")
    out = tmp_path / "out"
    command("prepare", text, "--out", out)
    lengths = np.diff(tokenize(list_files(text), TOKENIZER, 2304).offsets)
    for path in (out, text):
        words = [
            "--training.dataset_path",
            path,
            "--training.seq_len",
            10,
            "--training.batch_size",
            4,
        ]
        found = json.loads(command("stats", "--json", *words)[1])
        assert (found["documents"], found["tokens"]) == (60, lengths.sum())
        assert found["sequences_per_epoch"] == -(-lengths.sum() // 10)
        assert found["steps_per_epoch"] == found["sequences_per_epoch"] / 4
        expected = {
            str(low): int(((lengths >= low) & (lengths < 2 * low)).sum()) for low in (8, 16)
        }
        assert found["document_tokens"]["histogram"] == expected
        assert found["document_tokens"]["longest"] == lengths.max()
        size = sum(len(record.text) for record in iter_records(list_files(text)))
        assert found["bytes_per_token"] == pytest.approx(size / lengths.sum(), rel=0.05)
    for packing in ("split", "best-fit"):  # padding is no text
        words[3:4] = [4096, "--training.epochs", 1, "--data.packing", packing]
        padded = json.loads(
            command("stats", "--json", "--training.dataset_path", text, *words[2:])[1]
        )
        assert padded["bytes_per_token"] == pytest.approx(size / lengths.sum(), rel=1e-3)
        del words[4:8]
    words[3] = 10
    mixed = f"--data.source=[{{name='a', path='{text}', weight=3}}, {{name='b', path='{out}'}}]"
    sources = json.loads(command("stats", "--json", mixed, *words[2:])[1])["sources"]
    assert [one.pop("share") for one in sources.values()] == [0.75, 0.25]
    same = found.keys() - {"text", "bytes_per_token"}
    assert same == sources["a"].keys() - {"bytes_per_token"}
    assert all(sources["a"][key] == found[key] for key in same)
    assert command("stats", mixed, *words[2:])[1].count("tokens per document") == 2
