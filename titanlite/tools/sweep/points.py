"""The table [sweep] of a config: the points of a sweep, and their members.

    [sweep]
    metric = "validation_loss"                          # by which points are compared
    "optimizer.lr" = { log = [1e-3, 1e-2], n = 5 }      # or a list, or { linear = …, n = … }
    "training.seed" = [0, 1, 2]                         # runs of one point

    [[sweep.points]]                                    # keys that change together
    "model.overrides.dim" = 256
    "model.overrides.n_heads" = 4

Each table of `points` is combined with each value of each other key.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titanlite.config.aliases import Refused, is_subsection, key_of, known_names, normalized
from titanlite.config.entries import SWEEP, Entry, command_line_entries, type_of_name
from titanlite.config.errors import ConfigError, Problem, Source, nearest
from titanlite.config.key_types import base, members
from titanlite.config.keys import check, table_of
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sweep_table import METRICS, RANGES
from titanlite.config.toml import join, quote, quote_key
from titanlite.config.unknown_keys import unknown
from titanlite.tools.sweep.members import Member
from titanlite.utils import public

SEED = "training.seed"
#: Names in [sweep] that are no keys of a run.
OWN = ("metric", "points")
#: More are a slip: a product grows fast.
MOST_RUNS = 10_000
#: Digits of the values of a range.
_DIGITS = 6
#: A value that is longer gives way to a digest in a member's name.
_LONGEST_VALUE = 40
_LONGEST_NAME = 150
#: Keys that have no effect on a member, or would take it out of the sweep's folder.
_REFUSED = {
    "job.config_file": "a point cannot name another file; give several files to the command",
    "job.extends": "a point cannot name another file; give several files to the command",
    "job.dialect": "a file has one dialect",
    "job.dump_folder": "each run has its own folder; --folder names the folder above them",
}
_FORM = "a list of values, { log = [LOW, HIGH], n = N } or { linear = [LOW, HIGH], n = N }"

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """A key of [sweep] and its values."""

    #: As the table names it, perhaps by another name of the key.
    name: str
    values: Sequence[Any]


@dataclass(frozen=True)
class Point:
    """A member, and the values that it has by key."""

    member: Member
    values: Values

    @property
    def without_seed(self) -> str:
        """What its runs with other seeds share, as text."""
        return quote({name: value for name, value in self.values.items() if name != SEED})


@dataclass(frozen=True)
class Sweep:
    """A table [sweep]."""

    #: None: the validation loss if there is validation.
    metric: str | None
    #: Keys that vary, in the order of the table, those of `points` first.
    keys: Sequence[str]
    points: Sequence[Point]

    @property
    def members(self) -> list[Member]:
        return [point.member for point in self.points]

    def labels(self) -> dict[str, str]:
        """Return a short name by key, for tables and folders."""
        return labels(self.keys)


def labels(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, or the whole key where two have the same."""
    short = [key.rpartition(".")[2].strip('"') for key in keys]
    found = {}
    for key, name in zip(keys, short, strict=True):
        found[key] = name if short.count(name) == 1 else key
    return found


def sweep_of(config: LoadedConfig, flags: Sequence[str] = ()) -> Sweep:
    """Return the sweep of a config.

    flags: those of the command line. Raises ConfigError with all that is wrong in the table.
    """
    if config.sweep is None:
        place = config.files[-1] if config.files else "command line"
        message = "there is no table [sweep] that names the values to try"
        hint = '[sweep]\n    "optimizer.lr" = [1e-3, 3e-3]'
        raise ConfigError([Problem(place, "[sweep]", message, hint, code="missing")])
    reader = _Reader(config.sweep)
    reader.read()
    reader.refuse_flags(flags)
    if not reader.problems:
        reader.refuse_many()
    if reader.problems:
        raise ConfigError(reader.problems)
    return reader.sweep()


def to_toml(table: Entry) -> str:
    """Return a table [sweep] as TOML text."""
    lines = [f"[{SWEEP}]"]
    for name, value in table.value.items():
        lines.append(f"{quote_key(name)} = {quote(value)}")
    return "\n".join([*lines, ""])


@dataclass
class _Reader:
    """Reads a table, and collects what is wrong with it."""

    table: Entry
    problems: list[Problem] = field(default_factory=list)
    metric: str | None = None
    #: Keys with their values, alone.
    axes: list[Axis] = field(default_factory=list)
    #: Values of keys that change together; one empty table without `points`.
    together: list[dict[str, Any]] = field(default_factory=lambda: [{}])

    def read(self) -> None:
        for name, value in self.table.value.items():
            if name == "metric":
                self._read_metric(value)
            elif name == "points":
                self._read_points(value)
            else:
                for key, item, path in _named(name, value, f".{quote_key(name)}"):
                    self._read_axis(key, item, path)
        if not self.axes and not any(self.together) and not self.problems:
            self._refuse("", "names no key to vary", 'as "optimizer.lr" = [1e-3, 3e-3]')
        self._refuse_unlike()

    def _refuse(self, path: str, message: str, hint: str = "", code: str = "missing") -> None:
        """Note a problem. path: inside the table, as `."optimizer.lr"`."""
        key = f"[{SWEEP}]{path and ' '}{path.lstrip('.')}"
        self.problems.append(Problem(self.table.place(path), key, message, hint, code=code))

    def _read_metric(self, value: Any) -> None:
        if value in METRICS:
            self.metric = value
            return
        close = nearest(str(value), METRICS)
        hint = f'did you mean "{close[0]}"?' if close else ""
        message = f"expected one of {', '.join(map(quote, METRICS))}, got {quote(value)}"
        self._refuse(".metric", message, hint, code="unknown-value")

    def _read_axis(self, name: str, value: Any, path: str) -> None:
        if not self._is_key(name, path):
            return
        if isinstance(value, dict):
            values = self._range(name, value, path)
        elif isinstance(value, list):
            values = value
        else:
            self._refuse(path, f"expected {_FORM}; got {quote(value)}", code="wrong-type")
            return
        if not values:
            if isinstance(value, list):
                self._refuse(path, "has no values", code="out-of-range")
            return
        self._check_values(name, values, path)
        self._refuse_second(name, path)
        self.axes.append(Axis(name, values))

    def _is_key(self, name: str, path: str) -> bool:
        """Return whether a name is that of a key that may vary."""
        refused = _REFUSED.get(key_of(name))
        if refused is not None or name.startswith("launch."):
            hint = refused or "all runs of a sweep are launched in the same way"
            self._refuse(path, "cannot vary", hint, code="misplaced")
            return False
        if name in known_names() or table_of(name):
            return True
        source = Source("file", self.table.source.file, None, name)
        problem = unknown(name, source)
        self._refuse(path, problem.message, problem.hint, code=problem.code)
        return False

    def _range(self, name: str, value: Mapping[str, Any], path: str) -> list[Any]:
        """Return the values of a range; none, with its problem noted, where it is none."""
        kinds = [kind for kind in RANGES if kind in value]
        if len(kinds) != 1 or set(value) != {kinds[0], "n"}:
            self._refuse(path, f"expected {_FORM}; got {quote(value)}", code="wrong-type")
            return []
        (kind,) = kinds
        ends = value[kind]
        count = value["n"]
        if not _are_ends(ends, kind):
            what = "two different numbers above 0" if kind == "log" else "two different numbers"
            self._refuse(path, f"{kind}: expected {what}, got {quote(ends)}", code="out-of-range")
            return []
        if type(count) is not int or not 2 <= count <= MOST_RUNS:
            message = f"n: expected an integer from 2 to {MOST_RUNS:,}, got {quote(count)}"
            self._refuse(path, message, code="out-of-range")
            return []
        found = spread(kind, ends[0], ends[1], count, _takes_integers(name))
        if len(found) < count:
            message = f"n = {count} gives {len(found)} different integers: {quote(found)}"
            hint = f"set n = {len(found)} or less, or give a list"
            self._refuse(path, message, hint, code="out-of-range")
            return []
        return found

    def _check_values(self, name: str, values: Sequence[Any], path: str) -> None:
        """Refuse values that the key does not take, and those given twice."""
        seen: set[str] = set()
        for value in values:
            written = quote(value)
            if written in seen:
                self._refuse(path, f"{written} is given twice", code="given-twice")
            else:
                self._check_value(name, value, path)
            seen.add(written)

    def _check_value(self, name: str, value: Any, path: str) -> None:
        try:
            wrong = check(type_of_name(name), normalized(name, value))
        except Refused as error:
            self._refuse(path, f"{quote(value)} is not supported: {error}", code="unsupported")
            return
        for problem in wrong:
            self._refuse(path, problem.message, problem.hint, code=problem.code)
        if wrong:
            return
        entries, problems = command_line_entries([flag(name, value)])
        if problems or _written(entries) != {name: value}:
            message = f"{quote(value)} has no form as a flag of a command line"
            self._refuse(path, message, "write it into a separate file", code="bad-flag")

    def _read_points(self, value: Any) -> None:
        if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
            hint = "write a table for each point, below a line [[sweep.points]]"
            self._refuse(".points", f"expected tables, got {quote(value)}", hint, code="wrong-type")
            return
        self.together = []
        for place, table in enumerate(value):
            self.together.append(self._read_point(table, f".points[{place}]"))

    def _read_point(self, table: Mapping[str, Any], where: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for written, below in table.items():
            for name, value, path in _named(written, below, f"{where}.{quote_key(written)}"):
                if self._is_key(name, path):
                    self._check_value(name, value, path)
                    found[name] = value
        if not table:
            self._refuse(where, "sets no key", code="missing")
        if found in self.together:
            self._refuse(where, "is a point that stands above already", code="given-twice")
        return found

    def _refuse_second(self, name: str, path: str) -> None:
        """Refuse a second name of a key."""
        if key_of(name) in [key_of(axis.name) for axis in self.axes]:
            self._refuse(path, f"{key_of(name)} is varied twice", code="given-twice")

    def _refuse_unlike(self) -> None:
        """Refuse points that do not set the same keys, and keys that vary alone too."""
        first = list(map(key_of, self.together[0]))
        for place, table in enumerate(self.together):
            keys = list(map(key_of, table))
            missing = [key for key in first if key not in keys]
            more = [key for key in keys if key not in first]
            if missing or more:
                names = ", ".join([*missing, *more])
                message = f"all points must set the same keys; the first one differs in {names}"
                self._refuse(f".points[{place}]", message, code="missing")
        for axis in self.axes:
            if key_of(axis.name) in first:
                message = f"{key_of(axis.name)} is varied twice: alone and in points"
                self._refuse(f".{quote_key(axis.name)}", message, code="given-twice")

    def refuse_flags(self, flags: Sequence[str]) -> None:
        """Refuse flags of keys that the table varies."""
        given = {key_of(entry.name) for entry in command_line_entries(flags)[0]}
        for name in self.names():
            if key_of(name) in given:
                message = f"{name} cannot be set here"
                hint = f"[{SWEEP}] ({self.table.source.place}) varies it"
                problem = Problem("command line", f"--{name}", message, hint, code="given-twice")
                self.problems.append(problem)

    def refuse_many(self) -> None:
        count = len(self.together) * math.prod(len(axis.values) for axis in self.axes)
        if count > MOST_RUNS:
            factors = [len(self.together)] if any(self.together) else []
            factors += [len(axis.values) for axis in self.axes]
            product = " x ".join(map(str, factors))
            self._refuse(
                "",
                f"{product} = {count:,} runs; at most {MOST_RUNS:,} are taken",
                code="out-of-range",
            )

    def names(self) -> list[str]:
        """Return the names that vary, those of points first, seeds last."""
        found = dict.fromkeys(name for table in self.together for name in table)
        found |= dict.fromkeys(axis.name for axis in self.axes)
        return sorted(found, key=lambda name: key_of(name) == SEED)

    def sweep(self) -> Sweep:
        """Return the sweep of a table without problems."""
        names = self.names()
        short = labels([key_of(name) for name in names])
        axes = sorted(self.axes, key=lambda axis: key_of(axis.name) == SEED)
        points: list[Point] = []
        taken: set[str] = set()
        for table in self.together:
            for chosen in itertools.product(*(axis.values for axis in axes)):
                alone = {axis.name: value for axis, value in zip(axes, chosen, strict=True)}
                point = _point({**table, **alone}, short, taken)
                taken.add(point.member.name.lower())
                points.append(point)
        return Sweep(self.metric, list(short), points)


def _point(written: Values, short: Mapping[str, str], taken: set[str]) -> Point:
    """Return a point. written: values by the names of the table. taken: names in lower case."""
    flags = [flag(name, value) for name, value in written.items()]
    values = {key_of(name): value for name, value in written.items()}
    words = [f"{short[key]}={_plain(value)}" for key, value in values.items()]
    name = re.sub(r"[^A-Za-z0-9._=+,-]", "_", ",".join(words))
    if len(name) > _LONGEST_NAME or name.lower() in taken:
        digest = hashlib.sha256("\n".join(flags).encode()).hexdigest()[:8]
        name = f"{name[: _LONGEST_NAME - 9]}-{digest}"
    return Point(Member(name, flags), values)


def _plain(value: Any) -> str:
    """Return a value as a part of a file name."""
    text = "+".join(map(_plain, value)) if isinstance(value, list) else public(shown(value))
    text = re.sub(r"[^A-Za-z0-9._+-]+", "_", text)
    if len(text) > _LONGEST_VALUE:
        digest = hashlib.sha256(quote(value).encode()).hexdigest()[:8]
        text = f"{text[: _LONGEST_VALUE - 9]}-{digest}"
    return text


def shown(value: Any) -> str:
    """Return a value for people: a text without quotes, a float as short as it can be."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return quote(value)


def flag(name: str, value: Any) -> str:
    """Return a value as a flag of a command line."""
    return f"--{name}={value if isinstance(value, str) else quote(value)}"


def _written(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the values of flags by name; a value that is a table, whole."""
    return {entry.name: entry.value for entry in entries}


def _named(name: str, value: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and path of what an entry sets.

    `optimizer.lr = …` without quotes is a table in a table. path: of the entry in [sweep].
    """
    if isinstance(value, dict) and is_subsection(name):
        for part, item in value.items():
            yield from _named(join(name, part), item, join(path, part))
    else:
        yield name, value, path


def _are_ends(ends: Any, kind: str) -> bool:
    if not isinstance(ends, list) or len(ends) != 2 or ends[0] == ends[1]:
        return False
    for end in ends:
        if type(end) not in (int, float) or not math.isfinite(end):
            return False
    return kind == "linear" or min(ends) > 0


def is_number(value: object) -> bool:
    """Return whether a value is a number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _takes_integers(name: str) -> bool:
    kinds = {base(part) for part in members(type_of_name(name))}
    return int in kinds and float not in kinds


def spread(kind: str, first: float, last: float, count: int, integers: bool) -> list[Any]:
    """Return numbers from the first to the last at equal distances.

    kind: "log" for equal ratios. They have six digits, but for the ends, so that a name can hold
    them. integers: they are rounded, and each is there once.
    """
    found: list[Any] = []
    for place in range(count):
        share = place / (count - 1)
        if place in (0, count - 1):
            value = float(last if place else first)
        elif kind == "log":
            value = first * (last / first) ** share
        else:
            value = first + (last - first) * share
        if integers:
            found.append(round(value))
        else:
            found.append(float(f"{value:.{_DIGITS}g}") if 0 < place < count - 1 else value)
    return list(dict.fromkeys(found))
