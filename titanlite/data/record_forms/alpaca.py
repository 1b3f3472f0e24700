"""Records of Stanford Alpaca: an instruction, perhaps an input, and the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from titanlite.data import DataError
from titanlite.data.records import Columns, check_strings, cut, refuse_surrogates

#: The template that Alpaca was published with (github.com/tatsu-lab/stanford_alpaca, train.py). The
#: output follows at once, without a space.
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
#: Fields of later tools for which the template has no place.
_NO_PLACE = ("system", "history")


class Alpaca(NamedTuple):
    """The form of such records: the prompt is the template, the text is the output."""

    name: str = "alpaca"
    own: tuple[str, ...] = ("instruction", "output")
    optional: tuple[str, ...] = ("input", *_NO_PLACE)

    def strings(self, record: Mapping[str, Any], columns: Columns, where: str) -> list[Any]:
        """Return output and prompt of a record.

        Raises DataError where one is missing or no string, and for earlier turns or a system text,
        which the template would lose.
        """
        check_strings(record, columns, where)
        given = record.get("input")
        if given is not None and not isinstance(given, str):
            raise DataError(
                f"{where}: the key 'input' must be a string, found {type(given).__name__}: "
                f"{cut(given)}; {columns.remedy('output')}"
            )
        refuse_surrogates(given or "", "input", where)
        for field in _NO_PLACE:
            if record.get(field):
                raise DataError(
                    f"{where}: Alpaca's template has no place for the key {field!r}: "
                    f"{cut(record[field])}; leave it out, or write messages "
                    f'({columns.section}.record = "messages")'
                )
        return [record["output"], _prompt(record["instruction"], given or "")]


def _prompt(instruction: str, given: str) -> str:
    """Return the template with its places filled."""
    if given:
        return WITH_INPUT.format(instruction=instruction, input=given)
    return WITHOUT_INPUT.format(instruction=instruction)
