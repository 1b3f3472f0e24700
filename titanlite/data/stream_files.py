"""The files of a stream: local, behind a URL, or in a data set of the Hugging Face hub.

One rank lists them and hands the list on. `datasets` finds the files of a data set of the hub;
`fsspec` and `iter_rows` read them here. `datasets` turns the texts around a record of another type
into JSON without an error. Its errors have no record numbers.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

from titanlite.config.data_sections import DataSource
from titanlite.config.dataset_registry import HubText, hub_text
from titanlite.config.urls import public_name
from titanlite.data import DataError
from titanlite.data.choose_files import choose, listing_of, named_files
from titanlite.data.connection_check import COPY, reach
from titanlite.data.dataset_sources import key_of
from titanlite.data.file_kinds import Format, is_hidden
from titanlite.data.file_stamps import stamp_of
from titanlite.data.listing import FoundFile, Listing, Place
from titanlite.data.records import Columns
from titanlite.data.remote import (
    check_url,
    open_file,
    retried,
    url_to_fs,
    words,
)
from titanlite.data.split_names import ALL_SPLITS
from titanlite.data.text_files import TextFiles
from titanlite.utils import counted, logger, pip_install

#: Seconds for a remote source to list its files.
_LISTING_SECONDS = 60.0
#: Threads that ask a server for each of its files.
_ASKING = 16


def remote_files(
    source: DataSource, columns: Columns, kind: Format, section: str, patience: float
) -> TextFiles:
    """List the files of a URL or a data set of the hub."""
    key = key_of(section, "path")
    revision = ""
    at = ""
    stamps: tuple[str, ...] = ()
    if source.path is None:
        text = hub_text(source.name or "")
        assert text is not None
        names, revision, found = hub_files(text, source.subset, source.split, key_of(section))
        kind = found if kind == "auto" else kind
        listing = listing_of(names, source.split or text.split)
        at = f" at revision {revision}" if revision else ""
    else:
        listing = url_text(Place(source.path, key, source.split, kind))
        stamps = listing.stamps
        if source.path.startswith(("http://", "https://")):
            # A page of links tells nothing of the files.
            with ThreadPoolExecutor(_ASKING, thread_name_prefix="titanlite-ask") as pool:
                stamps = tuple(pool.map(lambda name: _stamp(name, patience), listing.files))
    name = public_name(source.name or str(source.path))
    count = counted(len(listing.files), "files")
    logger.info(f"{name}: {count}{at}, the first is {public_name(listing.files[0])}")
    return TextFiles(listing.files, columns, kind, revision, patience, key, listing, stamps)


def _stamp(url: str, patience: float) -> str:
    with open_file(url, patience) as file:
        return stamp_of(*file.raw.identity)


def url_text(place: Place) -> Listing:
    """Return the text behind a URL, by the rules of `titanlite.data.choose_files`.

    If no name in a folder is one of text, all its files are read. Raises DataError, naming the key,
    for no files, an unclear choice, or a store that cannot be asked.
    """
    url = place.path
    check_url(place.key, url)
    reach(url, f"{place.key}: {public_name(url)} cannot be read", COPY)
    is_http = url.startswith(("http://", "https://"))
    if is_http and "*" not in url and not url.endswith("/"):
        return named_files([FoundFile(url, _base(url))], place)
    found = _listed(url, place.key)
    is_pattern = any(sign in public_name(url) for sign in "*?[")
    if not is_pattern and any(file.kind for file in found):
        return choose(found, replace(place, path=public_name(url)))
    shown = [file for file in found if not is_hidden(file.base)]
    if not shown:
        raise DataError(f"{place.key}: there are no files at {public_name(url)}")
    return named_files([file for file in shown if file.kind] or shown, place)


def _base(url: str) -> str:
    return os.path.basename(public_name(url))


def _listed(url: str, key: str) -> list[FoundFile]:
    def find() -> list[FoundFile]:
        system, path = url_to_fs(url)
        if any(sign in path for sign in "*?["):
            found = system.glob(path, detail=True)
            path = _fixed_part(path)
        else:
            found = system.find(path, detail=True)
        files = {system.unstrip_protocol(name): about for name, about in found.items()}
        root = public_name(system.unstrip_protocol(path).rstrip("/") + "/")
        listed: list[FoundFile] = []
        for name, about in sorted(files.items()):
            if about.get("type") != "directory":
                relative = public_name(name).removeprefix(root) or _base(name)
                size = about.get("size")
                tag = about.get("ETag") or about.get("etag")
                stamp = stamp_of(size, tag, about.get("LastModified"))
                listed.append(FoundFile(name, relative, size, stamp))
        return listed

    return retried(find, f"{key}: {public_name(url)} cannot be listed", _LISTING_SECONDS)


def _fixed_part(pattern: str) -> str:
    return re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]


def hub_files(
    text: HubText, subset: str | None, split: str | None, key: str
) -> tuple[list[str], str, Format]:
    """Return the URLs of the files of a data set of the hub, their commit, and their kind.

    `datasets` finds them. Raises DataError, naming `key`, if it cannot.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{key}: the hub needs the package datasets: {pip_install('datasets')}"
        ) from None
    subset = subset or text.subset
    split = split or text.split
    of_subset = f", subset {subset}," if subset else ""
    failed = f"{key}: the hub's data set {text.repository}{of_subset} cannot be listed"
    reach("hf://", failed, COPY)

    def ask() -> Any:
        try:
            return datasets.load_dataset_builder(text.repository, subset)
        except datasets.exceptions.DatasetNotFoundError as error:
            hidden = "a private or gated one needs HF_TOKEN"
            raise DataError(f"{failed} ({hidden}): {words(error)}") from error

    builder = retried(ask, failed, _LISTING_SECONDS)
    files = builder.config.data_files or {}
    if split in files:
        names = [str(name) for name in files[split]]
    elif split == ALL_SPLITS:
        names = [str(name) for found in files.values() for name in found]
    else:
        known = ", ".join(files) or "no files"
        raise DataError(f"{key}: {text.repository} has no split {split!r}; it has {known}")
    kind = type(builder).__module__.rpartition(".")[2]
    known_kind = cast(Format, kind) if kind in ("json", "parquet", "arrow") else "auto"
    # The commit is a part of the URLs.
    commits = [re.match(r"hf://datasets/[^@]+@([0-9a-f]+)/", name) for name in names]
    return names, next((found[1] for found in commits if found), ""), known_kind
