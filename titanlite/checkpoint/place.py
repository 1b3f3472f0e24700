"""Where checkpoints lie: a folder of the file system, or a URL of an object store, reached through fsspec.

`StorePath` has those methods of `pathlib.Path` that checkpoints need, so most of this room does not care which of the
two it has. What cannot be alike, as there is no rename in a store, is in `titanlite.checkpoint.store`. fsspec and what
it needs for a store are imported when a store is first asked.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from titanlite import exit_codes
from titanlite.config.urls import is_url, package_of

#: Bytes that are fetched at a time, and that are sent at a time of a large object.
_READ, _WRITE = 8 << 20, 32 << 20
#: Seconds until a store must have taken a connection, and until it must have answered.
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 60}}}
_OPTIONS["s3a"] = _OPTIONS["s3"]
_NO_BUCKET = re.compile("(bucket|container) does not exist")


class StoreError(OSError):
    """A store could not be asked, or refused: nothing is known of what is there. Not for what just is not there."""

    exit_code = exit_codes.CHECKPOINT


class Stat(NamedTuple):
    st_size: int
    #: Seconds since the epoch.
    st_mtime: float


class StorePath:
    """A place in an object store, such as `s3://bucket/run/checkpoint`; a folder is there while an object is below it.

    Raises StoreError, naming the URL, for whatever the store has to object, FileNotFoundError for what is not there.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        self.protocol = scheme.lower()
        #: Bucket and key, without slashes at the ends or doubled ones.
        self.key = "/".join(part for part in rest.split("/") if part)

    def __str__(self) -> str:
        return f"{self.protocol}://{self.key}"

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __lt__(self, other: StorePath) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self}/{name}")

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def parent(self) -> StorePath:
        return StorePath(f"{self.protocol}://{self.key.rpartition('/')[0]}")

    def with_name(self, name: str) -> StorePath:
        return self.parent / name

    def resolve(self) -> StorePath:
        return self

    @property
    def fs(self) -> Any:
        return _filesystem(self.protocol, os.getpid())

    def listing(self, deep: bool = False) -> dict[str, dict[str, Any]]:
        """What the store says of each entry, by its name here (`deep`: of each object, by its path from here).

        Empty where there is nothing.
        """
        with _told(self):
            try:
                if deep:
                    found = list(self.fs.find(self.key, detail=True).values())
                else:
                    found = self.fs.ls(self.key, detail=True)
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    raise  # nothing is known then, in contrast to a folder without anything
                return {}
        prefix = f"{self.key}/"
        names = ((entry["name"].lstrip("/").rstrip("/"), entry) for entry in found)  # an object "folder/" is nothing
        return {name.removeprefix(prefix): entry for name, entry in names if name.startswith(prefix)}

    def iterdir(self) -> Iterator[StorePath]:
        return (self / name for name in self.listing())

    def is_dir(self) -> bool:
        return bool(self.listing())

    def is_file(self) -> bool:
        return self._info() is not None

    def exists(self) -> bool:
        with _told(self):
            try:
                self.fs.info(self.key)
            except FileNotFoundError:
                return False
        return True

    def stat(self) -> Stat:
        info = self._info()
        if info is None:
            raise FileNotFoundError(2, "No such object", str(self))
        return Stat(info["size"], modified(info))

    def _info(self) -> dict[str, Any] | None:
        """What the store says of the object of this name; None when there is none."""
        with _told(self):
            try:
                info: dict[str, Any] = self.fs.info(self.key)
            except FileNotFoundError:
                return None
        return info if info["type"] == "file" else None

    def read_bytes(self) -> bytes:
        with _told(self):
            content: bytes = self.fs.cat_file(self.key)
        return content

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, content: bytes) -> None:
        """One object in one request: it is there as a whole and durable, or not at all."""
        with _told(self, writing=True):
            self.fs.pipe_file(self.key, content)

    def write_new(self, content: bytes) -> None:
        """As `write_bytes`, where nothing is. Raises FileExistsError.

        Stores that know conditional requests (S3, Google's and Azure's do) refuse it themselves.
        """
        try:
            with _told(self, writing=True):
                self.fs.pipe_file(self.key, content, mode="create")
        except FileExistsError:
            # The answer to a request of ours may have been lost, and the request sent again.
            if self.read_bytes() != content:
                raise
        except StoreError as error:
            if not _unknown_condition(error):
                raise
            if self.is_file():
                raise FileExistsError(17, "There is such an object", str(self)) from None
            self.write_bytes(content)

    def reader(self) -> io.BufferedReader:
        """The object as a stream that can be sought. It needs no closing: nothing is held open."""
        return io.BufferedReader(_Reading(self), _READ)

    @contextlib.contextmanager
    def open(self, mode: str, buffering: int = -1) -> Iterator[Any]:
        """For "rb" or "wb": as a stream, read ahead whatever `buffering` says.

        What is written is there after the block, and not at all when that raises.
        """
        if mode == "rb":
            yield self.reader()
            return
        if mode != "wb":
            raise ValueError(f"{self}: an object is read or written as a whole, not opened as {mode!r}")
        stream = _Writing(self)
        try:
            yield stream
        except BaseException:
            stream.discard()
            raise
        stream.close()

    def unlink(self, missing_ok: bool = False) -> None:
        with _told(self):
            try:
                self.fs.rm_file(self.key)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def remove(self, names: Iterable[str]) -> None:
        """Many objects below this place; a client may keep to itself that some could not be deleted."""
        with _told(self), contextlib.suppress(FileNotFoundError):
            self.fs.rm([f"{self.key}/{name}" for name in names])

    def copy_to(self, target: StorePath) -> None:
        """One object, within the store."""
        with _told(self):
            self.fs.cp_file(self.key, target.key)

    def rename(self, target: StorePath) -> StorePath:
        """One object; not at once, as a file is."""
        self.copy_to(target)
        self.unlink()
        return target

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """A folder comes with its first object."""


Place = Path | StorePath


def place(text: str | Place) -> Place:
    """The place that a path or a URL means; `file://` is the file system."""
    if isinstance(text, (Path, StorePath)):
        return text
    if not is_url(text):
        return Path(text)
    if text.lower().startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return StorePath(text)


def sizes(folder: Place) -> dict[str, int]:
    """Name → bytes of the files in a folder; of a store one request tells them all."""
    if isinstance(folder, StorePath):
        return {name: entry["size"] for name, entry in folder.listing().items() if entry["type"] == "file"}
    try:
        return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def modified(info: dict[str, Any]) -> float:
    """When an object was written, in seconds since the epoch; 0 where the store does not say."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


@functools.cache
def _filesystem(protocol: str, process: int) -> Any:
    """fsspec's object, one per process: none of them may be used after a fork. Nothing is listed from memory."""
    import fsspec

    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise StoreError(f"{protocol}:// is no kind of store that fsspec knows") from None
    except ImportError:
        raise StoreError(f"{protocol}:// needs a package: {package_of(protocol)}") from None
    options = {"use_listings_cache": False, "skip_instance_cache": True}
    return kind(**options, **_OPTIONS.get(protocol, {}))


class _Reading(io.RawIOBase):
    """An object's bytes, fetched as they are asked for."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        self._size = path.stat().st_size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        with _told(self._path):
            content = self._path.fs.cat_file(self._path.key, start=self._at, end=end)
        if len(content) != end - self._at:
            raise StoreError(f"{self._path}: {len(content)} bytes came where {end - self._at} were asked for")
        buffer[: len(content)] = content
        self._at = end
        return len(content)


class _Writing:
    """An object that is being written, in pieces where it is large."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        with self._told():
            self._stream = path.fs.open(path.key, "wb", block_size=_WRITE)

    def _told(self) -> contextlib.AbstractContextManager[None]:
        return _told(self._path, writing=True)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        with self._told():  # a large tensor comes at once, and would be copied as a whole
            return sum(self._stream.write(view[at : at + _WRITE]) for at in range(0, len(view), _WRITE))

    def flush(self) -> None:
        """Nothing: pieces are sent when they have their size."""

    def close(self) -> None:
        if not self._stream.closed:
            with self._told():
                self._stream.close()

    def discard(self) -> None:
        """Nothing of it comes into being."""
        if not self._stream.closed:
            with contextlib.suppress(Exception):  # there is a reason already, and this is no better one
                self._stream.discard()
            self._stream.closed = True


@contextlib.contextmanager
def _told(path: StorePath, writing: bool = False) -> Iterator[None]:
    """Whatever a store's client raises, in words and with the URL."""
    try:
        yield
    except (StoreError, FileExistsError):
        raise
    except FileNotFoundError as error:
        if writing or _NO_BUCKET.search(str(error)):
            bucket = f"{path.protocol}://{path.key.partition('/')[0]}"
            raise StoreError(f"{path}: there is no bucket {bucket}") from error
        raise FileNotFoundError(2, "No such object", str(path)) from error
    except Exception as error:  # each client has errors of its own, of no common class
        raise StoreError(f"{path}: {_words(error)}") from error


def _words(error: Exception) -> str:
    name = type(error).__name__
    text = re.sub(r'\?[^"\s]*', "", str(error)) or name  # without what was asked for in an address
    if "Credential" in name:
        return f"no credentials ({text}): for S3 set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, PermissionError):
        return f"access denied ({text})"
    if "Connect" in name or isinstance(error, ConnectionError):
        return f"the store cannot be reached ({text}); AWS_ENDPOINT_URL_S3 names another than Amazon's"
    if isinstance(error, TimeoutError):
        return f"the store did not answer in time ({text})"
    return text


def _unknown_condition(error: StoreError) -> bool:
    """Whether a store said that it does not know conditional requests, or its client that it cannot send them."""
    cause = error.__cause__
    return (
        isinstance(cause, (NotImplementedError, TypeError))
        or getattr(cause, "errno", None) == 38
        or (isinstance(cause, OSError) and "not implemented" in str(cause).lower())
    )
