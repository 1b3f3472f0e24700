"""The files of a text, their columns, and the records of local ones, of each kind that `formats`
reads.

A missing, empty or damaged source is an error that names it; nothing replaces the text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from titanlite.config.data_sections import Data, DataSource
from titanlite.config.dataset_registry import REGISTERED, HubText
from titanlite.config.urls import public_name
from titanlite.data import DataError
from titanlite.data.file_kinds import Format
from titanlite.data.formats import read_file
from titanlite.data.listing import Listing, Place
from titanlite.data.local_files import list_text
from titanlite.data.records import Columns, Record
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import logger, note_progress

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


@dataclass(frozen=True)
class TextFiles:
    """Files of records, with paths and URLs as `names` in a fixed order.

    `revision` is the commit of a data set of the hub. A remote source has `patience` seconds to
    come back. Errors name the config's `key`.
    """

    names: tuple[str, ...]
    columns: Columns
    kind: Format = "auto"
    revision: str = ""
    patience: float = 0.0
    key: str = "training.dataset_path"
    #: How the files were found, for reports.
    listing: Listing | None = field(default=None, compare=False)
    #: Stamp of each file, see `titanlite.data.file_stamps`; (): not known.
    stamps: tuple[str, ...] = field(default=(), compare=False)

    def fingerprint(self, description: str) -> str:
        """Return a hash of names without folder, revision and signature, columns and
        `description`.
        """
        if self.revision:
            names = [name.replace(f"@{self.revision}", "") for name in self.names]
        else:
            names = [os.path.basename(public_name(name)) for name in self.names]
        wanted = list(self.columns.wanted)
        decisive = [names, wanted, self.kind, description, *self.columns.decisive]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()

    def at(self, revision: str) -> TextFiles:
        """Return the same files of another commit, as of a checkpoint."""
        if not revision or revision == self.revision:
            return self
        logger.info(
            f"{self.key}: the data set is read at the checkpoint's revision {revision}, not "
            f"{self.revision}"
        )
        names = (name.replace(f"@{self.revision}", f"@{revision}") for name in self.names)
        return replace(self, names=tuple(names), revision=revision)

    def records(self, shard: int, start: int) -> Iterator[Record]:
        """Iterate over the records of a file from row `start` on, 0 the first.

        Raises DataError for bad records, and after `patience` seconds without the source.
        """
        name = self.names[shard]
        for record in read_file(name, self.kind, self.columns, start, self.patience):
            note_progress("data")
            yield record

    def all_records(self) -> Iterator[Record]:
        """Iterate over all records in order. Raises DataError if there is none."""
        of_files = (self.records(number, 0) for number in range(len(self.names)))
        return all_of(of_files, self.names)


def find_text(
    dataset: str, path: str | None, key: str, split: str | None = None, format: Format = "auto"
) -> Listing:
    """Return the files of a data set in the order of reading, see `list_text`.

    Only names in `BUNDLED` need no path. Raises DataError without a path or such a file.
    """
    if path is None:
        if dataset not in BUNDLED:
            names = " or ".join(BUNDLED)
            raise DataError(
                f'the text "{dataset}" is not bundled; set {key} to local files of text, or take '
                f"{names}"
            )
        return list_text(Place(str(BUNDLED[dataset])))
    return list_text(Place(path, key, split, format))


def columns_of(
    data: Data,
    dataset: str,
    path: str | None,
    source: DataSource | None = None,
    tokenizer: Tokenizer | None = None,
) -> Columns:
    """Return the fields of a text's records: those of the source, else those of `data`.

    Bundled text has its own. A source with only a text_key has no prompts.
    """
    if path is None and dataset in BUNDLED:
        return Columns("completion", "prompt") if dataset in _PROMPTED else Columns()
    source = source or DataSource()
    has_prompts = source.prompt_key or source.completion_key
    has_own = source.text_key or has_prompts or source.messages_key
    section = "data.source" if has_own else "data"
    messages = source.messages_key if has_own else data.messages_key
    if messages:
        from titanlite.data.chat import load_template

        assert tokenizer is not None
        template = load_template(data.chat_template, tokenizer, day=data.template_date)
        return Columns(messages, None, section, template)
    prompt = source.prompt_key or data.prompt_key
    completion = source.completion_key or data.completion_key
    if prompt and completion and (has_prompts or not source.text_key):
        return Columns(completion, prompt, section)
    usual = REGISTERED.get(dataset, HubText("")).text_key
    return Columns(source.text_key or data.text_key or usual, None, section)


def list_files(path: Path, key: str = "training.dataset_path") -> list[Path]:
    """Return the files of a path in the order of reading, see `list_text`."""
    return [Path(file) for file in list_text(Place(str(path), key)).files]


def iter_records(
    path: Path | Iterable[Path], columns: Columns | None = None, kind: Format = "auto"
) -> Iterator[Record]:
    """Iterate over the records of a path or a list of files, in order.

    Raises DataError as `list_files` and `iter_rows`, and without records.
    """
    files = list_files(path) if isinstance(path, Path) else list(path)
    return all_of((read_file(file, kind, columns) for file in files), files)


def all_of(records: Iterable[Iterator[Record]], files: Sequence[Path | str]) -> Iterator[Record]:
    """Iterate over the records of some files. Raises DataError if there is none."""
    record = None
    for record in itertools.chain.from_iterable(records):
        yield record
    if record is None:
        names = ", ".join(public_name(str(file)) for file in files[:3]) + ", …" * (len(files) > 3)
        raise DataError(f"no records in {names}: the files are empty; give files with text")
