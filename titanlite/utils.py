"""Helpers for every room: logger, numbers for people, tables, atomic files, names. It imports nothing of titanlite."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import reduce
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

logger: logging.Logger = logging.getLogger("titanlite")

#: Control characters (C0 and C1) except tab and line ends: a terminal may obey them.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
#: Colour codes.
_COLOR = re.compile(r"(\x1b\[[0-9;]*m)")


def escape(text: str, colors: bool = False) -> str:
    """The text with control characters written as `\\x1b`: a terminal obeys none that a name or a document holds.

    Tabs and line ends stay. colors: codes for colours stay, too.
    """
    parts = _COLOR.split(text) if colors else [text]
    parts[::2] = [_CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", part) for part in parts[::2]]
    return "".join(parts)


@dataclass(frozen=True)
class Style:
    """ANSI styles, or none where the output is no terminal."""

    color: bool

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and text else text

    def bold(self, text: str) -> str:
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        return self._wrap("2", text)

    def good(self, text: str) -> str:
        return self._wrap("32", text)

    def warn(self, text: str) -> str:
        return self._wrap("33", text)


def counted(number: float, nouns: str) -> str:
    """A number and what is counted, given in the plural: `1 step`, `2,000 steps`, `1 batch` for "batches"."""
    shown = f"{number:,.10g}" if isinstance(number, float) else f"{number:,}"
    return f"{shown} {nouns if number != 1 else nouns.removesuffix('es' if nouns.endswith('ches') else 's')}"


def human_count(n: float) -> str:
    """`999`, `12.3M`, `1.2T`: one decimal from a thousand on."""
    return _scaled(n, 1000, ("", "K", "M", "B", "T"))


def human_bytes(n: float) -> str:
    """`512 B`, `1.5 GiB`: powers of 1024, one decimal from a KiB on."""
    return _scaled(n, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    if abs(n) < base:
        return f"{n:g}{units[0]}"
    power = 1
    while power < len(units) - 1 and abs(n) / base**power >= base - 0.05:
        power += 1
    return f"{n / base**power:.1f}{units[power]}"


def human_time(seconds: float) -> str:
    """`3.2s` below a minute, then `0:04:05`, `1:23:45`, `127:00:00`: hours, minutes, seconds."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


def progress_text(done: float, total: float, seconds: float) -> str:
    """`about 25 %, 0:01:30 left`: of work of which `done` took `seconds`; "" where that tells nothing.

    total: its size, perhaps a guess. Work that is longer than the guess has no end that is known.
    """
    if not 0 < done < total or seconds <= 0:
        return ""
    return f"about {done / total:.0%}, {human_time(seconds * (total - done) / done)} left"


def timestamp() -> str:
    """Return the time now, in UTC, as ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a whole file or nothing: a reader sees the old content or the new, also after a crash of the machine."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Append one JSON object as a line, durably. A line that a crash cut short stays one of its own. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        line = b"\n" * torn + json.dumps(entry).encode() + b"\n"
        if os.write(file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file)
    finally:
        os.close(file)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in a file's lines. Damaged lines are skipped; a file that cannot be read has none."""
    found = []
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return [entry for entry in found if isinstance(entry, dict)]


class MissingPackageError(Exception):
    """A package that titanlite needs is not installed."""

    exit_code = 2  # as `exit_codes.CONFIG`, which this module does not import


def missing_package(package: str) -> str:
    """Return the sentence about a package that a command needs and that is not installed."""
    return (
        f"{package} is not installed for {sys.executable}, and this command needs it: "
        f"`{sys.executable} -m pip install {package}`. docs/dependencies.md has the tested versions"
    )


def require(package: str) -> None:
    """Raise MissingPackageError with what to do unless a package is installed; it is not imported."""
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(missing_package(package))


def is_dotted(name: str) -> bool:
    """Return whether a name is a dotted path: "package.module:name" or "./file.py:name"."""
    return ":" in name and "://" not in name


def resolve(path: str) -> Any:
    """Return the object that a dotted path names. Raises ValueError naming the path.

    A path that begins with a dot or a slash is a file, relative to the working directory.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ValueError(f"{path!r} names no object: a colon comes before its name")
    try:
        is_file = module_name.startswith((".", "/"))
        module = _module_of_file(Path(module_name).resolve()) if is_file else importlib.import_module(module_name)
    except Exception as error:
        lead = "" if isinstance(error, ModuleNotFoundError | FileNotFoundError) else f"{type(error).__name__}: "
        raise ValueError(f"{path!r} cannot be imported: {lead}{error}") from error
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError:
        raise ValueError(
            f"{path!r} cannot be imported: {getattr(module, '__file__', None) or module_name} has no {name}"
        ) from None


def resolve_as(path: str, accept: Callable[[Any], bool], kind: str) -> Any:
    """Return the object that a dotted path names, if `accept` takes it. Raises ValueError naming the path.

    kind: what it must be, with an article, for messages.
    """
    found = resolve(path)
    if not accept(found):
        raise ValueError(f"{path!r} is {found!r:.80}, and not {kind}")
    return found


def module_name(name: str) -> str:
    """Return a module's name for people: of a file in a dotted path, its own."""
    return re.sub(r"^titanlite_(.+)_\d+$", r"\1", name)


def _module_of_file(file: Path) -> Any:
    """Return the module in a file; the second time the same."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    name = f"titanlite_{file.stem}_{abs(hash(file))}"
    if name not in sys.modules:
        loader = SourceFileLoader(name, str(file))
        module = sys.modules[name] = types.ModuleType(name)
        module.__file__ = str(file)
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@dataclass(frozen=True)
class Table:
    """`rows` hold one text per column; `left` are the columns aligned to the left."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    title: str = ""


def render(table: Table, terminal: bool) -> str:
    """The table as text without a final line end, in a terminal with a bold head. Control characters are escaped.

    NO_COLOR and TERM=dumb turn the bold head off, too.
    """
    terminal = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    lines = [[escape(text) for text in line] for line in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def align(i: int, text: str) -> str:
        return text.ljust(widths[i]) if i in table.left else text.rjust(widths[i])

    head, *body = ["  ".join(align(i, text) for i, text in enumerate(line)).rstrip() for line in lines]
    title = [escape(table.title)] if table.title else []
    return "\n".join([*title, Style(terminal).bold(head), *body])
