"""`titanlite data prepare`: the same tokens from any source, on any number of processes, after any
crash.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import flip
from tests.support.processes import ended, environment, until
from tests.support.texts import (
    CLONE,
    TOKENIZER,
    contents,
    rows_of,
    write_files,
    write_records,
    write_texts,
)
from titanlite.config.errors import ConfigError
from titanlite.data.dataset_builder import TextReader
from titanlite.data.prepared_tokens import checksum_of, fingerprint_of
from titanlite.data.rows import IGNORE
from titanlite.data.text_files import BUNDLED, iter_records, list_files
from titanlite.data.text_report import file_lines, file_warnings, pass_warnings
from titanlite.data.token_files import TokenFiles
from titanlite.data.token_paths import INDEX
from titanlite.data.tokenize_files import tokenize
from titanlite.resolve.load import load_config
from titanlite.runs.lock import RunLock


def files_of(folder: Path) -> TokenFiles:
    found = rows_of(folder).corpus
    assert isinstance(found, TokenFiles)
    return found


def test_the_tokens_are_those_of_training_on_text(tmp_path, command):
    text = write_records(tmp_path / "text")
    code, out = command("prepare", text, "--out", tmp_path / "out")
    assert code == 0
    assert "out: 60 documents, " in out
    corpus = tokenize(list_files(text), TOKENIZER, TOKENIZER.vocab_size)
    files = files_of(tmp_path / "out")
    assert files.read(0, files.size).tolist() == corpus.tokens.tolist()
    assert files.offsets.tolist() == corpus.offsets.tolist()
    records = list(iter_records(list_files(text)))
    assert [files.place_of(n) for n in range(60)] == [
        (str(record.file), record.number) for record in records
    ]
    size = sum(len(record.text) for record in records)
    assert f"{size / files.size:.2f} bytes per token" in out


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_large_file_is_shared_by_any_number_of_processes(tmp_path, command, kind):
    texts = [f"record {n} " + "word " * (n * 7 % 40) for n in range(300)]
    file = tmp_path / f"big.{kind}"
    if kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").table({"text": texts})
        parquet.write_table(table, file, row_group_size=7, compression="none", use_dictionary=False)
    else:
        # Empty lines are no documents.
        write_texts(file, [*texts[:150], "", "", *texts[150:]], {151: "", 152: ""})
    if kind == "jsonl.gz":
        file.write_bytes(gzip.compress(file.read_bytes()))
    for workers in (1, 3):
        words = ["prepare", file, "--part-tokens", 400, "--workers", workers]
        assert command(*words, "--out", tmp_path / str(workers))[0] == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    corpus = tokenize([file], TOKENIZER, TOKENIZER.vocab_size)
    files = files_of(tmp_path / "1")
    assert files.read(0, files.size).tolist() == corpus.tokens.tolist()
    assert files.offsets.tolist() == corpus.offsets.tolist()
    groups = {part.file.name[:10] for part in files.parts}
    assert len(groups) == 1 if kind == "jsonl.gz" else len(groups) > 10


def test_an_error_in_a_large_file_names_the_place(tmp_path, command):
    text = write_texts(tmp_path / "a.jsonl", ["good"] * 41, {21: '{"text": 3}'})
    code, printed = command("prepare", text, "--out", tmp_path / "out", "--part-tokens", 30)
    assert code == 2
    assert "a.jsonl from byte 272 on, line 5: the key 'text' must be a string" in printed


def test_prompts_are_no_targets(tmp_path, command):
    records = [{"q": "why " * (n % 5) + "ask", "a": " say" + " so" * n} for n in range(9)]
    text = tmp_path / "a.jsonl"
    out = tmp_path / "out"
    text.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["--prompt-key", "q", "--completion-key", "a"]
    assert command("prepare", text, "--out", out, *words)[0] == 0
    files = files_of(out)
    ids = files.read(0, files.size)[files.is_target(0, files.size)]
    ends = TOKENIZER.decode([TOKENIZER.eos_id])
    assert TOKENIZER.decode(ids.tolist()) == "".join(record["a"] + ends for record in records)
    config = ["--training.dataset_path", out, "--training.seq_len", 16, "--no-data.shuffle"]
    code, printed = command("peek", *config, "--rows", 2)
    assert code == 0
    assert "[[ask]] say" in printed


@pytest.mark.slow
def test_after_kill_9_the_result_is_that_of_an_undisturbed_run(tmp_path, command):
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    records = itertools.islice(iter_records(BUNDLED["c4_test"]), 800)
    text = write_texts(tmp_path / "text.jsonl", [record.text for record in records])
    words = ["prepare", text, "--part-tokens=5000", "--workers=1", "--tokenizer=bundled", "--out"]
    assert command(*words, whole)[0] == 0
    assert len(list(whole.glob("*.tokens"))) > 100
    process = subprocess.Popen(
        [sys.executable, "-m", "titanlite", "data", *words, killed, "--workers", "2"],
        env=environment(),
    )
    until(lambda: process.poll() is not None or len(list(killed.glob("part-*.json"))) >= 8)
    assert process.returncode is None
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all(ended(int(worker)) for worker in workers)  # they end with their parent
    done = sorted(killed.glob("part-*.json"))
    assert 8 <= len(done) < len(list(whole.glob("*.tokens")))
    assert not (killed / "index.json").exists()
    kept = done[0].with_suffix(".tokens")
    damaged = done[1].with_suffix(".tokens")
    written = os.stat(kept).st_mtime_ns
    flip(damaged)
    assert command(*words, killed)[0] == 0
    assert os.stat(kept).st_mtime_ns == written
    assert contents(killed) == contents(whole)
    # A finished folder is checked, and what is damaged is made again.
    flip(damaged)
    assert "complete already" not in command(*words, killed)[1]
    assert contents(killed) == contents(whole)
    assert "killed is complete already, and its checksums are right" in command(*words, killed)[1]
    assert os.stat(kept).st_mtime_ns == written


@pytest.mark.slow
def test_a_changed_file_is_tokenized_again(tmp_path, command):
    text = write_records(tmp_path / "text")
    out = tmp_path / "out"
    words = ["prepare", text, "--part-tokens", 100, "--workers", 1, "--out"]
    (text / "2.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    code, printed = command(*words, out)
    assert code == 2
    assert "2.jsonl, line 2" in printed
    assert not (out / "index.json").exists()
    first = {path.name: path.stat().st_mtime_ns for path in out.glob("part-00000*.tokens")}
    assert first
    write_records(tmp_path / "again")
    os.replace(tmp_path / "again" / "2.jsonl", text / "2.jsonl")
    for folder in (out, tmp_path / "fresh"):
        assert command(*words, folder)[0] == 0
    assert contents(out) == contents(tmp_path / "fresh")
    assert all((out / name).stat().st_mtime_ns == time for name, time in first.items())


def test_what_a_failed_call_says_and_leaves_fits_the_right_call(tmp_path, command):
    content = {"talk": [{"role": "assistant", "content": "a"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(content) + "\n")
    words = ["prepare", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--chat-template=plain"]
    code, printed = command(*words, "--messages-key=other")
    assert code == 2
    assert "--messages-key" in printed
    assert "data." not in printed
    code, printed = command(*words, "--messages-key=talk")
    assert code == 0, printed


def test_an_index_that_was_changed_or_names_files_outside_is_refused(tmp_path, command):
    text = write_records(tmp_path / "text")
    out = tmp_path / "out"
    assert command("prepare", text, "--out", out)[0] == 0
    index = json.loads((out / INDEX).read_text())
    (out / INDEX).write_text(json.dumps({**index, "options": []}))
    reading = ["peek", "--training.dataset_path", out, "--training.seq_len", 8]
    code, printed = command(*reading)
    assert code == 2
    assert "index.json is damaged (it does not fit its checksum)" in printed
    for outside in ({"name": "../outside"}, {"bytes": {"tokens/../../outside": 1}}):
        changed = {**index, "parts": [{**index["parts"][0], **outside}]}
        changed["fingerprint"] = fingerprint_of(changed)
        changed["checksum"] = checksum_of(changed)
        (out / INDEX).write_text(json.dumps(changed))
        for words in (["prepare", text, "--out", out], reading):
            code, printed = command(*words)
            assert code == 2
            assert "which is no part of this folder" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"text", "out"}
    # Folders of older versions have no checksum.
    del index["checksum"]
    (out / INDEX).write_text(json.dumps(index))
    assert command(*reading)[0] == 0


@pytest.mark.slow
def test_it_writes_into_no_other_folder(tmp_path, command):
    text = write_records(tmp_path / "text")
    out = tmp_path / "out"
    with RunLock(out):
        code, printed = command("prepare", text, "--out", out)
        assert code == 2
        assert f"{out} is being prepared by another process" in printed
    assert command("prepare", text, "--out", out)[0] == 0
    before = contents(out)
    new = tmp_path / "new"
    for words, error in (
        ([text, "--out", out, "--text-key=body"], f"holds tokens of {text} with another options"),
        ([text, "--out", text], "text holds other files (0.jsonl, …)"),
        ([tmp_path / "none", "--out", new], f"SOURCE: {tmp_path / 'none'} does not exist"),
        ([text, "--subset=en", "--out", new], "--subset is of data sets of the hub"),
    ):
        code, printed = command("prepare", *words)
        assert code == 2
        assert error in printed
    assert contents(out) == before
    assert len(contents(text)) == 3


# `titanlite data peek`


def test_peek_shows_what_the_model_sees(tmp_path, command):
    text = write_records(tmp_path / "text", 1, 3)
    out = tmp_path / "out"
    command("prepare", text, "--out", out)
    rows = rows_of(out, epochs=1)
    config = ["--training.dataset_path", out, "--training.seq_len", 8, "--training.epochs", 1]
    code, printed = command("peek", *config, "--rows", 3)
    assert code == 0
    assert f"{rows.total_sequences} sequences of 8 tokens per epoch, " in printed
    assert f"── document 0 = {text / '0.jsonl'}, record 1 ──\n" in printed
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


# Folders that leave a choice of text


def test_configs_and_commands_refuse_before_any_work(tmp_path, command):
    clone = write_files(tmp_path / "clone", *CLONE)
    keys = [
        f"--training.dataset_path={clone}",
        "--validation.enable=true",
        f"--validation.dataset_path={clone}",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config("debug_model.toml", 1, keys)
    assert [(problem.key, problem.code) for problem in caught.value.problems] == [
        ("training.dataset_path", "unclear-text"),
        ("validation.dataset_path", "unclear-text"),
    ]
    chosen = ["--data.split=train", "--validation.split=test"]
    run = load_config("debug_model.toml", 1, [*keys, *chosen])
    held_out = TextReader(run.data, TOKENIZER, 2304).held_out(run.validation, 8)[""]
    assert [Path(name).name for name in held_out.listing.files] == [Path(CLONE[-1]).name]
    source = f"--data.source=[{{path='{clone}'}}]"
    with pytest.raises(ConfigError, match=r"data\.source\[0\]\.path"):
        load_config("debug_model.toml", 1, [source])
    prepare = ["prepare", clone, "--out", tmp_path / "out"]
    for words in (["peek", keys[0]], prepare):
        code, printed = command(*words)
        assert code == 2
        assert "of several splits" in printed
        assert "2 files of parquet, split train" in printed
    code, printed = command(*prepare, "--split=train", "--workers=1")
    assert code == 0
    assert "2 documents" in printed


def test_the_start_report_names_files_and_warns(tmp_path):
    clone = write_files(tmp_path / "clone", *CLONE)
    keys = [f"--training.dataset_path={clone}/data/*.parquet", "--training.seq_len=8"]
    run = load_config("debug_model.toml", 1, keys)
    train = TextReader(run.data, TOKENIZER, 2304).train(run.training)
    assert next(iter(file_lines(train))).startswith("3 files of parquet (")
    several, passes = [*file_warnings(train, "mine"), *pass_warnings(train, "mine", 1000)]
    assert several.startswith("mine: the pattern finds files of several splits")
    assert passes.startswith("mine: the run reads this text ")
    assert list(pass_warnings(train, "mine", 8 * train.sequences_per_epoch)) == []
