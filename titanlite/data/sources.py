"""Read documents: local files of each kind that `formats` reads, or a function of yours.

A missing, empty or damaged source is an error that names it; nothing replaces the text.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from titanlite.config.extensions import load_function
from titanlite.config.sections import Data, DataSource
from titanlite.config.text_names import REGISTERED
from titanlite.data import DataError
from titanlite.data.chat import load_template
from titanlite.data.formats import COMPRESSED, SUFFIXES, Columns, Format, Record, iter_rows
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import logger

#: Number of empty files that a warning names.
_NAMED = 3
_ASSETS = Path(__file__).parent / "assets"

#: Text that is bundled with titanlite, by data set name.
BUNDLED: dict[str, Path] = {
    "c4_test": _ASSETS / "train",
    "c4_validation": _ASSETS / "validation",
    "sft_test": _ASSETS / "sft" / "train",
    "sft_validation": _ASSETS / "sft" / "validation",
}
#: Bundled text of prompts and completions.
_PROMPTED = ("sft_test", "sft_validation")

#: Files that `datasets` writes beside the text.
_NO_TEXT = {"dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json"}
#: Subfolders that training must not read together with others.
_HELD_OUT = {"test", "validation", "valid", "val", "dev", "eval"}


def source_files(dataset: str, path: str | None, section: str = "training") -> list[Path]:
    """Return the files of a data set in reading order, by name. Rank 0 warns of empty ones.

    Args:
        dataset: a name in `BUNDLED`; any other needs a path.
        path: see `list_files`; None: the bundled text.
        section: of the config, for the keys in errors.

    Raises DataError for text that is not bundled, a missing path, or one without such a file.
    """
    if path is None:
        if dataset not in BUNDLED:
            raise DataError(
                f'{section}.dataset: the text "{dataset}" is not bundled; set {section}.dataset_path to local files of '
                f"text, or take {' or '.join(BUNDLED)}"
            )
        return list_files(BUNDLED[dataset])
    files = list_files(Path(path), f"{section}.dataset_path")
    empty = [file for file in files if file.stat().st_size == 0]
    if empty and len(empty) < len(files):  # where all are empty, reading refuses them
        names = ", ".join(map(str, empty[:_NAMED])) + f" and {len(empty) - _NAMED} more" * (len(empty) > _NAMED)
        level = logging.INFO if os.environ.get("RANK", "0") != "0" else logging.WARNING
        count = f"{len(empty)} of {len(files)} files"
        logger.log(level, f"{section}.dataset_path: {count} are empty (0 bytes) and hold no text: {names}")
    return files


def columns_of(
    data: Data, dataset: str, path: str | None, source: DataSource | None = None, tokenizer: Tokenizer | None = None
) -> Columns:
    """Return the fields of a text's records: of bundled text its own, else those of the source, else those of `data`.

    A source with a text_key and no other key has no prompts. tokenizer: brings the template of messages.
    """
    if path is None and dataset in BUNDLED:
        return Columns("completion", "prompt") if dataset in _PROMPTED else Columns()
    source = source or DataSource()
    own = source.text_key or source.prompt_key or source.completion_key
    messages = source.messages_key or (None if own else data.messages_key)
    if messages:
        assert tokenizer is not None
        section = "data.source" if source.messages_key else "data"
        return Columns(messages, None, section, load_template(data.chat_template, tokenizer))
    section = "data.source" if source.text_key or source.prompt_key or source.completion_key else "data"
    if not source.text_key or source.prompt_key or source.completion_key:
        prompt, completion = source.prompt_key or data.prompt_key, source.completion_key or data.completion_key
        if prompt and completion:
            return Columns(completion, prompt, section)
    registered = REGISTERED.get(dataset)
    return Columns(source.text_key or data.text_key or (registered.text_key if registered else "text"), None, section)


def list_files(path: Path, key: str = "training.dataset_path") -> list[Path]:
    """Return `path` itself if it is a file, the files that it matches as a pattern, or those of the folder, sorted.

    Of a folder these are the files directly in it that have a name of `SUFFIXES`, else those of its subfolders. Of
    several kinds only the first counts. Raises DataError, naming the config's `key`, if there is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        files = sorted(file for file in map(Path, glob.iglob(str(path), recursive=True)) if file.is_file())
        if files:
            return files
        hint = f" (looked from {Path.cwd()}; a data set of the Hugging Face hub is named by {key[:-5]})"
        hint = "" if path.is_absolute() else hint
        raise DataError(f"{key}: {path} does not exist{hint}; give a file, a pattern or a folder of text")
    files = _text_files(path.iterdir()) or _text_files(
        file for file in path.rglob("*") if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        expected = ", ".join(itertools.chain.from_iterable(SUFFIXES.values()))
        raise DataError(
            f"{key}: the folder {path} holds no text; expected names in {expected}, or these with .gz, .zst"
        )
    splits = sorted({file.relative_to(path).parts[0] for file in files if file.parent != path})
    if len(splits) > 1 and _HELD_OUT.intersection(splits):
        raise DataError(f"{key}: the folder {path} holds several splits; give one of them: {', '.join(splits)}")
    return files


def _text_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of the first kind that there is, sorted."""
    files = [file for file in paths if file.name not in _NO_TEXT and file.is_file()]
    for suffixes in SUFFIXES.values():
        names = tuple(suffix + packed for suffix in suffixes for packed in ("", *COMPRESSED))
        if found := sorted(file for file in files if file.name.endswith(names)):
            return found
    return []


def own_records(function: str, key: str, columns: Columns | None = None) -> Iterator[Record]:
    """Iterate over the documents that a function of yours returns: texts, or tables with a `text` or other `columns`.

    function: its dotted path. It must return the same documents in the same order on each rank and at each start:
    a document's number is its place in the data order, and a checkpoint's fingerprint is of all texts.
    Raises DataError, naming the config's `key`, for a document without a text, and if there is none at all.
    """
    number = 0
    columns = columns or Columns()
    wanted = columns.wanted
    for number, document in enumerate(load_function(key, function)(), 1):
        where = f"{key}: document {number} of {function}"
        if columns.chat is not None:
            messages = document.get(columns.text) if isinstance(document, Mapping) else document
            yield Record(function, number, columns.chat.render(messages, where), None)
            continue
        fields = [document.get(column) for column in wanted] if isinstance(document, Mapping) else [document]
        values = [field for field in fields if isinstance(field, str)]
        if len(values) < len(fields):
            what = f"{where} is {document!r:.80}"
            names = ("key " if len(wanted) == 1 else "keys ") + " and ".join(map(repr, wanted))
            raise DataError(f"{what}; expected a text, or a table with the {names}")
        yield Record(function, number, *values)
    if not number:
        raise DataError(f"{key}: {function} returned no documents")


def iter_records(
    path: Path | Iterable[Path], columns: Columns | None = None, kind: Format = "auto"
) -> Iterator[Record]:
    """Iterate over the records of a path or a list of files, in order.

    Raises DataError as `list_files` and `iter_rows` do, for a file that cannot be read, and if there is no record.
    """
    files = list_files(path) if isinstance(path, Path) else list(path)
    record = None
    for file in files:
        place = 0
        try:
            with open(file, "rb") as content:
                for record in iter_rows(content, file, kind, columns):
                    place = record.number
                    yield record
        except OSError as error:
            raise DataError(f"{file}: cannot be read after line {place}: {error.strerror or error}") from error
    if record is None:
        names = ", ".join(str(file) for file in files[:3]) + (", …" if len(files) > 3 else "")
        raise DataError(f"no records in {names}: the files are empty; give files with text")
