"""The files of a stream: local ones, files behind a URL, and those of a data set of the Hugging Face hub.

One rank lists them and hands the list on. `datasets` finds the files of a data set of the hub; they are read here, by
`fsspec` and `iter_rows`: `datasets` turns the texts around a record of another type into JSON without an error, and its
errors have no record numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from titanlite.config.text_names import HubText
from titanlite.config.urls import chain_problem
from titanlite.data import DataError
from titanlite.data.formats import ENDINGS, Columns, Format, Record, read_file
from titanlite.data.remote import FileChangedError, public_name, retried
from titanlite.utils import logger

#: Seconds for a remote source to list its files.
_LISTING_SECONDS = 60.0


@dataclass(frozen=True)
class Shards:
    """Files of records, read from any row on.

    names: paths and URLs, in a fixed order. revision: commit of a data set of the hub, a part of the names.
    patience: seconds for a remote source to come back. key: of the config, for errors.
    """

    names: tuple[str, ...]
    columns: Columns
    kind: Format = "auto"
    revision: str = ""
    patience: float = 0.0
    key: str = "training.dataset_path"

    def fingerprint(self, description: str) -> str:
        """Return a hash of the files' names without folder, revision and signature, the columns, and `description`."""
        names = [
            name.replace(f"@{self.revision}", "") if self.revision else os.path.basename(public_name(name))
            for name in self.names
        ]
        return hashlib.sha256(
            json.dumps([names, list(self.columns.wanted), self.kind, description, *(self.columns.chat or ())]).encode()
        ).hexdigest()

    def at(self, revision: str) -> Shards:
        """Return the same files of another commit, whose order a checkpoint has."""
        if not revision or revision == self.revision:
            return self
        logger.info(f"{self.key}: the data set is read at the checkpoint's revision {revision}, not {self.revision}")
        names = (name.replace(f"@{self.revision}", f"@{revision}") for name in self.names)
        return replace(self, names=tuple(names), revision=revision)

    def records(self, shard: int, start: int) -> Iterator[Record]:
        """Iterate over the records of a file from row `start` on, 0 the first.

        Raises DataError, naming file and place, for bad records, and when the source has not come back in `patience`
        seconds. Of a file that was replaced the rows after those served are read.
        """
        name, row, changed = self.names[shard], start, -1
        while True:
            try:
                for record in read_file(name, self.kind, self.columns, row, self.patience):
                    yield record
                    row = record.number
                return
            except FileChangedError as error:
                if row == changed:
                    raise
                logger.warning(f"{error}: it is read again, from record {row + 1} on")
                changed = row


def url_files(url: str, key: str) -> list[str]:
    """Return the files behind a URL in order of their names: one file, a glob, or a folder of a store.

    Raises DataError, naming the config's `key`, if there are none or the store cannot be asked.
    """
    import fsspec

    if reason := chain_problem(url):
        raise DataError(f"{key}: {public_name(url)} {reason}")
    if url.startswith(("http://", "https://")) and "*" not in url and not url.endswith("/"):
        return [url]

    def find() -> list[str]:
        files, path = fsspec.core.url_to_fs(url)
        found = files.glob(path) if any(sign in path for sign in "*?[") else files.find(path)
        return sorted(map(files.unstrip_protocol, found))

    names = retried(find, f"{key}: {public_name(url)} cannot be listed", _LISTING_SECONDS)
    names = [name for name in names if not os.path.basename(name).startswith((".", "_"))]
    if not names:
        raise DataError(f"{key}: there are no files at {public_name(url)}")
    return [name for name in names if name.endswith(ENDINGS)] or names


def hub_files(text: HubText, subset: str | None, split: str | None, key: str) -> tuple[list[str], str, Format]:
    """Return the URLs of the files of a data set of the hub, their commit, and their kind.

    `datasets` finds them as `load_dataset` does. Raises DataError, naming the config's `key`, if it cannot.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(f"{key}: the hub needs the package datasets: pip install 'titanlite[data]'") from None
    subset, split = subset or text.subset, split or text.split
    what = f"{key}: the hub's data set {text.repository}{f', subset {subset},' if subset else ''}"
    failed = f"{what} cannot be listed (a private or gated one needs HF_TOKEN)"
    builder = retried(lambda: datasets.load_dataset_builder(text.repository, subset), failed, _LISTING_SECONDS)
    files = builder.config.data_files or {}
    if split not in files:
        raise DataError(f"{key}: {text.repository} has no split {split!r}; it has {', '.join(files) or 'no files'}")
    names = [str(name) for name in files[split]]
    revision = next((found[1] for name in names if (found := re.match(r"hf://datasets/[^@]+@([0-9a-f]+)/", name))), "")
    kind = type(builder).__module__.rpartition(".")[2]
    return names, revision, cast(Format, kind) if kind in ("json", "parquet", "arrow") else "auto"
