"""Files behind URLs, by `fsspec`. A read that fails is tried again from the byte that was
reached.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from titanlite.config.urls import chain_problem, login_problem, public_name, store_needs
from titanlite.data import DataError
from titanlite.data.daemon_threads import ending
from titanlite.utils import (
    MissingPackageError,
    counted,
    human_time,
    is_hidden,
    logger,
    public,
)

#: Seconds of the first and the longest wait for a source to come back.
_FIRST_WAIT = 1.0
_LONGEST_WAIT = 60.0
#: Seconds that an HTTP server may say nothing.
_SILENCE = 30.0
#: Bytes of a request.
_MOST = 5 << 20

T = TypeVar("T")


#: Size in bytes, and the server's tag and time of the content; None: it does not tell.
Identity = tuple[int | None, str | None, str | None]


def open_file(name: str, patience: float = 0.0) -> io.BufferedReader[Any]:
    """Open a URL for reading. Reads raise only DataError; see `retried` for `patience`."""
    check_url("a file of the text", name)
    return io.BufferedReader(RemoteReader(name, patience), _MOST)


def check_url(key: str, url: str) -> None:
    """Raise DataError for a URL that cannot be opened as it is written.

    Its secret is hidden, as in a kept config, or it has a login for a store.
    """
    if is_hidden(url):
        raise DataError(
            f"{key}: the login or signature of {url} was hidden where it was kept. Give the whole "
            "URL again; in a config write it as ${NAME}, an environment variable"
        )
    problem = login_problem(url)
    if problem is not None:
        wrong, remedy = problem
        raise DataError(f"{key}: {public(url)} {wrong}: {remedy}")


def words(error: BaseException) -> str:
    """Return an error on one line, without users and queries of URLs."""
    # Our own error is a whole sentence.
    kind = "" if isinstance(error, MissingPackageError) else f"{type(error).__name__}: "
    return public(" ".join(f"{kind}{error}".split()))[:300]


def url_to_fs(url: str, **options: Any) -> tuple[Any, str]:
    """Return the file system of a URL, by the environment's proxy for HTTP, and the path in it.

    Raises MissingPackageError if the store needs one, and DataError for a chain of URLs.
    """
    from fsspec import core

    reason = chain_problem(url)
    if reason:
        raise DataError(f"{public_name(url)} {reason}")
    if url.startswith(("http://", "https://")):
        options["client_kwargs"] = {"trust_env": True, **options.get("client_kwargs", {})}
    try:
        found: tuple[Any, str] = core.url_to_fs(url, **options)
    except ImportError as error:
        raise MissingPackageError(store_needs(url.partition("://")[0].lower(), error)) from error
    return found


def retried(call: Callable[[], T], failed: str, patience: float) -> T:
    """Return the result of `call`, which is called again after errors of a remote source.

    Waits are as long as the server asks, else double, with jitter. Raises DataError that begins
    with `failed`: at once if another try cannot help, else after `patience` seconds.
    """
    tries = 0
    began = 0.0
    while True:
        try:
            return call()
        except DataError:
            raise
        except Exception as error:
            tries += 1
            began = began or time.monotonic()
            tried = time.monotonic() - began
            reason = _reason(error)
            if _is_final(reason):
                raise DataError(f"{failed}: {words(reason)}") from error
            wait = min(_FIRST_WAIT * 2 ** (tries - 1), _LONGEST_WAIT) * random.uniform(0.5, 1.0)
            response = getattr(reason, "response", None)
            headers = getattr(response, "headers", None) or getattr(reason, "headers", None) or {}
            asked = str(headers.get("Retry-After", ""))
            if asked.isdigit():
                wait = float(asked) + random.random()
            if tried + wait > patience or ending.is_set():
                spent = f"{counted(tries, 'attempts')} in {human_time(tried)} (data.retry_seconds)"
                raise DataError(f"{failed}, {spent}: {words(reason)}") from error
            logger.warning(f"{failed} ({words(reason)}): try {tries + 1} in {wait:.0f} s")
            ending.wait(wait)


def _is_final(reason: BaseException) -> bool:
    if isinstance(reason, FileNotFoundError | PermissionError | MissingPackageError):
        return True
    response = getattr(reason, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(response, "status_code", None) or getattr(reason, "status", None)
    # Not a subclass of ValueError: a proxy answers without JSON, and the next answer may be right.
    return type(reason) is ValueError or status in (400, 401, 403, 404, 410)


def _reason(error: Exception) -> BaseException:
    """fsspec turns every error of opening HTTP into "no such file"."""
    cause = error.__cause__
    if cause is not None and type(cause).__module__.startswith(("aiohttp", "botocore")):
        return cause
    return error


class _Checked:
    """A session of aiohttp that hands on size and headers of each answer with bytes."""

    def __init__(
        self, session: Any, check: Callable[[int | None, Mapping[str, Any]], None]
    ) -> None:
        self._session = session
        self._check = check

    async def get(self, url: Any, **options: Any) -> Any:
        answer = await self._session.get(url, **options)
        if answer.status in (200, 206):
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            self._check(int(total) if total.isdigit() else None, answer.headers)
        return answer


class RemoteReader(io.RawIOBase):
    """A file behind a URL, from any byte on, reopened after a failure.

    Raises DataError if an answer is of another file.
    """

    def __init__(self, name: str, patience: float) -> None:
        self._url = name
        self._name = public_name(name)
        self._patience = patience
        self._at = 0
        self._file: Any = None
        self.identity: Identity | None = None
        self._retried(self._open)

    def _retried(self, call: Callable[[], T]) -> T:
        return retried(call, f"{self._name} cannot be read at byte {self._at:,}", self._patience)

    def _open(self) -> None:
        options: dict[str, Any] = {}
        timeouts: dict[str, Any] = {}
        is_http = self._url.startswith(("http://", "https://"))
        if is_http:
            try:
                import aiohttp
            except ImportError as error:
                raise MissingPackageError(store_needs("https", error)) from error
            # A large file may take long, a silent server may not.
            silence = max(min(_SILENCE, self._patience), 1.0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=silence, sock_read=silence)
            timeouts = {"client_kwargs": {"timeout": timeout}}
        system, path = url_to_fs(self._url, **timeouts)
        if self.identity is not None:
            # Its listing may be old.
            system.invalidate_cache(path)
        info = system.info(path)
        self._check(info.get("size"), info)
        if is_http:
            # Else fsspec asks for it again.
            options["size"] = info.get("size")
        self._file = system.open(path, "rb", cache_type="none", **options)
        # Stores compare the tag themselves. Of HTTP two ranges may be of two files.
        if is_http and hasattr(self._file, "session"):
            self._file.session = _Checked(self._file.session, self._check)

    def _check(self, size: int | None, about: Mapping[str, Any]) -> None:
        tag = str(about.get("ETag") or "").removeprefix("W/") or None
        found = size, tag, str(about.get("Last-Modified") or "") or None
        self.identity = self.identity or found
        for before, now in zip(self.identity, found, strict=True):
            if before is not None and now is not None and before != now:
                raise DataError(
                    f"{self._name} has changed while it was read: run on the text as it was"
                )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert self.identity is not None
        if whence == io.SEEK_END and self.identity[0] is None:
            raise io.UnsupportedOperation("the server does not tell its size")
        self._at = offset + (0, self._at, self.identity[0] or 0)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        if ending.is_set():
            raise DataError(f"{self._name}: the process ends")
        piece = self._retried(lambda: self._read(len(buffer)))
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _read(self, most: int) -> bytes:
        try:
            if self._file is None:
                self._open()
            assert self.identity is not None
            size = self.identity[0]
            if size is not None and self._at >= size:
                return b""
            self._file.seek(self._at)
            piece: bytes = self._file.read(min(most, _MOST))
            if not piece and size is not None:
                raise OSError(f"{self._at:,} of {size:,} bytes came")
        except Exception:
            self._file = None
            raise
        return piece
