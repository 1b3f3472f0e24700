"""Renders chat templates in a process with little to spend: a template is a file of somebody else.

`titanlite.data.chat_process` starts this process and sends it conversations. jinja2's sandbox keeps
a template from objects of Python. It bounds neither time nor memory, and a single product of a text
and a number may need all of both. So the kernel bounds them here. It ends a process that is over
its time, and a request for too much memory fails.

A request is a pickle from the process that started this one. An answer is text: a template decides
its content.
"""

from __future__ import annotations

import json
import pickle
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

#: Before and after a turn of the assistant. Unicode keeps these two free of characters.
BEGIN = "\ufdd0"
END = "\ufdd1"
#: Seconds of processor time for one conversation.
SECONDS = 10
#: Limit for the memory of the process, in bytes beside its own.
_MEMORY = 1 << 30
#: Name of the variable with the day that `strftime_now` of a template has.
DAY = "template_date"

#: Kinds of answers: the text, and why there is none.
TEXT = "text"
REFUSED = "refused"
NO_TURN = "no turn"
SYNTAX = "syntax"


class Request(NamedTuple):
    """One conversation to render."""

    #: "check" the template, "render" a conversation with marks, or the "prompt" of the next turn.
    action: str
    template: str
    #: Names and values of the template's variables.
    tokens: Mapping[str, str]
    messages: Sequence[Mapping[str, Any]] = ()
    #: Most seconds of processor time.
    seconds: int = SECONDS


class _NoTurnError(Exception):
    """A turn of the assistant, counted from 1, is not found."""


# Rendering


def answer(request: Request) -> tuple[str, str]:
    """Return the kind of an answer and its text."""
    import jinja2

    variables: dict[str, Any] = {"tools": None, "documents": None, **request.tokens}
    if DAY in request.tokens:
        variables["strftime_now"] = datetime.fromisoformat(request.tokens[DAY]).strftime
    messages = request.messages

    def text(count: int, prompt: bool = False) -> str:
        found: str = template.render(
            messages=messages[:count], add_generation_prompt=prompt, **variables
        )
        return found

    try:
        template = _compiled(request.template)
        if request.action == "check":
            return TEXT, ""
        if request.action == "prompt":
            return TEXT, text(len(messages), prompt=True)
        return TEXT, _marked(messages, text)
    except _NoTurnError as error:
        return NO_TURN, str(error)
    except jinja2.TemplateSyntaxError as error:
        return SYNTAX, f"{error.lineno}\n{error.message}"
    except MemoryError:
        return REFUSED, "it needs too much memory"
    except Exception as error:  # a template can raise what its filters and tests raise
        return REFUSED, f"{type(error).__name__}: {error}"[:10_000]


def _marked(messages: Sequence[Mapping[str, Any]], text: Callable[..., str]) -> str:
    whole = text(len(messages))
    if BEGIN in whole:
        return whole
    parts: list[str] = []
    done = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = text(number, prompt=True)
        turn = text(number + 1)
        is_found = whole.startswith(turn) and turn.startswith(prompt) and len(prompt) >= done
        if not is_found:
            raise _NoTurnError(number + 1)
        parts += [whole[done : len(prompt)], BEGIN, whole[len(prompt) : len(turn)], END]
        done = len(turn)
    return "".join(parts) + whole[done:]


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """Compile as `transformers` does, without the date of today."""
    import jinja2
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    # Messages have no keys with null, which some templates ask for: DeepSeek's for the content.
    environment.tests["none"] = lambda value: value is None or jinja2.is_undefined(value)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


# The process


def main(number: int) -> None:
    """Answer requests on this connection until its other end is gone."""
    # They are meant for that process, which may still need answers.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    _limit(resource.RLIMIT_CORE, 0)
    own = 0
    with suppress(OSError), open("/proc/self/statm") as file:
        own = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, own + _MEMORY)
    with Connection(number) as connection, suppress(EOFError, ConnectionError):
        while True:
            request = Request(*pickle.loads(connection.recv_bytes()))
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + request.seconds)
            kind, text = answer(request)
            connection.send_bytes(f"{kind}\n{text}".encode("utf-8", "surrogatepass"))


def _limit(kind: int, value: int) -> None:
    # The system's own limit may be lower, and macOS has none for memory.
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
