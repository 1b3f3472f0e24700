"""Records of other trainers: their ids and targets, and bad records."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.hf import bundled_as_json
from tests.support.pool import Pools
from tests.support.same_batches import check_ranks_and_resumes
from tests.support.texts import LLAMA3
from tests.support.tiny import TWO_LAYERS
from titanlite.assembly.build import build
from titanlite.cli import main as cli
from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.errors import ConfigError
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.chat import encode_chat, load_template
from titanlite.data.hashes import add_hashes, batch_hash
from titanlite.data.record_forms import Alpaca, ShareGPT, form_columns, plain
from titanlite.data.records import Columns, strings_of
from titanlite.data.rows import IGNORE, Rows
from titanlite.data.text import TextReader, build_dataset
from titanlite.data.text_files import TextFiles
from titanlite.data.token_cache import _Text
from titanlite.data.tokenizer import load_tokenizer
from titanlite.dist.dist_env import DistEnv
from titanlite.resolve.load import load_config

TOKENIZER = load_tokenizer()

SHAREGPT = [
    [{"from": "human", "value": f"What is {n}?"}, {"from": "gpt", "value": f"It is {n}."}]
    for n in range(12)
]
SHAREGPT[1] = [
    {"from": "system", "value": "Be brief — naïve."},
    {"from": "user", "value": " 1 + 1? "},
    {"from": "assistant", "value": "\n2\n"},
    {"from": "human", "value": "and more\n"},
    {"from": "gpt", "value": "3 " * 20},
]
#: The roles of these turns, as trainers of this field read them.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
MESSAGES = [
    [{"role": ROLES.get(one["from"], "system"), "content": one["value"]} for one in turns]
    for turns in SHAREGPT
]
ALPACA = [
    {"instruction": f"Add {n} {{x}}.", "input": "" if n % 2 else f"1\n{n}", "output": f"So {n}."}
    for n in range(12)
]
COMPLETIONS = [{"prompt": f"Question {n}?\n", "completion": f" Answer {n}."} for n in range(12)]
RECORDS: dict[str, list[dict[str, Any]]] = {
    "sharegpt": [{"conversations": turns} for turns in SHAREGPT],
    "messages": [{"messages": turns} for turns in MESSAGES],
    "alpaca": ALPACA,
    "completion": COMPLETIONS,
}
#: As train.py of tatsu-lab/stanford_alpaca builds them.
PROMPT_INPUT = """Below is an instruction that describes a task, paired with an input that \
provides further context. Write a response that appropriately completes the request.

### Instruction:
{0}

### Input:
{1}

### Response:"""
PROMPT_NO_INPUT = """Below is an instruction that describes a task. Write a response that \
appropriately completes the request.

### Instruction:
{0}

### Response:"""


def lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def as_csv(path: Path, records: list[dict[str, Any]], delimiter: str = ",") -> Path:
    """Write strings as they are, and lists as JSON."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(records[0])
        for one in records:
            writer.writerow(
                value if isinstance(value, str) else json.dumps(value) for value in one.values()
            )
    return path


def as_parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=5)
    return path


def read(path: Path, tokenizer: Any = TOKENIZER, **data: Any) -> Rows:
    epochs = None if data.get("streaming") else 1
    training = Training(dataset_path=str(path), seq_len=16, epochs=epochs)
    return build_dataset(training, Data(shuffle=False, **data), tokenizer, tokenizer.vocab_size)


def tokens_of(rows: Rows) -> list[list[int]]:
    """Ids of all rows, and their labels."""
    found = [rows.sequence(n) for n in range(rows.total_sequences or 0)]
    return [one for row in found for one in (row.tokens.tolist(), row.labels.tolist())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as transformers saves it, with a template beside it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=bundled_as_json(), **names)
    theirs.chat_template = LLAMA3
    theirs.save_pretrained(folder)
    return folder


def test_sharegpt_has_the_ids_of_transformers_by_the_tokenizers_template(
    folder: Path, tmp_path: Path
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    path = lines(tmp_path / "a.jsonl", RECORDS["sharegpt"])
    rows = read(path, load_tokenizer(str(folder)), record="sharegpt")
    expected = [theirs.apply_chat_template(chat)["input_ids"] for chat in MESSAGES]
    assert rows.corpus is not None
    offsets = rows.corpus.offsets.tolist()
    found = [
        rows.corpus.read(begin, end).tolist()
        for begin, end in zip(offsets, offsets[1:], strict=False)
    ]
    assert found == expected


def test_the_plain_template_has_the_masks_of_transformers(folder: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    theirs.chat_template = plain.SOURCE
    ours = load_tokenizer(str(folder))
    template = load_template("plain", ours)
    for chat in MESSAGES:
        ids, mask = encode_chat(template.render(chat, "here"), ours)
        expected = theirs.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids.tolist() == expected["input_ids"]
        assert mask.astype(int).tolist() == expected["assistant_masks"]
    text = template.render(MESSAGES[1][:3], "here").translate({0xFDD0: "«", 0xFDD1: "»"})
    assert text == (
        "<|begin_of_text|>System: Be brief — naïve.\nUser:  1 + 1? \n"
        "Assistant:« \n2\n<|end_of_text|>»"
    )
    prompt = template.prompt(MESSAGES[1][:2], "here")
    assert text.replace("«", "").startswith(prompt)
    assert prompt.endswith("\nAssistant:")


def test_a_tokenizer_without_a_template_takes_the_plain_one_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = lines(tmp_path / "a.jsonl", RECORDS["messages"])
    with caplog.at_level(logging.INFO, logger="titanlite"):
        chosen = read(path, record="messages")
    assert "rendered by the plain chat template" in caplog.text
    assert tokens_of(chosen) == tokens_of(
        read(path, messages_key="messages", chat_template="plain")
    )
    with pytest.raises(DataError, match=r'name a Jinja file, or "plain"'):
        read(path, messages_key="messages")


def test_alpaca_has_its_published_template_and_targets_of_the_output_alone(tmp_path: Path) -> None:
    rows = read(lines(tmp_path / "a.jsonl", ALPACA), record="alpaca")
    ids: list[int] = []
    targets: list[int] = []
    for one in ALPACA:
        form = PROMPT_INPUT if one["input"] else PROMPT_NO_INPUT
        filled = form.replace("{0}", one["instruction"]).replace("{1}", one["input"])
        prompt = [TOKENIZER.bos_id, *TOKENIZER.encode(filled)]
        output = [*TOKENIZER.encode(one["output"]), TOKENIZER.eos_id]
        ids += prompt + output
        targets += [IGNORE] * len(prompt) + output
    assert rows.corpus is not None
    assert rows.corpus.read(0, rows.corpus.size).tolist() == ids
    found = [rows.sequence(n) for n in range(len(targets) // 16)]
    labels = np.concatenate([row.labels for row in found]).tolist()
    assert labels == targets[1 : len(labels) + 1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", RECORDS)
def test_every_kind_of_file_has_the_same_targets(tmp_path: Path, form: str) -> None:
    records = RECORDS[form]
    kinds = [
        lines(tmp_path / "a.jsonl", records),
        as_parquet(tmp_path / "a.parquet", records),
        as_csv(tmp_path / "a.csv", records),
        as_csv(tmp_path / "semicolons.csv", records, ";"),
    ]
    wanted = tokens_of(read(kinds[0], record=form))
    assert sum(label != IGNORE for part in wanted[1::2] for label in part) > 50
    for path in kinds:
        assert tokens_of(read(path, record=form)) == wanted
        if form != "completion":  # its fields are no text
            with pytest.raises(DataError, match=r"text_key, or the form by data\.record"):
                read(path)
    out = tmp_path / "out"
    words = ["data", "prepare", str(kinds[1]), "--out", str(out), "--workers", "1"]
    assert cli.main([*words, "--tokenizer=bundled", "--record", form]) == 0
    assert tokens_of(read(out)) == tokens_of(read(out, record=form)) == wanted
    other = "alpaca" if form != "alpaca" else "sharegpt"
    with pytest.raises(DataError, match=r"data\.record: .* has no effect on .*; leave the key out"):
        read(out, record=other)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("form", ["sharegpt", "alpaca"])
@pytest.mark.parametrize("streaming", [False, True])
def test_ranks_and_resumes_see_the_same_batches(tmp_path: Path, form: str, streaming: bool) -> None:
    for part in range(4):
        lines(tmp_path / f"{part}.jsonl", RECORDS[form])
    data = Data(record=form, streaming=streaming, lanes=4 if streaming else None, shuffle_buffer=12)
    training = Training(dataset_path=str(tmp_path), seq_len=8)
    check_ranks_and_resumes(lambda: build_dataset(training, data, TOKENIZER, TOKENIZER.vocab_size))


def test_forms_of_sources_and_of_validation(tmp_path: Path) -> None:
    chats = lines(tmp_path / "chats.jsonl", RECORDS["sharegpt"])
    pairs = lines(tmp_path / "pairs.jsonl", ALPACA)
    texts = lines(tmp_path / "texts.jsonl", [{"body": f"text {n}"} for n in range(30)])
    data = Data(
        record="alpaca",
        source=[
            DataSource(name="chats", path=str(chats), record="sharegpt"),
            DataSource(name="pairs", path=str(pairs)),
            DataSource(name="texts", path=str(texts), text_key="body"),
        ],
    )
    reader = TextReader(data, TOKENIZER, TOKENIZER.vocab_size)
    texts = reader.train(Training(seq_len=8)).texts()
    documents = [rows.corpus.documents for rows in texts.values() if rows.corpus]
    assert documents == [12, 12, 30]
    held_out = reader.held_out(Validation(dataset_path=str(pairs)), 16)[""]
    assert tokens_of(held_out) == tokens_of(read(pairs, record="alpaca"))


LONG = "x" * 500
BAD = [
    ("sharegpt", {"chat": []}, r"the key 'conversations' is missing \(keys: 'chat'\); name the "),
    (
        "sharegpt",
        {"conversations": LONG},
        r"'conversations' is no list of turns, each with from and value: \"x{159}…; name the "
        "field by data.messages_key, or the form by data.record",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human"}]},
        r'no list of turns, .*: \[\{"from": "human"\}\]; ',
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "a"}, {"from": "bing", "value": "b"}]},
        r'has a turn from "bing": \{"from": "bing", "value": "b"\}; known are human, user, gpt',
    ),
    (
        "sharegpt",
        {"conversations": SHAREGPT[1], "system": "Be long."},
        r"the key 'system' must be a string, and .* no turn from system, found \"Be long.\"; ",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "a"}]},
        r"no message has the role assistant \(roles: user\)",
    ),
    (
        "messages",
        {"messages": SHAREGPT[0]},
        r"'messages' is no list of messages, each with role and content: \[\{\"from\": .*; name",
    ),
    (
        "messages",
        {"messages": [MESSAGES[0][0], {**MESSAGES[0][1], "weight": 0}]},
        r'another weight than 1: \{"role": "assistant", .*"weight": 0\}',
    ),
    ("alpaca", {"instruction": "a", "input": ""}, r"the key 'output' is missing \(keys: .*record"),
    (
        "alpaca",
        {"instruction": ["a", LONG], "output": "b"},
        r"'instruction' must be a string, found list: \[\"a\", \"x{153}…; data.record has another",
    ),
    ("alpaca", {"instruction": "a", "input": 1, "output": "b"}, r"'input' must be a .* int: 1; "),
    (
        "alpaca",
        {"instruction": "a", "output": "b", "history": [["c", "d"]]},
        r"Alpaca's template has no place for the key 'history': \[\[\"c\", \"d\"\]\]; .*messages",
    ),
    (
        "completion",
        {"prompt": MESSAGES[0][:1], "completion": "b"},
        r"'prompt' must be a string, found list: \[\{\"role\": .*; name the field by data.prompt_",
    ),
    ("text", {"text": {"a": "b"}}, r"'text' must be a string, found dict: \{\"a\": \"b\"\}; name"),
]


@pytest.mark.parametrize(("form", "record", "said"), BAD)
def test_a_bad_record_is_shown_with_its_place_and_the_key_to_set(
    tmp_path: Path, form: str, record: dict[str, Any], said: str
) -> None:
    good = RECORDS.get(form, [{"text": "a"}] * 2)[:2]
    path = lines(tmp_path / "a.jsonl", [*good, record])
    with pytest.raises(DataError, match=rf"a\.jsonl, line 3: .*{said}"):
        read(path, record=form)


def test_a_table_without_the_columns_of_a_form_and_a_plain_text_are_refused(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "a.parquet", COMPLETIONS)
    with pytest.raises(DataError, match=r"no column 'output' \(prompt, completion\); data\.record"):
        read(path, record="alpaca")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="holds no records; leave data.messages_key and"):
        read(tmp_path / "a.txt", record="alpaca")


def test_optional_fields_are_read_where_a_table_has_them(tmp_path: Path) -> None:
    without = [{"instruction": one["instruction"], "output": one["output"]} for one in ALPACA]
    empty = [{**one, "input": None} for one in without]
    found = [
        tokens_of(read(as_parquet(tmp_path / f"{n}.parquet", records), record="alpaca"))
        for n, records in enumerate((without, empty))
    ]
    assert found[0] == found[1]
    turns = [{"conversations": one, "system": "Be kind."} for one in SHAREGPT[2:]]
    system = [
        {"conversations": [{"from": "system", "value": "Be kind."}, *one]} for one in SHAREGPT[2:]
    ]
    table = read(as_parquet(tmp_path / "t.parquet", turns), record="sharegpt")
    assert tokens_of(table) == tokens_of(
        read(lines(tmp_path / "t.jsonl", system), record="sharegpt")
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--data.record=alpaca", "--data.text_key=x"],
            r"has text_key, and records of the form alpaca have no such field",
        ),
        (["--data.record=sharegpt", "--data.prompt_key=x", "--data.completion_key=y"], "no such"),
        (["--data.record=vicuna"], r"data\.record"),
        (
            ["--data.source=[{name='c4_test'}, {path='tests', record='alpaca', text_key='x'}]"],
            r"has text_key, and records of the form alpaca have no such field",
        ),
    ],
)
def test_keys_that_contradict_a_form(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("debug_model.toml", 1, [*flags, "--training.dataset=c4"])


def test_a_form_decides_kept_tokens_and_the_place_in_a_stream(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ALPACA)
    columns = [
        Columns("output", "instruction"),
        Columns("output", "instruction", form=Alpaca()),
        Columns("output", "instruction", form=ShareGPT()),
    ]
    stamps = {_Text([path], TOKENIZER, 2304, one, "auto").stamp() for one in columns}
    prints = {TextFiles((str(path),), one).fingerprint("x") for one in columns}
    assert len(stamps) == len(prints) == 3


def _hashes(world: DistEnv, path: str, form: str, folder: str) -> list[str]:
    """Hashes of this rank's batches of three steps of a run."""
    flags = [
        *TWO_LAYERS,
        f"--training.dataset_path={path}",
        f"--data.record={form}",
        f"--job.dump_folder={folder}",
        "--training.seq_len=8",
        "--training.batch_size=1",
        "--training.global_batch_size=12",
        "--training.steps=3",
        "--no-validation.enable",
        "--data.prefetch=0",
    ]
    loader = build(load_config("debug_model.toml", world.size, flags), world).loader
    return [batch_hash(loader.next_step()) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharegpt.jsonl", "alpaca.csv", "messages.parquet"])
def test_real_ranks_have_the_batches_of_one(pool: Pools, tmp_path: Path, name: str) -> None:
    form, _, suffix = name.partition(".")
    write = {"jsonl": lines, "csv": as_csv, "parquet": as_parquet}[suffix]
    path = write(tmp_path / name, RECORDS[form] * 3)
    found = []
    for ranks in (1, 2, 3):
        of_ranks = pool(ranks).run(_hashes, str(path), form, str(tmp_path))
        found.append([add_hashes(step) for step in zip(*of_ranks, strict=True)])
    assert found[0] == found[1] == found[2]
    assert len({*found[0]}) == 3


@pytest.mark.parametrize(
    ("form", "record", "place"),
    [
        ("sharegpt", {"conversations": [{"from": "human", "value": "\ud83d"}]}, "value"),
        ("alpaca", {"instruction": "a", "input": "\ud83d", "output": "b"}, "input"),
        ("alpaca", {"instruction": "\ud83d", "output": "b"}, "instruction"),
    ],
)
def test_half_a_surrogate_pair_is_an_error(form: str, record: dict[str, Any], place: str) -> None:
    columns = form_columns(form, Data(), DataSource(), TOKENIZER)
    with pytest.raises(DataError, match=rf"{place}.* holds \\ud83d"):
        strings_of(record, columns, "here")
