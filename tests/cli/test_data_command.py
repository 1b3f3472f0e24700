"""`titanlite data peek`: figures of a run's text, and its rows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from tests.support.commands import Command
from tests.support.texts import TOKENIZER, rows_of, write_records
from titanlite.data.rows import IGNORE
from titanlite.data.text_files import iter_records, list_files
from titanlite.data.tokenize_files import tokenize


def test_peek_shows_what_the_model_sees(tmp_path: Path, command: Command) -> None:
    text = write_records(tmp_path / "text", 1, 3)
    out = tmp_path / "out"
    command("prepare", text, "--out", out)
    rows = rows_of(out, epochs=1)
    config = ["--training.dataset_path", out, "--training.seq_len", 8, "--training.epochs", 1]
    code, printed = command("peek", *config, "--rows", 3)
    assert code == 0
    for n in range(3):
        row = rows.sequence(n)
        about = f"sequence {n}: 8 tokens, {(row.labels != IGNORE).sum()} target"
        shown = printed.partition(about)[2].partition("\n\nsequence")[0].partition("\n")[2]
        body = re.sub(r"(?m)^──.*\n|\[\[|\]\]|\n", "", shown)
        assert body == TOKENIZER.decode(row.tokens.tolist()).replace("\n", "")
    code, late = command("peek", *config, "--first", 2, "--rows", 1)
    assert late.endswith(printed[printed.index("sequence 2: ") :])
    assert "sequence 1: " not in late
    assert "--first 1000: the text has" in command("peek", *config, "--first", 1000)[1]


def test_peek_names_the_record_of_each_document(tmp_path: Path, command: Command) -> None:
    text = write_records(tmp_path / "text")
    out = tmp_path / "out"
    command("prepare", text, "--out", out)
    common = ["--training.seq_len", 4, "--no-data.shuffle", "--rows", 1, "--first", 4]
    printed = command("peek", "--training.dataset_path", out, *common)[1]
    assert f"── document 1 = {text / '0.jsonl'}, record 2 ──\n" in printed
    source = f"--data.source=[{{name='a', path='{out}'}}, {{name='c4_test'}}]"
    assert "── document a: 0 = " in command("peek", source, *common, "--rows", 4)[1]


def test_peek_begins_with_the_figures_of_the_text(tmp_path: Path, command: Command) -> None:
    text = write_records(tmp_path / "text")
    out = tmp_path / "out"
    command("prepare", text, "--out", out)
    lengths = np.diff(tokenize(list_files(text), TOKENIZER, 2304).offsets)
    size = sum(len(record.text) for record in iter_records(list_files(text)))
    mean = f"60 documents of {lengths.mean():.1f} tokens ({lengths.max()} at most), "
    words = ["--training.seq_len", 10, "--training.batch_size", 4, "--rows", 0]
    sequences = -(-int(lengths.sum()) // 10)
    for path, about in ((out, f"{size / 1024:.1f} KiB of text"), (text, f"{size:,} characters")):
        lines = command("peek", "--training.dataset_path", path, *words)[1].splitlines()
        assert f"{mean}{about}" in lines
        assert (
            f"{sequences} sequences of 10 tokens per epoch, {sequences / 4:.4g} steps of 4" in lines
        )
    mixed = f"--data.source=[{{name='a', path='{text}', weight=3}}, {{name='b', path='{out}'}}]"
    printed = command("peek", mixed, *words)[1]
    assert f"a: 75.00% of the tokens, {mean}" in printed
    assert f"b: 25.00% of the tokens, {mean}" in printed
    held_out = command("peek", *words, "--validation", "--rows", 1)[1]
    assert "sequence 0: 10 tokens, 10 targets" in held_out
