"""Which form the records of a text have, by the fields of the first one.

Where the config names no field and no form, the first record decides. The start report and
`titanlite data peek` say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from titanlite.config.data_sections import Data, DataSource
from titanlite.config.toml import quote
from titanlite.config.urls import is_url, public_name
from titanlite.data import DataError
from titanlite.data.formats import read_file
from titanlite.data.kinds import WHOLE, Format, kind_of_name
from titanlite.data.record_forms import form_columns, plain
from titanlite.data.records import Columns, are_turns
from titanlite.data.text_files import TextFiles, names_records
from titanlite.data.tokenizer import Tokenizer

#: Files that are opened for a first record: those before it are empty.
_FILES = 8


class Found(NamedTuple):
    """What the first record tells.

    form: a value of `data.record`; None: a text, or none that is known. said: for reports; "" for a
    text without doubt.
    """

    form: str | None
    said: str


class _AsItIs(NamedTuple):
    """Reads a record as it is: of a table the fields that tell a form."""

    name: str = "as it is"
    own: tuple[str, ...] = ()
    optional: tuple[str, ...] = (
        "text",
        "messages",
        "conversations",
        "instruction",
        "output",
        "prompt",
        "completion",
    )

    def strings(self, record: Mapping[str, Any], columns: Columns, where: str) -> list[Any]:
        return [record]


class _AnyColumns(Columns):
    """Fields of a record, none of which it must have."""

    @property
    def wanted(self) -> tuple[str, ...]:
        return ()


def with_form(files: TextFiles, data: Data, source: DataSource, tokenizer: Tokenizer) -> TextFiles:
    """Return files with the fields of the form that their first record has.

    Fields that the config names stay. The listing says what was recognised, and that conversations
    are rendered by the plain template. Raises DataError as `recognise` and `form_columns` do.
    """
    columns = files.columns
    said = ""
    if not names_records(data, source):
        section = "data.source" if files.key.startswith("data.source") else "data"
        found = recognise(files.names, files.kind, files.key, section, files.patience)
        said = found.said
        if found.form is not None:
            columns = form_columns(found.form, data, source, tokenizer)
    if columns.chat is not None and columns.chat.source == plain.SOURCE:
        said = f"{said or columns.text}, rendered by the plain chat template"
    if not said:
        return files
    listing = files.listing and replace(files.listing, records=said)
    return replace(files, columns=columns, listing=listing)


def recognise(
    files: Sequence[str], kind: Format, key: str, section: str, patience: float = 0.0
) -> Found:
    """Return the form of the first record of some files.

    kind: see `iter_rows`. key: of the path in the config, section: of its keys of fields, for
    errors.

    Raises DataError where the record has fields of several forms and no text.
    """
    record = _first_record(files, kind, patience)
    if record is None:
        return Found(None, "")
    fitting = [name for name, fits in _FORMS.items() if fits(record)]
    fields = " and ".join(fitting)
    if not fitting:
        return Found(None, "")
    if isinstance(record.get("text"), str):
        said = f"the field text alone; they also have the fields of {fields}"
        return Found(None, f"{said} ({section}.record chooses)")
    if len(fitting) > 1:
        lines = [f"{key}: the records of {public_name(files[0])} have the fields of {fields}"]
        if key == "SOURCE":
            lines.append(f"  give --record {' or --record '.join(fitting)}")
        else:
            lines.append(f"  one of these lines in [{section}] says which is meant:")
            lines += [f"    record = {quote(name)}" for name in fitting]
        raise DataError("\n".join(lines))
    form = fitting[0]
    return Found(form, f"{form}, recognised by {_FIELDS[form]} ({section}.record says otherwise)")


def _first_record(files: Sequence[str], kind: Format, patience: float) -> Mapping[str, Any] | None:
    """Return the first record; None where there is none, or a local one cannot be read.

    What is wrong is said when the text is read. Raises DataError where a server gives none.
    """
    for name in files[:_FILES]:
        named = kind_of_name(public_name(name))
        reader = named.reader if kind == "auto" and named else kind
        if reader in WHOLE:
            return None
        try:
            record = next(read_file(name, kind, _AnyColumns(form=_AsItIs()), 0, patience), None)
        except DataError:
            if is_url(name):
                raise
            return None
        if record is not None:
            return record.text if isinstance(record.text, Mapping) else None
    return None


def _are_messages(record: Mapping[str, Any]) -> bool:
    return _has_turns(record.get("messages"), ("role",))


def _is_sharegpt(record: Mapping[str, Any]) -> bool:
    return _has_turns(record.get("conversations"), ("from",))


def _is_alpaca(record: Mapping[str, Any]) -> bool:
    return _are_strings(record, "instruction", "output")


def _is_completion(record: Mapping[str, Any]) -> bool:
    return _are_strings(record, "prompt", "completion")


def _has_turns(value: Any, keys: Sequence[str]) -> bool:
    if isinstance(value, str) and value.startswith("["):  # a field of CSV
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    return bool(value) and are_turns(value, keys)


def _are_strings(record: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(record.get(name), str) for name in names)


_FORMS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "messages": _are_messages,
    "sharegpt": _is_sharegpt,
    "alpaca": _is_alpaca,
    "completion": _is_completion,
}
_FIELDS = {
    "messages": "the field messages",
    "sharegpt": "the field conversations",
    "alpaca": "the fields instruction and output",
    "completion": "the fields prompt and completion",
}
