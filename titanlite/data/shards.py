"""The files of a stream: local ones, files behind a URL, and those of a data set of the Hugging Face hub.

One rank lists them and hands the list on. `datasets` finds the files of a data set of the hub; they are read here, by
`fsspec` and `iter_rows`: `datasets` turns the texts around a record of another type into JSON without an error, and its
errors have no record numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from titanlite.config.text_names import HubText
from titanlite.data import DataError
from titanlite.data.formats import Columns, Format, Record, iter_rows
from titanlite.utils import counted, human_time, logger

_SUFFIX = r"\.(jsonl?|ndjson|parquet|arrow|txt|text)(\.gz|\.zst)?$"
#: Seconds before the first and the longest wait for a source to come back.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0


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

        What fails on its way here is read again from the next row on, after a wait. Raises DataError, naming file and
        row, for bad records, and when the source has not come back in `patience` seconds.
        """
        name, row, waits, failing = self.names[shard], start, 0, 0.0
        remote = "://" in name
        while True:
            try:
                with open_file(name) as file:
                    for record in iter_rows(file, public_name(name), self.kind, self.columns, row):
                        yield record
                        row, waits = record.number, 0
                return
            except Exception as error:
                if isinstance(error, DataError):
                    raise
                reason, failed = _reason(error), f"{public_name(name)} cannot be read after record {row}"
                failing = time.monotonic() if waits == 0 else failing
                waits += 1
                tried = time.monotonic() - failing
                wait = retry_wait(error, waits, self.patience - tried) if remote else None
                if wait is None:
                    if remote and not _is_final(reason):
                        failed += f", {counted(waits, 'tries')} in {human_time(tried)} (data.retry_seconds)"
                    raise DataError(f"{failed}: {words(reason)}") from error
                logger.warning(f"{failed} ({words(reason)}): try {waits + 1} in {wait:.0f} s")
                time.sleep(wait)


def _reason(error: Exception) -> BaseException:
    """Return the real error of an HTTP server: fsspec makes "no such file" of each one while it opens a file."""
    cause = error.__cause__
    return cause if cause is not None and type(cause).__module__.startswith("aiohttp") else error


def public_name(name: str) -> str:
    """Return a name without the query of a URL, which may hold a signature."""
    return name.partition("?")[0] if "://" in name else name


def retry_wait(error: Exception, tries: int, left: float) -> float | None:
    """Return the seconds to wait before another try; None if it cannot help, or `left` seconds are too few.

    They are those that the server asks for, else twice as many each time, with jitter.
    """
    reason = _reason(error)
    if _is_final(reason):
        return None
    headers = getattr(getattr(reason, "response", None), "headers", None) or getattr(reason, "headers", None) or {}
    asked = str(headers.get("Retry-After", ""))
    wait = min(_FIRST_WAIT * 2 ** (tries - 1), _LONGEST_WAIT) * random.uniform(0.5, 1.0)
    if asked.isdigit():
        wait = float(asked) + random.random()
    return wait if wait <= left else None


def _is_final(error: BaseException) -> bool:
    """Return whether another try cannot help: no such file, or no right to read it."""
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status", None)
    return isinstance(error, FileNotFoundError | PermissionError) or status in (400, 401, 403, 404, 410)


def words(error: BaseException) -> str:
    """Return an error on one line, without the queries of URLs."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"(://[^\s?]+)\?[^\s'\"]+", r"\1?…", text)[:300]  # the query may hold a signature


def open_file(name: str) -> Any:
    """Open a local file or a URL for reading, as a context manager."""
    if "://" not in name:
        return open(name, "rb")
    import fsspec

    options = {}
    if name.startswith(("http://", "https://")):
        import aiohttp

        # A large file may take long; a server that says nothing may not.
        options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=30)}}
    return fsspec.open(name, "rb", **options)


def url_files(url: str, key: str) -> list[str]:
    """Return the files behind a URL in order of their names: one file, a glob, or a folder of a store.

    Raises DataError, naming the config's `key`, if there are none or the store cannot be asked.
    """
    import fsspec

    scheme = url.partition("://")[0]
    if scheme in ("http", "https") and "*" not in url and not url.endswith("/"):
        return [url]
    try:
        files, path = fsspec.core.url_to_fs(url)
        found = files.glob(path) if any(sign in path for sign in "*?[") else files.find(path)
    except Exception as error:
        raise DataError(f"{key}: {url} cannot be listed: {words(error)}") from error
    names = sorted(files.unstrip_protocol(name) for name in found if not os.path.basename(name).startswith((".", "_")))
    known = [name for name in names if re.search(_SUFFIX, name)]
    if not names:
        raise DataError(f"{key}: there are no files at {url}")
    return known or names


def hub_files(text: HubText, subset: str | None, split: str | None, key: str) -> tuple[list[str], str, Format]:
    """Return the URLs of the files of a data set of the hub, their commit, and their kind.

    `datasets` finds them as `load_dataset` does. Raises DataError, naming the config's `key`, if it cannot.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(f"{key}: the hub needs the package datasets: pip install 'titanlite[data]'") from None
    subset, split = subset or text.subset, split or text.split
    try:
        builder = datasets.load_dataset_builder(text.repository, subset)
    except Exception as error:
        raise DataError(
            f"{key}: the hub's data set {text.repository}{f', subset {subset},' if subset else ''} cannot be listed: "
            f"{words(error)}. A private or gated one needs HF_TOKEN"
        ) from error
    files = builder.config.data_files or {}
    if split not in files:
        raise DataError(f"{key}: {text.repository} has no split {split!r}; it has {', '.join(files) or 'no files'}")
    names = [str(name) for name in files[split]]
    revision = next((found[1] for name in names if (found := re.match(r"hf://datasets/[^@]+@([0-9a-f]+)/", name))), "")
    kinds: dict[str, Format] = {"json": "json", "parquet": "parquet", "arrow": "arrow"}
    return names, revision, kinds.get(type(builder).__module__.rpartition(".")[2], "auto")
