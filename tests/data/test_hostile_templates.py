"""Chat templates that loop, or make gigabytes: an error with file and record, in every process that
renders.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titanlite.cli.main import main
from titanlite.cli.sample import encode_prompts
from titanlite.config.data_sections import Data, DataSource, Validation
from titanlite.config.sections import Training
from titanlite.data import DataError, chat_process
from titanlite.data.chat import ChatTemplate, load_template
from titanlite.data.text import TextReader, build_dataset
from titanlite.data.tokenizer import load_tokenizer

CHAT = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day, sir."}]
TOKENIZER = load_tokenizer()
GOOD = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
#: Loops for ever, without a call; computes for ever; and does so while it is compiled.
LOOPS = {
    "loops": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "a power": "{{ 7 ** (9 ** messages|length * 99999) }}",
    "a constant": "{{ 7 ** (7 ** 12) }}",
}
#: Makes gigabytes: by a product, a filter, and a number.
BOMBS = {
    "a product": "{{ messages[0].content * 10 ** 10 }}",
    "a constant": "{{ 'x' * 10 ** 10 }}",
    "a filter": "{{ messages[0].content.center(10 ** 10) }}",
    "a list": "{{ ([messages] * 10 ** 9) | length }}",
    "a block": (
        "{% set x %}{% for a in range(99999) %}{{ messages[0].role * 10 ** 6 }}{% endfor %}{% "
        "endset %}"
    ),
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_process, "SECONDS", 0)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", LOOPS)
def test_a_template_without_an_end_is_an_error_and_the_next_one_renders(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with (
        monkeypatch.context() as short,
        pytest.raises(
            DataError, match="^a.jsonl, line 7: the chat template cannot be rendered: it takes more"
        ),
    ):
        short.setattr(chat_process, "SECONDS", 0)
        ChatTemplate(LOOPS[name]).render(CHAT, "a.jsonl, line 7")
    assert GOOD.prompt(CHAT[:1], "here") == "user: Hello?\n"


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_makes_gigabytes_is_an_error(name: str) -> None:
    with pytest.raises(
        DataError, match="^a.jsonl, line 7: the chat template (refuses it|cannot be rendered): it "
    ):
        ChatTemplate(BOMBS[name]).render(CHAT, "a.jsonl, line 7")
    assert GOOD.prompt(CHAT[:1], "here") == "user: Hello?\n"


def test_errors_of_a_template_are_no_tracebacks() -> None:
    sources = (
        "{{ 1 / 0 }}",
        "{{ messages.nothing.more }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ [][1] + 1 }}",
    )
    for source in sources:
        with pytest.raises(DataError, match="^here: the chat template refuses it: [A-Z]"):
            ChatTemplate(source).render(CHAT, "here")


def test_a_file_that_cannot_be_compiled_is_named(short: None, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    for source in (LOOPS["a constant"], "{{ " + "(" * 9999, "{{ " + "not " * 9999 + "a }}"):
        path.write_text(source)
        with pytest.raises(DataError, match=r"^data.chat_template: \S+own\.jinja(, line 1)?: "):
            load_template(str(path), TOKENIZER)


def test_long_conversations_have_room() -> None:
    chat = [
        {"role": role, "content": "word " * 20_000}
        for _ in range(10)
        for role in ("user", "assistant")
    ]
    text = GOOD.render(chat, "here")
    assert len(text) == sum(len(one["role"]) + len(one["content"]) + 3 for one in chat) + 20


def test_texts_come_back_as_they_are() -> None:
    content = "naïve 日本語 \ud800 \x00 \r\n 'quoted'"
    assert GOOD.prompt([{"role": "user", "content": content}], "here") == f"user: {content}\n"


def test_a_killed_process_is_started_again_and_threads_take_turns() -> None:
    GOOD.prompt(CHAT, "here")
    os.kill(chat_process._workers[0][0].pid, signal.SIGKILL)
    with pytest.raises(DataError, match="the process that renders it ended with code -9"):
        GOOD.prompt(CHAT, "here")
    results: dict[int, list[str]] = {}

    def render(number: int) -> None:
        chat = [{"role": "user", "content": str(number)}]
        results[number] = [GOOD.prompt(chat, "here") for _ in range(50)]

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [f"user: {number}\n"] * 50 for number in range(4)}
    worker = chat_process._workers[0][0]
    os.kill(worker.pid, signal.SIGINT)  # Ctrl-C reaches all processes of a terminal
    os.kill(worker.pid, signal.SIGTERM)
    assert GOOD.prompt(CHAT[:1], "here") == "user: Hello?\n"
    assert chat_process._workers[0][0] is worker


def test_all_that_render_name_file_and_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.jsonl"
    template = tmp_path / "own.jinja"
    text.write_text("\n" + json.dumps({"chat": CHAT}) + "\n")
    template.write_text(BOMBS["a product"])
    keys: dict[str, Any] = {"messages_key": "chat", "chat_template": str(template)}
    said = r"a\.jsonl, line 2: the chat template refuses it: it needs too much memory"
    for streaming in (False, True):
        with pytest.raises(DataError, match=said):
            training = Training(dataset_path=str(text), seq_len=8)
            build_dataset(
                training, Data(streaming=streaming, num_workers=2, **keys), TOKENIZER, 2304
            ).sequence(0)
    reader = TextReader(Data(chat_template=str(template)), TOKENIZER, 2304)
    held_out = Validation(sources=[DataSource(name="a", path=str(text), messages_key="chat")])
    with pytest.raises(DataError, match=said):
        reader.held_out(held_out, 8)
    words = [
        "--out",
        str(tmp_path / "out"),
        "--messages-key",
        "chat",
        "--chat-template",
        str(template),
    ]
    assert (
        main(["data", "prepare", str(text), "--workers", "1", "--tokenizer=bundled", *words]) == 2
    )
    assert (
        "a.jsonl, line 2: the chat template refuses it: it needs too much memory"
        in capsys.readouterr().err
    )
    loaded: Any = SimpleNamespace(
        tokenizer=TOKENIZER, chat_template=str(template), template_date=None, limit=64
    )
    with pytest.raises(
        DataError, match="^prompt 1: the chat template refuses it: it needs too much memory"
    ):
        encode_prompts(loaded, ["Hello?"], chat=True)
