"""Tasks in files of one's own: held-out texts, and multiple-choice questions. No torch here.

A file whose first record has the field `choices` holds questions, any other texts:

    {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}
    {"text": "Call me Ishmael."}
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec

from titanlite.data import DataError
from titanlite.data.compression import DamagedError, decompressed
from titanlite.data.formats import json_lines, read_file
from titanlite.data.records import Columns, refuse_surrogates
from titanlite.features.tasks.entries import KEY, name_of

if TYPE_CHECKING:
    from titanlite.features.tasks.scoring import Scorer

_NotBlank = Annotated[str, msgspec.Meta(pattern=r"\S")]
#: Bytes of the longest line that is looked at, to tell questions from texts.
_HEAD = 1 << 20


@dataclass(frozen=True)
class TextTask:
    """Held-out texts: bits per byte, which do not depend on the tokenizer."""

    name: str
    texts: Sequence[str]
    kind = "bits per byte"

    def run(self, scorer: Scorer) -> dict[str, float]:
        """Return the figures. Each text begins after BOS, which is not counted itself."""
        from titanlite.features.tasks.scoring import bits

        requests = []
        for text in self.texts:
            requests += scorer.rolling(scorer.subject.tokenizer.encode(text))
        total = sum(likely for likely, _ in scorer.likelihoods(requests))
        size = sum(len(text.encode()) for text in self.texts)
        return {"bits_per_byte": bits(total) / size}


@dataclass(frozen=True)
class Question:
    """A question with its answers; `answer` is the number of the right one, from 0."""

    prompt: str
    choices: Sequence[str]
    answer: int


class _Record(msgspec.Struct):
    """A line of a file of questions."""

    choices: Annotated[list[_NotBlank], msgspec.Meta(min_length=2)]
    answer: int
    context: str | msgspec.UnsetType = msgspec.UNSET
    question: str | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True)
class ChoiceTask:
    """Multiple-choice questions: how many have the right answer as the most probable one.

    acc compares log-likelihoods, acc_norm those per byte of an answer.
    """

    name: str
    questions: Sequence[Question]
    kind = "multiple choice"

    def run(self, scorer: Scorer) -> dict[str, float]:
        """Return the figures. A space stands before an answer unless there is white space."""
        requests = []
        for question in self.questions:
            for choice in question.choices:
                requests.append(encoded_pair(scorer, question.prompt, choice))
        likely = iter(scorer.likelihoods(requests))
        right = 0
        right_by_byte = 0
        for question in self.questions:
            totals = [total for total, _ in islice(likely, len(question.choices))]
            sizes = [len(choice.encode()) for choice in question.choices]
            by_byte = [total / size for total, size in zip(totals, sizes, strict=True)]
            right += _best(totals) == question.answer
            right_by_byte += _best(by_byte) == question.answer
        count = len(self.questions)
        return {"acc": right / count, "acc_norm": right_by_byte / count}


def encoded_pair(scorer: Scorer, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt, after BOS, and those that an answer adds to them.

    White space at the end of a prompt belongs to the answer, since tokens begin with it.
    """
    encode = scorer.subject.tokenizer.encode
    begin = prompt.rstrip()
    space = prompt[len(begin) :]
    if begin and not space and not answer[:1].isspace():
        space = " "
    if not begin:
        return encode("", bos=True), encode(space + answer)
    before = encode(begin, bos=True)
    return before, encode(begin + space + answer, bos=True)[len(before) :]


def _best(scores: Sequence[float]) -> int:
    """Return the place of the highest score, the first of equal ones."""
    return max(range(len(scores)), key=lambda place: scores[place])


def read_own(path: str, text_key: str, limit: int | None) -> TextTask | ChoiceTask:
    """Read a file of texts or of questions; the first `limit` documents, None: all.

    All of the file is checked. Raises DataError with file and line.
    """
    name = name_of(path)
    with _opened(path) as content:
        lines = json_lines(content, path, unit="question", most=_HEAD)
        first = None
        # The reader of texts reports its own errors.
        with suppress(DataError):
            first = next(lines, None)
        if first is not None and isinstance(first[2], dict) and "choices" in first[2]:
            records = chain([first], lines)
            questions = [_question(record, where) for _, where, record in records]
            return ChoiceTask(name, questions[:limit])
    texts = [record.text for record in read_file(path, "auto", Columns(text_key))]
    texts = [text for text in texts if text]
    if not texts:
        raise DataError(f"{KEY}: {path} holds no text; give a file with text")
    return TextTask(name, texts[:limit])


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """Open a file, perhaps a compressed one. Raises DataError, also for what is read inside."""
    if "://" in path:
        raise DataError(f"{KEY}: {path} is a URL; download it, and give the file")
    try:
        with Path(path).open("rb") as file:
            yield decompressed(file, path)
    except (OSError, EOFError, zlib.error, DamagedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{KEY}: {path} cannot be read: {reason}") from error


def _question(record: Any, where: str) -> Question:
    """Return the question of a record. Raises DataError that begins with `where`."""
    try:
        found = msgspec.convert(record, _Record)
    except msgspec.ValidationError as error:
        raise DataError(f"{where}: no question: {error}") from None
    if not 0 <= found.answer < len(found.choices):
        raise DataError(
            f"{where}: 'answer' must be the number of a choice, 0 to {len(found.choices) - 1}, "
            f"found {found.answer}"
        )
    for field in _Record.__struct_fields__:
        refuse_surrogates(record.get(field), field, where)
    parts = [part for part in (found.context, found.question) if part is not msgspec.UNSET]
    if not parts:
        fields = ", ".join(map(repr, record))
        raise DataError(f"{where}: there is neither 'question' nor 'context' (fields: {fields})")
    return Question("\n".join(parts), found.choices, found.answer)
