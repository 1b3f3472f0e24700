"""Tasks in files of one's own: held-out texts, and multiple-choice questions. No torch here.

A file whose first record has the field `choices` holds questions, any other texts:

    {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}
    {"text": "Call me Ishmael."}
"""

from __future__ import annotations

import codecs
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from titanlite.data import DataError
from titanlite.data.compression import DamagedError, decompressed
from titanlite.data.formats import json_lines, read_file
from titanlite.data.records import Columns, cut
from titanlite.data.surrogates import refuse_surrogates
from titanlite.features.tasks.entries import KEY, name_of

if TYPE_CHECKING:
    from titanlite.features.tasks.scoring import Scorer

#: Bytes of the longest line that is looked at, to tell questions from texts.
_HEAD = 1 << 20
_FIELDS = ("context", "question", "choices", "answer")


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
    if _has_questions(path):
        questions = list(_questions(path))
        return ChoiceTask(name, questions[:limit])
    texts = [record.text for record in read_file(path, "auto", Columns(text_key))]
    texts = [text for text in texts if text]
    if not texts:
        raise DataError(f"{KEY}: {path} holds no text; give a file with text")
    return TextTask(name, texts[:limit])


def _has_questions(path: str) -> bool:
    """Whether the first record of a file has the field `choices`. Raises DataError."""
    with _opened(path) as content:
        for line in iter(lambda: content.readline(_HEAD + 1), b""):
            record = line.removeprefix(codecs.BOM_UTF8).strip()
            if record:
                return record.startswith(b"{") and "choices" in _table(record)
    return False


def _table(line: bytes) -> Mapping[str, Any]:
    """Return the record of a line; an empty one where it is none, which the reader tells."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


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


def _questions(path: str) -> Iterator[Question]:
    """Yield the questions of a file. Raises DataError for a record that is none."""
    with _opened(path) as content:
        for _, where, record in json_lines(content, path, unit="question", most=_HEAD):
            yield _question(record, where)


def _question(found: Any, where: str) -> Question:
    """Return the question of a record. Raises DataError that begins with `where`."""
    if not isinstance(found, dict):
        raise DataError(f"{where}: a question is a table, found {cut(found)}")
    record: dict[str, Any] = found
    for field in _FIELDS:
        refuse_surrogates(record.get(field), field, where)
    parts = []
    for field in ("context", "question"):
        if field in record:
            part = record[field]
            if not isinstance(part, str):
                raise DataError(f"{where}: the field {field!r} is no text: {cut(part)}")
            parts.append(part)
    if not parts:
        fields = ", ".join(map(repr, record)) or "none"
        raise DataError(f"{where}: there is neither 'question' nor 'context' (fields: {fields})")
    choices: Any = record.get("choices")
    is_list = isinstance(choices, list) and len(choices) > 1
    if not is_list or not all(isinstance(one, str) and one.strip() for one in choices):
        raise DataError(
            f"{where}: 'choices' must be a list of two or more texts, found {cut(choices)}"
        )
    answer = record.get("answer")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise DataError(
            f"{where}: 'answer' must be the number of a choice, 0 to {len(choices) - 1}, found "
            f"{cut(answer)}"
        )
    return Question("\n".join(parts), choices, answer)
