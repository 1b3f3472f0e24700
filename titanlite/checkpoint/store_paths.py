"""Paths of checkpoints: folders of the file system, or URLs of object stores, reached through
fsspec. No torch here.

`StorePath` has the methods of `pathlib.Path` that checkpoints need; the functions below hide the
other differences. fsspec, and the package that it needs for a store, are imported when a store is
first asked.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from titanlite import exit_codes
from titanlite.config.urls import STORES, is_url, store_needs
from titanlite.utils import atomic_write, new_file, sync

#: Bytes of one part of a large upload.
_PART = 32 << 20
#: Seconds until a store must have accepted a connection, and until it must have answered.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 60}}
}
_OPTIONS["s3a"] = _OPTIONS["s3"]
_NO_BUCKET = re.compile("(bucket|container) does not exist")
#: Functions of fsspec for which a missing path means a missing bucket.
_WRITES = ("pipe_file", "write", "close")


class StoreError(OSError):
    """A store cannot be asked, or refuses: nothing is known of its content.

    Not for an object that does not exist.
    """

    exit_code = exit_codes.CHECKPOINT


class Stat(NamedTuple):
    """Length and time of an object, named as in `os.stat_result`."""

    st_size: int
    #: Seconds since the epoch; 0 where the store does not say.
    st_mtime: float


@dataclass(frozen=True)
class StorePath:
    """A path in an object store, such as `s3://bucket/run/checkpoint`; a folder exists while it
    holds an object.

    Raises StoreError, with the URL, for all that the store refuses, and FileNotFoundError.
    """

    url: str

    def __post_init__(self) -> None:
        scheme, _, rest = self.url.partition("://")
        # No slash at an end, none doubled.
        key = "/".join(part for part in rest.split("/") if part)
        object.__setattr__(self, "url", f"{scheme.lower()}://{key}")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    @property
    def protocol(self) -> str:
        return self.url.partition("://")[0]

    @property
    def key(self) -> str:
        """Bucket and path below it."""
        return self.url.partition("://")[2]

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        return StorePath(f"{self.protocol}://{self.key.rpartition('/')[0]}")

    @property
    def fs(self) -> Any:
        """fsspec's file system of this process, whose errors are StoreErrors."""
        return _Client(_filesystem(self.protocol, os.getpid()), self)

    def listing(self) -> dict[str, dict[str, Any]]:
        """Return fsspec's record of each entry by name, by one request; empty where there is
        nothing.
        """
        try:
            found = self.fs.ls(self.key, detail=True)
        except FileNotFoundError:
            return {}
        prefix = f"{self.key}/"
        records = {}
        for entry in found:
            name = entry["name"].strip("/")
            # An object "folder/" is no entry.
            if name.startswith(prefix):
                records[name.removeprefix(prefix)] = entry
        return records

    def stat(self) -> Stat:
        return _stat(self.fs.info(self.key))

    def is_dir(self) -> bool:
        return bool(self.listing())

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        try:
            return bool(self.fs.info(self.key)["type"] == "file")
        except FileNotFoundError:
            return False

    def read_bytes(self) -> bytes:
        content: bytes = self.fs.cat_file(self.key)
        return content

    def write_bytes(self, content: bytes) -> None:
        """Write one object in one request: it exists as a whole and durably, or not at all."""
        self.fs.pipe_file(self.key, content)

    def write_new(self, content: bytes) -> None:
        """Write one object where there is none. Raises FileExistsError.

        S3, Google's and Azure's stores check that themselves.
        """
        try:
            self.fs.pipe_file(self.key, content, mode="create")
        except FileExistsError:
            # The answer to our own request may have been lost, and the request sent again.
            # It may be gone again.
            with contextlib.suppress(FileNotFoundError):
                if self.read_bytes() == content:
                    return
            raise
        except StoreError as error:
            cause = error.__cause__
            lacks_conditions = isinstance(cause, (NotImplementedError, TypeError))
            if isinstance(cause, OSError):
                text = str(cause).lower()
                lacks_conditions = cause.errno == errno.ENOSYS or "not implemented" in text
            if not lacks_conditions:
                raise
            if self.is_file():
                raise FileExistsError(errno.EEXIST, "Object exists", str(self)) from None
            self.write_bytes(content)

    @contextlib.contextmanager
    def open(self, mode: str, buffering: int = -1) -> Iterator[Any]:
        """Open for "rb", where each read is one request, or for "wb".

        A written object exists after the block, and not at all when the block raises.
        """
        assert mode in ("rb", "wb"), mode
        stream = self.fs.open(self.key, mode)
        try:
            yield stream
        except BaseException:
            stream.discard()
            raise
        stream.close()

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self.fs.rm_file(self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise


AnyPath = Path | StorePath


def to_path(text: str | AnyPath) -> AnyPath:
    """Return the path of a text or URL; `file://` is the file system."""
    if isinstance(text, (Path, StorePath)):
        return text
    if not is_url(text):
        return Path(text)
    if text.lower().startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return StorePath(text)


def entries(folder: AnyPath) -> dict[str, bool]:
    """Return name → whether it is a folder; empty without such a folder."""
    if isinstance(folder, StorePath):
        return {name: entry["type"] == "directory" for name, entry in folder.listing().items()}
    try:
        return {path.name: path.is_dir() for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def files_in(folder: AnyPath) -> Mapping[str, Stat | os.stat_result]:
    """Return name → length and time of a folder's files; of a store by one request."""
    if isinstance(folder, StorePath):
        files = {name: one for name, one in folder.listing().items() if one["type"] == "file"}
        return {name: _stat(entry) for name, entry in files.items()}
    found = {}
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    for path in paths:
        # A reader may take its pin back meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found[path.name] = path.stat()
    return found


def write_new(path: AnyPath, content: bytes) -> None:
    """Write a small file atomically and durably. Raises FileExistsError."""
    if isinstance(path, StorePath):
        path.write_new(content)
        return
    if path.exists():
        raise FileExistsError(errno.EEXIST, "File exists", str(path))
    temporary = path.with_name(f"{path.name}.part")
    try:
        with new_file(temporary) as stream:
            stream.write(content)
            sync(stream)
    except OSError as error:
        # A full disk's error has no name of a file.
        raise OSError(error.errno, f"{temporary} cannot be written: {error.strerror}") from error
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_whole(path: AnyPath, content: bytes) -> None:
    """Write a small file: a reader sees the old content or the new."""
    if isinstance(path, StorePath):
        path.write_bytes(content)
    else:
        atomic_write(path, content)


def sync_folder(folder: AnyPath) -> None:
    """Make a folder's entries durable: without it, a crash may lose a rename or a deletion.

    Stores do so themselves.
    """
    if isinstance(folder, StorePath):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_folder(folder: StorePath, target: StorePath) -> None:
    """Copy all objects within the store."""
    sources = folder.fs.find(folder.key)
    names = [key.strip("/").removeprefix(f"{folder.key}/") for key in sources]
    folder.fs.copy(sources, [f"{target.key}/{name}" for name in names])


def remove_folder(folder: AnyPath) -> None:
    """Delete a folder and all in it, if it exists; of a link the link. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if isinstance(folder, StorePath):
            folder.fs.rm(folder.key, recursive=True)
            # Clients do not report objects that they may not delete.
            if left := folder.listing():
                raise StoreError(
                    f"{folder}: {len(left)} objects cannot be deleted, such as {min(left)}"
                )
        elif folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)


def _stat(info: Mapping[str, Any]) -> Stat:
    keys = ("LastModified", "last_modified", "mtime", "updated", "created")
    value = next((info[key] for key in keys if info.get(key)), 0.0)
    # Google's store gives times as text.
    if isinstance(value, str):
        value = datetime.fromisoformat(value.replace("Z", "+00:00"))
    if isinstance(value, datetime):
        return Stat(info["size"], value.timestamp())
    return Stat(info["size"], float(value))


@functools.cache
def _filesystem(protocol: str, process: int) -> Any:
    """Return fsspec's object, which lists without a cache: none may be used after a fork."""
    import fsspec

    # Others take arguments from a URL, as ftp:// its host.
    if protocol not in (*STORES, "memory"):
        raise StoreError(f"{protocol}:// is no kind of store that is known here")
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise StoreError(store_needs(protocol, error)) from None
    return kind(use_listings_cache=False, skip_instance_cache=True, **_OPTIONS.get(protocol, {}))


class _Client:
    """fsspec's file system or open file, whose errors are StoreErrors with the URL."""

    def __init__(self, target: Any, path: StorePath) -> None:
        self._target = target
        self._path = path

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return functools.partial(self._call, value) if callable(value) else value

    def open(self, key: str, mode: str) -> _Client:
        file = self._call(self._target.open, key, mode, block_size=_PART, cache_type="none")
        return _Client(file, self._path)

    def write(self, data: Any) -> int:
        # In parts: fsspec would copy a large tensor as a whole.
        view = memoryview(data).cast("B")
        written = 0
        for start in range(0, len(view), _PART):
            written += self._call(self._target.write, view[start : start + _PART])
        return written

    def discard(self) -> None:
        # There is a reason already.
        with contextlib.suppress(Exception):
            self._target.discard()
        self._target.closed = True

    def _call(self, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        try:
            return function(*arguments, **more)
        except (StoreError, FileExistsError):
            raise
        except FileNotFoundError as error:
            if function.__name__.strip("_") in _WRITES or _NO_BUCKET.search(str(error)):
                bucket = f"{self._path.protocol}://{self._path.key.partition('/')[0]}"
                raise StoreError(f"{self._path}: there is no bucket {bucket}") from error
            raise FileNotFoundError(errno.ENOENT, "No such object", str(self._path)) from error
        except Exception as error:
            # Each client has its own errors, without a common class.
            raise StoreError(f"{self._path}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    name = type(error).__name__
    # Without the query of an address.
    text = re.sub(r'\?[^"\s]*', "", str(error)) or name
    if "Credential" in name:
        return (
            f"no credentials ({text}): for S3 set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_PROFILE"
        )
    if isinstance(error, PermissionError):
        return f"access denied ({text})"
    if "Connect" in name or isinstance(error, (ConnectionError, TimeoutError)):
        return (
            f"the store cannot be reached ({text}); AWS_ENDPOINT_URL_S3 names another than Amazon's"
        )
    return text
