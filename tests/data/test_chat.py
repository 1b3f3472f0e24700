"""Chat templates: ids and masks of transformers, targets in rows of every kind, and errors that
name the record.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from tests.support.hf import bundled_as_json
from tests.support.texts import LLAMA3, TOKENIZER
from titanlite import exit_codes
from titanlite.cli import main as cli
from titanlite.config.data_sections import Data, DataSource
from titanlite.config.errors import ConfigError
from titanlite.config.sections import Training
from titanlite.data import DataError
from titanlite.data.chat import ChatTemplate, encode_chat, load_template
from titanlite.data.dataset_builder import TextReader
from titanlite.data.records import Columns
from titanlite.data.rows import IGNORE
from titanlite.data.text_files import BUNDLED, TextFiles, columns_of, iter_records, list_files
from titanlite.data.text_function import own_records
from titanlite.data.token_cache import _Text, load_corpus
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, BUNDLED_TOKENIZER, load_tokenizer
from titanlite.data.tokenizer.hf_export import as_tokenizer_json
from titanlite.resolve.load import load_config

MARKED = (
    "{%- for m in messages %}\n{%- if m.role == 'assistant' %}{{ '[A]' }}{% generation %}{{ "
    "m.content }}</s>\n"
    "{% endgeneration %}{% else %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endif %}{% "
    "endfor %}"
)
#: A template that shows the reasoning of the last turn alone.
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last else 'gone' }}{% endfor %}"

CHATS = [
    [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day, sir."}],
    [
        {"role": "system", "content": "Be brief — naïve, 日本語."},
        {"role": "user", "content": " 1 + 1? "},
        {"role": "assistant", "content": "\n2\n"},
        {"role": "user", "content": "and <|eot_id|>\n"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "x" * 30},
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as transformers saves it, with the template beside it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=bundled_as_json(),
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        chat_template=LLAMA3,
    ).save_pretrained(folder)
    return folder


def test_a_template_without_marks_has_the_ids_of_transformers_and_targets_of_turns(folder):
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = load_tokenizer(str(folder))
    template = load_template(None, ours)
    for chat in CHATS:
        ids, mask = encode_chat(template.render(chat, "here"), ours)
        assert ids.tolist() == theirs.apply_chat_template(chat)["input_ids"]
        wanted: list[int] = []  # each turn is the model's addition to its prompt
        for n, message in enumerate(chat):
            if message["role"] == "assistant":
                prompt = theirs.apply_chat_template(chat[:n], add_generation_prompt=True)
                turn = theirs.apply_chat_template(chat[: n + 1])
                wanted += range(len(prompt["input_ids"]), len(turn["input_ids"]))
        assert np.flatnonzero(mask).tolist() == wanted


def rows(path: Path, folder: Path, **data: Any) -> Any:
    tokenizer = load_tokenizer(str(folder))
    training = Training(dataset_path=str(path), seq_len=32)
    return TextReader(Data(shuffle=False, **data), tokenizer, tokenizer.vocab_size).train(training)


def test_files_streams_and_prepared_tokens_have_the_same_targets(folder, tmp_path, capsys):
    chats = [[*chat, {"role": "user", "content": str(n)}] for n in range(9) for chat in CHATS]
    lines = tmp_path / "a.jsonl"
    table = tmp_path / "a.parquet"
    out = tmp_path / "out"
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    parquet.write_table(pyarrow.table({"messages": chats}), table)
    words = ["--out", str(out), "--tokenizer", str(folder), "--messages-key=messages"]
    assert cli.main(["data", "prepare", str(lines), *words]) == 0
    tokenizer = load_tokenizer(str(folder))
    template = load_template(None, tokenizer)
    encoded = [encode_chat(template.render(chat, ""), tokenizer) for chat in chats]
    ids, mask = map(np.concatenate, zip(*encoded, strict=True))
    labels = np.where(mask, ids, IGNORE)[1:]
    assert len(labels) > 64
    asked = {"messages_key": "messages"}
    sources = {"source": [DataSource(path=str(lines), messages_key="messages")]}
    kinds = [rows(lines, folder, **asked), rows(table, folder, **asked), rows(out, folder, **asked)]
    kinds += [rows(lines, folder, streaming=True, lanes=1, **asked), rows(lines, folder, **sources)]
    for found in kinds:
        for n in range(len(labels) // 32):
            row = found.sequence(n)
            place = slice(32 * n, 32 * n + 32)
            assert row.tokens.tolist() == ids[place].tolist()
            assert row.labels.tolist() == labels[place].tolist()
    (tmp_path / "other.jinja").write_text(MARKED)
    with pytest.raises(DataError, match=r"data\.chat_template, .* is prepared with another"):
        rows(out, folder, chat_template=str(tmp_path / "other.jinja"), **asked)


@pytest.mark.parametrize(
    ("messages", "source", "said"),
    [
        ("Hello", LLAMA3, "no list of messages"),
        ([{"role": "user", "content": "a\ufdd0"}, CHATS[0][1]], LLAMA3, r"U\+FDD0"),
        (
            [{"role": "user", "content": "a"}],
            LLAMA3,
            r"no message has the role assistant \(roles: user\)",
        ),
        ([CHATS[0][0], {**CHATS[0][1], "weight": 0}], LLAMA3, "another weight than 1: .*: 0"),
        (CHATS[1], FORGETFUL, r"message 3, of the assistant, cannot be found .*\{% generation %\}"),
        (
            CHATS[0],
            "{{ raise_exception('roles must alternate') }}",
            "refuses it: .*roles must alternate",
        ),
        (
            CHATS[0],
            "{{ messages[0].content.format }}{{ ''.__class__.mro() }}",
            "refuses it: SecurityError",
        ),
    ],
)
def test_errors_name_file_and_record(folder, tmp_path, messages, source, said):
    path = tmp_path / "a.jsonl"
    template = tmp_path / "own.jinja"
    # The other templates refuse a good record, too.
    first = json.dumps({"chat": CHATS[0]}) if source == LLAMA3 else ""
    refused = json.dumps({"chat": messages})
    path.write_text(f"{first}\n{refused}\n{refused}\n")
    template.write_text(source)
    with pytest.raises(DataError, match=f"a.jsonl, line 2: .*{said}"):
        rows(path, folder, messages_key="chat", chat_template=str(template))


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages.__class__.__mro__ }}", "UndefinedError|SecurityError"),
        ("{% set f = '{0.__class__.__mro__}'|attr('format') %}{{ f(1) }}", "SecurityError"),
        ("{{ raise_exception.__globals__['json'] }}", "UndefinedError|SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ['a']|tojson(cls=namespace, encode=''.join) }}", "TypeError"),
        ("{{ messages|tojson(default=raise_exception) }}", "TypeError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
    ],
)
def test_a_template_reaches_no_objects_and_no_files(source, error):
    said = f"^a.jsonl, line 7: the chat template refuses it: ({error}): "
    with pytest.raises(DataError, match=said):
        ChatTemplate(source).render(CHATS[0], "a.jsonl, line 7")


def test_a_null_is_as_no_key_in_every_format(tmp_path):
    call = {"name": "add", "arguments": {"a": 1}}
    other = {"name": "sub", "arguments": {"a": 1, "b": 2}}
    bare = [{"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": "ho"}]
    nulls = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "ho", "tool_calls": None},
    ]
    # Parquet gives each call all arguments that any of them has.
    chats = [bare, nulls, [{"role": "assistant", "tool_calls": [other]}]]
    template = ChatTemplate(
        "{% for m in messages %}{% if m.tool_calls is defined %}<{{ m.tool_calls | tojson }}>"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"messages": chats}), table)
    texts = [
        [one.text for one in iter_records([file], Columns("messages", chat=template))]
        for file in (lines, table)
    ]
    assert texts[0] == texts[1]
    assert texts[0][0] == texts[0][1]


DATED = "{{ strftime_now('%d %B %Y') }}" + LLAMA3


@pytest.mark.slow
def test_templates_that_write_the_date_have_that_of_the_run(folder, tmp_path, capsys):
    template = tmp_path / "own.jinja"
    lines = tmp_path / "a.jsonl"
    out = tmp_path / "out"
    template.write_text(DATED)
    lines.write_text(json.dumps({"messages": CHATS[0]}) + "\n")
    asked = {"messages_key": "messages", "chat_template": str(template)}
    hint = 'strftime_now.* set data.template_date, as "2025-01-31"'
    with pytest.raises(DataError, match=hint):
        rows(lines, folder, **asked)
    with pytest.raises(DataError, match="data.template_date: '2025-02-30' is no day"):
        rows(lines, folder, template_date="2025-02-30", **asked)
    found = rows(lines, folder, template_date="2025-02-03", **asked)
    text = load_tokenizer(str(folder)).decode(found.corpus.read(0, 12).tolist())
    assert text.startswith("03 February 2025<|begin_of_text|>")
    words = ["data", "prepare", str(lines), "--tokenizer", str(folder), "--out", str(out)]
    words += ["--messages-key=messages", f"--chat-template={template}"]
    assert cli.main(words) == exit_codes.CONFIG
    assert "set --template-date" in capsys.readouterr().err
    assert cli.main([*words, "--template-date=2025-02-03"]) == 0
    # The date of a folder holds where the config names the template alone.
    prepared = rows(out, folder, **asked)
    assert prepared.sequence(0).tokens.tolist() == found.sequence(0).tokens.tolist()
    with pytest.raises(
        DataError, match=r"template_date: .* is prepared with another template or day"
    ):
        rows(out, folder, messages_key="messages", template_date="2025-02-04")


def test_another_template_is_another_file_of_kept_tokens(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    found = [Columns("text", chat=chat) for chat in (None, ChatTemplate("a"), ChatTemplate("b"))]
    stamps = {_Text([path], TOKENIZER, 2304, columns, "auto").stamp() for columns in found}
    prints = {TextFiles(("a.jsonl",), columns).fingerprint("") for columns in found}
    assert len(stamps) == len(prints) == 3


def test_templates_that_are_not_there(folder, tmp_path):
    with pytest.raises(DataError, match=r"brings no chat template .*; name a Jinja file"):
        load_template(None, TOKENIZER)
    (tmp_path / "bad.jinja").write_text("\n{% if %}")
    with pytest.raises(DataError, match=r"^--chat-template: .*bad\.jinja, line 2: "):
        load_template(str(tmp_path / "bad.jinja"), TOKENIZER, "--chat-template")
    with pytest.raises(DataError, match="none.jinja cannot be read"):
        load_template(str(tmp_path / "none.jinja"), TOKENIZER)
    with pytest.raises(ConfigError, match=r"data: has messages_key and text_key"):
        load_config("debug_model.toml", 1, ["--data.messages_key=x", "--data.text_key=y"])


# Kinds of tokenizers as they are published, with small vocabularies


TALKS = [
    CHATS[0],
    [
        {"role": "system", "content": "  Be brief — cafe\u0301, 日本語.\n"},
        {"role": "user", "content": " 1 + 1?   "},
        {"role": "assistant", "content": "\n  2 🙂\n"},
        {"role": "user", "content": "<tool_call> a<mask> </s> b<mask>c"},
        {"role": "assistant", "content": " the  user"},
    ],
]
#: The turns of most families: a head, the content, an end.
TURNS = (
    "{{ bos_token }}{% for m in messages %}HEAD{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}END{% endgeneration %}{% else %}{{ m.content }}END{% endif %}{% endfor %}"
)
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def json_of(file: Path, kind: Any) -> bytes:
    """The tokenizer.json of a tokenizer file of another kind."""
    return as_tokenizer_json(file.read_bytes(), kind, load_tokenizer(str(file)))


def with_tokens(parsed: dict[str, Any], *names: str, **flags: Any) -> dict[str, Any]:
    """Add tokens, which strip spaces or not."""
    fixed = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    vocabulary = parsed["model"]["vocab"]
    for name in names:
        number = vocabulary.get(name, len(vocabulary) + len(parsed["added_tokens"]))
        entry = {"id": number, "content": name, **fixed, "special": True, **flags}
        parsed["added_tokens"].append(entry)
    return parsed


def phi3() -> dict[str, Any]:
    parsed = json.loads(json_of(BUNDLED_SENTENCEPIECE, "sentencepiece"))
    parsed |= {"added_tokens": [], "post_processor": None}
    parsed["normalizer"] = {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}
    # </s> in a user's text is the token, and those of Phi-3 take the spaces behind it.
    with_tokens(parsed, "<unk>", "<s>", "<|end|>")
    with_tokens(parsed, "</s>", rstrip=True, special=False)
    return with_tokens(parsed, "<|system|>", "<|user|>", "<|assistant|>", rstrip=True)


def qwen() -> dict[str, Any]:
    plain = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    cut = {"pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False}
    steps = [{"type": "Split", **cut}, {"type": "ByteLevel", **plain}]
    parsed = json.loads(bundled_as_json().to_str())
    parsed |= {"added_tokens": [], "normalizer": {"type": "NFC"}}
    parsed["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    with_tokens(parsed, "<s>", "</s>", "<|im_start|>", "<|im_end|>")
    return with_tokens(parsed, "<tool_call>", special=False)


@pytest.mark.parametrize(
    ("kind", "file", "head", "end"),
    [
        (phi3, None, "<|{{ m.role }}|>\n", "<|end|>\n"),
        (qwen, None, "<|im_start|>{{ m.role }}\n", "<|im_end|>\n"),
        (
            "tiktoken",
            BUNDLED_TOKENIZER,
            "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n",
            "<|eot_id|>",
        ),
        (
            "sentencepiece",
            BUNDLED_SENTENCEPIECE,
            "{{ '' if m.role == 'assistant' else '[INST]' }}",
            "</s>",
        ),
    ],
)
def test_ids_and_masks_are_those_of_transformers_with_the_tokenizer_json(
    tmp_path, kind, file, head, end
):
    made = tmp_path / "tokenizer.json"
    made.write_bytes(json_of(file, kind) if file else json.dumps(kind()).encode())
    source = TURNS.replace("HEAD", head).replace("END", end)
    template = tmp_path / "own.jinja"
    template.write_text(source)
    ours = load_tokenizer(str(file or made))
    names = {number: name for name, number in ours.special_tokens.items()}
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(made),
        bos_token=names[ours.bos_id],
        eos_token=names[ours.eos_id],
        chat_template=source,
    )
    for chat in TALKS:
        text = load_template(str(template), ours).render(chat, "here")
        ids, mask = encode_chat(text, ours)
        assert ids.tolist() == theirs.apply_chat_template(chat)["input_ids"]
        assert mask.tolist() == tokens_within(text, theirs)
        assert 0 < mask.sum() < len(mask)


def tokens_within(text: str, theirs: PreTrainedTokenizerFast) -> list[bool]:
    """Tell of each token whether a character of it is between marks.

    `return_assistant_tokens_mask` is the same but for a space that no token has, and for the last
    character of a turn where that is several tokens.
    """
    inside: list[bool] = []
    plain = ""
    is_inside = False
    for character in text:
        if character in "\ufdd0\ufdd1":
            is_inside = character == "\ufdd0"
        else:
            plain += character
            inside.append(is_inside)
    found = theirs(plain, add_special_tokens=False, return_offsets_mapping=True)
    return [any(inside[begin:end]) for begin, end in found["offset_mapping"]]


# Prompts


def test_labels_are_those_of_completions_and_their_eos():
    tokens: list[int] = []
    expected: list[int] = []
    for line in list_files(BUNDLED["sft_test"])[0].read_text().splitlines():
        pair = json.loads(line)
        prompt = TOKENIZER.encode(pair["prompt"], bos=True)
        completion = TOKENIZER.encode(pair["completion"], eos=True)
        tokens += prompt + completion
        expected += [IGNORE] * len(prompt) + completion
    training = Training(dataset="sft_test", seq_len=64, epochs=2)
    dataset: Any = TextReader(Data(shuffle=False), TOKENIZER, TOKENIZER.vocab_size).train(training)
    labels = [row.labels for row in map(dataset.sequence, range(dataset.total_sequences))]
    found = np.concatenate(labels)[: 2 * len(expected) - 1].tolist()
    assert found == (2 * expected)[1:]  # the label at p is token p + 1
    assert 0 < sum(label != IGNORE for label in found) < len(found) / 2
    assert dataset.sequence(0).tokens.tolist() == tokens[:64]


def test_threads_chunks_and_caches_keep_targets(tmp_path, monkeypatch):
    """Records without a prompt among the others have targets only."""
    path = tmp_path / "mixed.jsonl"
    lines = [{"q": "" if i % 3 else f"ask {i}", "a": f"say {i}"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))

    def read(cache="off", workers=0):
        return load_corpus(
            [path],
            TOKENIZER,
            TOKENIZER.vocab_size,
            workers=workers,
            cache=cache,
            columns=Columns("a", "q"),
        )

    whole = read()
    firsts = whole.targets[whole.offsets[:-1]]
    assert firsts.tolist() == [bool(i % 3) for i in range(60)]
    monkeypatch.setattr(
        "titanlite.data.tokenize_files._CHUNK", 5
    )  # some chunks have no prompt at all
    cache = str(tmp_path / "cache")
    for found in (read(workers=2), read(cache), read(cache)):
        assert np.array_equal(found.targets, whole.targets)
        assert np.array_equal(found.tokens, whole.tokens)
        assert found.fingerprint == whole.fingerprint


def test_fields_of_sources_go_before_those_of_data():
    data = Data(prompt_key="q", completion_key="a")
    own = "data.source"
    assert columns_of(data, "x", "p", DataSource()) == Columns("a", "q")
    assert columns_of(data, "x", "p", DataSource(completion_key="b")) == Columns("b", "q", own)
    assert columns_of(data, "x", "p", DataSource(text_key="t")) == Columns("t", None, own)
    assert columns_of(data, "sft_test", None)[:2] == ("completion", "prompt")


def chats() -> list[dict[str, str]]:
    return [{"q": "one", "a": "two"}, {"q": "three"}]


def one_text() -> str:
    return "its characters are no documents"


def test_own_functions_may_return_prompts():
    records = own_records(f"{__name__}:chats", "training.dataset", Columns("a", "q"))
    assert next(records)[2:4] == ("two", "one")
    with pytest.raises(ValueError, match="document 2 of .*: the key 'a' is missing"):
        next(records)
    with pytest.raises(DataError, match="one_text returned 'its characters.*, expected documents"):
        next(own_records(f"{__name__}:one_text", "training.dataset"))
