"""Helpers for every room: logger, numbers for people, atomic files, names.

It imports nothing of titanlite.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

logger: logging.Logger = logging.getLogger("titanlite")

#: Phase of training → when `note_progress` was last called in it, of the monotonic clock.
progress_at: dict[str, float] = {}

#: Characters that change the direction of the text around them, so that a line shows other words
#: than it holds.
_DIRECTION = "\u202a-\u202e\u2066-\u2069"
#: C0 without tab and line ends, DEL, C1, line separators, halves of surrogate pairs: a terminal may
#: obey them.
_CONTROL = re.compile(
    rf"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029{_DIRECTION}\ud800-\udfff]|\r(?!\n)"
)
#: The same with tabs, line ends, marks of direction and byte order marks. No name has one of them
#: for a good reason.
_CONTROL_IN_NAME = re.compile(
    rf"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029{_DIRECTION}\ud800-\udfff\ufeff\ufffe\uffff]"
)
#: Levels of lists and tables within each other, in JSON and TOML of others.
_DEPTH = 100
_TOO_DEEP = f"its lists and tables are more than {_DEPTH} levels deep"
#: Colour codes.
_COLOR = re.compile(r"(\x1b\[[0-9;]*m)")


#: Stands for a secret that is not written.
REMOVED = "(removed)"
#: Keys of a query that hold no secret: which file it is, and how it is sent.
_HARMLESS = frozenset(
    (
        "alt",
        "dl",
        "download",
        "format",
        "part",
        "raw",
        "ref",
        "revision",
        "split",
        "version",
        "versionid",
    )
)
_HARMLESS_PART = re.compile(r"([A-Za-z]+)=[\w.-]{0,64}")
#: A character of a URL in a text. A quote ends it, also one with a backslash as in JSON and TOML.
_OF_URL = r'(?:[^\s"\\]|\\[^"\s])'
_LOGIN = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]*)://((?:(?![/?#]){_OF_URL})*)@")
#: A container or a model stands before the @ of these.
_NO_LOGIN = ("hf", "abfs", "abfss", "wasb", "wasbs")
#: A password with a slash or a question mark, which is no port.
_RAW_PASSWORD = re.compile(rf'(://)[^/\s?#":@]+:(?!\d*(?:[/?#\s"]|$))(?:(?!@){_OF_URL})*@')
_QUERY = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]*)(://(?:(?![?#;]){_OF_URL})*)([?#;])({_OF_URL}*)")
#: A login and a secret in what was meant for a URL, without `://`.
_BARE_LOGIN = re.compile(
    r"""(?<![\w.%+-])[\w.%+-]{1,99}:(?!/)[^\s/@"']{1,199}@(?=[\w.-]{1,253}(:\d+)?/)"""
)
_BARE_SECRET = re.compile(
    r"""([?&;#])([\w.-]{0,99}[-_])?(token|sig(nature)?|secret|passw(or)?d|credential|auth|"""
    r"""(api|access|AWSAccess)[-_]?key(id)?)=(?!\(removed\))[^\s&;#"'\\)]+""",
    re.IGNORECASE,
)


def public(text: str) -> str:
    """The text without the logins and queries of its URLs, which may hold secrets.

    `https://user:password@host/f?X-Amz-Signature=1f&versionId=3` becomes
    `https://(removed)@host/f?versionId=3&(removed)`.
    """
    if "://" in text:
        text = _LOGIN.sub(_without_login, text)
        text = _RAW_PASSWORD.sub(rf"\1{REMOVED}@", text)
        text = _QUERY.sub(_without_query, text)
    if "@" in text:
        text = _BARE_LOGIN.sub(f"{REMOVED}@", text)
    return _BARE_SECRET.sub(rf"\1{REMOVED}", text) if "=" in text else text


def _without_login(match: re.Match[str]) -> str:
    scheme, login = match.groups()
    is_name = scheme.lower() in _NO_LOGIN and ":" not in login
    return match[0] if is_name else f"{scheme}://{REMOVED}@"


def _without_query(match: re.Match[str]) -> str:
    scheme, rest, mark, written = match.groups()
    # These end a sentence or a quotation.
    query = written.rstrip("'),.;:]}>`")
    if query.endswith(REMOVED[:-1]):
        query += REMOVED[-1]
    is_web = scheme.lower() in ("http", "https")
    # In a sentence `#` stands for a part of a page; here the URL is a value.
    is_value = match.string[max(match.start() - 1, 0) : match.start()] in ("", '"', "'", "=")
    if "=" not in query and not (is_web and (mark == "?" or mark == "#" and is_value)):
        # `?` stands for one character of a name in a store.
        return match[0]
    parts = [part for part in re.split("[&#]", query) if part]
    kept = []
    for part in parts:
        key = _HARMLESS_PART.fullmatch(part)
        if key is not None and key[1].lower() in _HARMLESS:
            kept.append(part)
    if len(kept) < len(parts):
        kept.append(REMOVED)
    return f"{scheme}{rest}{mark}{'&'.join(kept)}{written[len(query) :]}"


def public_tree(value: Any) -> Any:
    """Return a JSON value with each text, and each name, as `public` gives it."""
    if isinstance(value, str):
        return public(value)
    if isinstance(value, Mapping):
        return {public_tree(name): public_tree(item) for name, item in value.items()}
    return [public_tree(item) for item in value] if isinstance(value, (list, tuple)) else value


def has_login(url: str) -> bool:
    """Return whether a URL has a user or password, hidden or not."""
    login = _LOGIN.match(url)
    return login is not None and _without_login(login) != login[0]


def is_hidden(url: str) -> bool:
    """Return whether `public` hid a login or query: the URL cannot be opened."""
    return f"{REMOVED}@" in url or re.search(rf"[?#&;]{re.escape(REMOVED)}", url) is not None


class _PublicRecords(logging.Filter):
    """Hides URLs' logins and queries before any handler gets a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = public(message)
        if shown != message:
            record.msg = shown
            record.args = None
        return True


logger.addFilter(_PublicRecords())


def escape(text: str, colors: bool = False, verbatim: bool = False) -> str:
    """The text with control characters written as `\\x1b`: a terminal obeys none that a name or a
    document holds.

    Tabs and line ends stay, and URLs lose their secrets as `public` tells. colors: codes for
    colours stay, too. verbatim: URLs stay as they are, as in documents.
    """
    if not verbatim:
        text = public(text)
    parts = [text]
    if colors:
        parts = _COLOR.split(text)
    parts[::2] = [_CONTROL.sub(_as_code, part) for part in parts[::2]]
    return "".join(parts)


def say(text: str) -> None:
    """Print on stderr at once, as `escape` gives it."""
    print(escape(text), file=sys.stderr, flush=True)


def escape_name(text: str) -> str:
    """The text with control characters written as `\\x1b`, tabs, line ends and marks of direction
    too: one line.

    URLs lose their secrets as `public` tells.
    """
    return _CONTROL_IN_NAME.sub(_as_code, public(text))


def control_characters(text: str) -> list[str]:
    """Return the characters that `escape_name` rewrites, in its form, each once."""
    found = {match[0]: _as_code(match) for match in _CONTROL_IN_NAME.finditer(text)}
    return list(found.values())


def _as_code(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def wants_color(stream: IO[str], asked: bool | None = None) -> bool:
    """Return `asked`, or True for a terminal; never where NO_COLOR is set or it is dumb.

    FORCE_COLOR stands for a terminal, for launchers that pass our pipe on to one.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    if asked is not None:
        return asked
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def counted(number: float, nouns: str) -> str:
    """A number and its nouns, given in the plural: `1 step`, `2,000 steps`, `1 batch`."""
    shown = f"{number:,.10g}" if isinstance(number, float) else f"{number:,}"
    if number != 1:
        return f"{shown} {nouns}"
    ending = "es" if nouns.endswith("ches") else "s"
    return f"{shown} {nouns.removesuffix(ending)}"


def human_count(n: float) -> str:
    """`999`, `12.3M`, `1.2T`: one decimal from a thousand on."""
    return _scaled(n, 1000, ("", "K", "M", "B", "T"))


def human_bytes(n: float) -> str:
    """`512 B`, `1.5 GiB`: powers of 1024."""
    return _scaled(n, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    if abs(n) < base:
        return f"{n:g}{units[0]}"
    power = 1
    while power < len(units) - 1 and abs(n) / base**power >= base - 0.05:
        power += 1
    return f"{n / base**power:.1f}{units[power]}"


def human_time(seconds: float) -> str:
    """`3.2s` below a minute, then hours, minutes, seconds: `0:04:05`, `127:00:00`."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


def progress_text(done: float, total: float, seconds: float) -> str:
    """`about 25 %, 0:01:30 left`: `done` took `seconds`; "" where that tells nothing.

    total: perhaps a guess; work beyond it has no known end.
    """
    if not 0 < done < total or seconds <= 0:
        return ""
    return f"about {done / total:.0%}, {human_time(seconds * (total - done) / done)} left"


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def timestamp() -> str:
    """Return the time in UTC, as ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class LinkError(OSError):
    """A link in place of our file, in a folder that may be somebody else's."""

    # As `exit_codes.CONFIG`.
    exit_code = 2

    def __init__(self, path: str | Path) -> None:
        super().__init__(errno.ELOOP, "it is a link, and is not followed: delete it", str(path))

    def __str__(self) -> str:
        return f"{self.filename} is a link, and is not followed: delete it"


def not_a_link(path: str, flags: int) -> int:
    """Open a file, as `opener` of `open`. Raises LinkError for a link."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise LinkError(path) if error.errno == errno.ELOOP else error from None


def new_file(path: Path) -> BinaryIO:
    """Open a file for writing in place of its namesake; of a link only the link goes."""
    path.unlink(missing_ok=True)
    return open(path, "xb", buffering=1 << 20)


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a whole file or nothing.

    A reader sees the old content or the new, also after a crash. A link is replaced.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new_file(aside) as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            sync(stream)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def sync(stream: IO[bytes]) -> None:
    """Bring a file to the disk. Raises OSError."""
    stream.flush()
    os.fsync(stream.fileno())


def note_progress(*phases: str) -> None:
    """Tell the hang watchdog, from any thread, that long work in these phases goes on."""
    progress_at.update(dict.fromkeys(phases, time.monotonic()))


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Append one JSON object as a line, durably, without URLs' secrets. Raises OSError, LinkError
    for a link.

    A line that a crash cut short stays by itself.
    """
    file = not_a_link(str(path), os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        line = b"\n" * torn + json.dumps(public_tree(entry)).encode() + b"\n"
        if os.write(file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file)
    finally:
        os.close(file)


def parse_json(data: bytes | str) -> Any:
    """Return a JSON text's value. Raises ValueError, also for deep nesting or bad UTF-8."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    refuse_depth(value)
    return value


def refuse_depth(value: Any) -> None:
    """Raise ValueError for nesting that recursive functions cannot follow."""
    level = [value]
    for _ in range(_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
        level = inner
        if not level:
            return
    raise ValueError(_TOO_DEEP)


class JsonLine(NamedTuple):
    """One line of a file of JSON objects."""

    #: The line with its end.
    raw: bytes
    #: None: the line is damaged.
    entry: dict[str, Any] | None
    #: Its fault, after the file and the number of the line.
    problem: str = ""


def json_lines(path: Path) -> Iterator[JsonLine]:
    """Yield a file's lines of JSON, damaged ones too. Raises OSError, LinkError for a link."""
    with open(path, "rb", opener=not_a_link) as file:
        for number, raw in enumerate(file, 1):
            try:
                entry = parse_json(raw)
            except ValueError as error:
                yield JsonLine(
                    raw, None, f"{path}:{number}: no JSON ({error}); this line is passed over"
                )
                continue
            if isinstance(entry, dict):
                yield JsonLine(raw, entry)
            else:
                yield JsonLine(
                    raw, None, f"{path}:{number}: no JSON object; this line is passed over"
                )


#: The extra of titanlite that brings a package. All other packages come with titanlite itself.
EXTRAS = {
    "comet-ml": "comet",
    "lm_eval": "eval",
    "mlflow-skinny": "mlflow",
    "s3fs": "s3",
    "trackio": "trackio",
    "transformers": "hf",
    "wandb": "wandb",
}


def pip_install(package: str) -> str:
    """Return the command that installs a package, by its extra if any."""
    extra = EXTRAS.get(package)
    return f"pip install 'titanlite[{extra}]'" if extra else f"pip install {package}"


class MissingPackageError(Exception):
    """A required package is not installed."""

    # As `exit_codes.CONFIG`, which this module does not import.
    exit_code = 2


def missing_package(package: str) -> str:
    """Return the sentence about a missing package."""
    return (
        f"{package} is not installed for {sys.executable}, and this command needs it: "
        f"`{sys.executable} -m pip install {package}`. docs/dependencies.md has the tested versions"
    )


def require(package: str) -> None:
    """Raise MissingPackageError unless a package is installed; it is not imported."""
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(missing_package(package))


def is_dotted(name: str) -> bool:
    """Return whether a name is a dotted path: "package.module:name" or "./file.py:name"."""
    return ":" in name and "://" not in name
