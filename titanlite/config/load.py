"""Load a config.

Layers: defaults < `[job] extends` in order < the TOML files in order < the command line.

This is the first of three stages of checks: each key by itself. `titanlite.config.checks` has the
others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace as replace_fields

from titanlite.config import import_path_keys
from titanlite.config.aliases import (
    ALIASES,
    CONVERTED,
    FLOAT8,
    MX,
    key_of,
    normalized,
    refusal,
    translated,
    type_of_name,
)
from titanlite.config.checks import RULES, broken
from titanlite.config.errors import Problem, Source, nearest, refuse
from titanlite.config.keys import OTHERS, fits, keys, sections, table_of
from titanlite.config.loaded import EXCLUSIVE, LoadedConfig
from titanlite.config.notes import Note, Weight
from titanlite.config.raw_values import SWEEP, Entry, command_line_entries, file_entries
from titanlite.config.sections import Config
from titanlite.config.toml import loads, quote
from titanlite.config.trust import Claim, Origin, refusals
from titanlite.config.unsupported_keys import NAMES, UNSUPPORTED

USAGE = """\
usage: train.py [--job.config_file FILE ...] [--section.key VALUE ...]

  --job.config_file FILE   the TOML file, or several, later ones over earlier ones; also looked up
                           in train_configs/
  --section.key VALUE      any key, over the file: --training.steps 100, --optimizer.lr=3e-4
  --section.key            turns a switch on;  --no-section.key or --section.no_key turns it off
  --section.key a,b        a list

  titanlite config explain [FILE]          every key: value, source, default, meaning
  titanlite config explain SECTION.KEY     one key in depth
  titanlite config check FILE              check a file and show what a run of it would do

Start it with torchrun for more than one rank: torchrun --nproc_per_node 2 train.py ..."""


def load(argv: Sequence[str]) -> LoadedConfig:
    """Return the config of a command line (without the program's name), its files included.

    Raises ConfigError with every problem of a key by itself; if there is none, with every
    contradiction between keys but those of features. `-h` or `--help` prints the usage and exits
    with 0.
    """
    config, problems = read(argv)
    refuse(problems or broken(config, RULES))
    return config


def read(argv: Sequence[str], defer: bool = False) -> tuple[LoadedConfig, list[Problem]]:
    """Return the config of a command line, and its problems key by key, without contradictions.

    A key with a problem keeps its value of the layers below. defer: `to_toml` keeps environment
    variables as written, for other machines; here they may be unset. `--help` exits, as in `load`.
    """
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        raise SystemExit(0)
    entries, problems = command_line_entries(argv)
    layers = Layers(problems, defer)
    entries = layers.resolved(entries)
    for entry in entries:
        # A flag without a file names the empty one.
        for path in (entry.value or [""]) if entry.name == "job.config_file" else ():
            found = find_config(path)
            if found is None:
                folder, name = os.path.split(path)
                files = (file.name for one in config_folders() for file in one.glob("*.toml"))
                known = {file: file for file in files}
                for file in glob("*.toml", root_dir=folder or "."):
                    known[file] = os.path.join(folder, file)
                close = nearest(name, known)
                hint = f"nearest: {known[close[0]]}" if close else ""
                message = f"no file {quote(path)}"
                missing = Problem("no-file", "job.config_file", message, hint, "command line")
                problems.append(missing)
            else:
                failure = Problem("unreadable", "job.config_file", "", where="command line")
                layers.read(found, path, chain=(), failure=failure)
    return layers.merged(entries), problems


def read_text(
    text: str, path: Path, flags: Sequence[str] = (), origin: Origin = Origin.OWN
) -> tuple[LoadedConfig, list[Problem]]:
    """Return the config of a text, and what is wrong, as `read` does.

    path: of the text, which need not exist; files that it extends are found from there. flags: laid
    over it. origin: in a foreign text, variables and other files are problems, and `claims` lists
    the code that it names.
    """
    entries, problems = command_line_entries(flags)
    layers = Layers(problems, origin=origin)
    layers.read_text(text, path, chain=())
    return layers.merged(layers.resolved(entries)), problems


def load_file(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the config of a file, with flags over it. Raises ConfigError."""
    return load([f"--job.config_file={os.fspath(path)}", *overrides])


def config_folders() -> list[Path]:
    """Return where configs are looked up, after the working directory."""
    return [Path("train_configs"), Path(__file__).resolve().parents[1] / "train_configs"]


def find_config(path: str) -> Path | None:
    """Return the file of a name on the command line, or None."""
    direct = Path(os.path.expanduser(path))
    # `Path.exists` raises for names that are too long.
    if os.path.exists(direct):
        return direct
    return in_config_folders(path)


def in_config_folders(name: str) -> Path | None:
    """Return the file of a name in a folder of configs, or None; a name does not leave it."""
    for folder in config_folders():
        if ".." not in Path(name).parts and os.path.isfile(folder / name):
            return folder / name
    return None


#: Keys that a file, or the command line, cannot set.
_ONLY_FLAGS = {
    "job.config_file": "a file cannot name itself; to build on another file use job.extends"
}
_ONLY_FILES = {
    "job.extends": 'belongs in a file: [job] extends = ["base.toml"]',
    "job.dialect": 'tells how a file is written, so it belongs in the file: [job] dialect = "2026"',
}


@dataclass
class _Value:
    value: Any
    source: Source
    #: As written, under the name in `source`.
    raw: Any = None
    #: With its environment variables as written, for other machines; None: it has none.
    deferred: Any = None
    #: The code that the value of a foreign file would run.
    claims: tuple[Claim, ...] = ()


@dataclass
class Layers:
    """Puts layers over each other and collects what is wrong."""

    problems: list[Problem]
    #: Leave environment variables to other machines.
    defer: bool = False
    #: Who wrote the files. Flags are always the user's own.
    origin: Origin = Origin.OWN
    #: The files that were read, in the order of their layers, with their entries.
    files: list[tuple[Path, list[Entry]]] = field(default_factory=list)
    values: dict[str, _Value] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    #: Unsupported keys by name.
    unsupported: dict[str, Entry] = field(default_factory=dict)
    #: The table [sweep] of the last file that has one.
    sweep: Entry | None = None

    def read(self, path: Path, shown: str, chain: tuple[Path, ...], failure: Problem) -> None:
        """Add a file and all it extends.

        shown: its name as written. chain: the files that led here. failure: the problem of a file
        that cannot be read, without its message.
        """
        try:
            identity = path.resolve()
            if identity in chain:
                circle = (*chain[chain.index(identity) :], identity)
                names = " -> ".join(file.name for file in circle)
                message = f"files extend each other in a circle: {names}"
                self.problems.append(replace(failure, message=message, code="circle"))
                return
            text = path.read_text(encoding="utf-8")
        # A path with a zero byte is a ValueError, and so is a text that is not UTF-8.
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, UnicodeDecodeError):
                reason = "is not UTF-8 text"
            message = f"cannot read {quote(str(shown))}: {reason}"
            self.problems.append(replace(failure, message=message))
            return
        self.read_text(text, path, chain)

    def read_text(self, text: str, path: Path, chain: tuple[Path, ...]) -> None:
        # A byte order mark is no part of TOML, but editors on Windows write one.
        entries, problems = file_entries(text.removeprefix("\ufeff"), _short(path))
        self.problems += problems
        # Its values become flags, which have their variables replaced then.
        self.sweep = next((entry for entry in entries if entry.name == SWEEP), self.sweep)
        entries = self.resolved([entry for entry in entries if entry.name != SWEEP], self.origin)
        for entry in entries:
            if entry.name == "job.extends" and fits(list[str], entry.value):
                for name in entry.value:
                    self._extend(entry.source.place, path, name, chain)
        self.files.append((path, entries))

    def _extend(self, place: str, path: Path, name: str, chain: tuple[Path, ...]) -> None:
        """place: of the file's name in `path`."""
        file = path.parent / os.path.expanduser(name)
        if not file.exists():
            file = in_config_folders(name) or file
        claim = Claim(place, "job.extends", name, f"reads the file {file}")
        if refused := refusals([claim], self.origin):
            self.problems += refused
            return
        failure = Problem("unreadable", "job.extends", "", where=place)
        self.read(file, name, (*chain, path.resolve()), failure)

    def note(self, weight: Weight, text: str) -> None:
        self.notes.append(Note(weight, text))

    def resolved(self, entries: Iterable[Entry], origin: Origin = Origin.OWN) -> list[Entry]:
        """Return entries with the values of their environment variables. origin: who wrote them."""
        found = []
        for entry in entries:
            if "${" not in str(entry.value):
                found.append(entry)
                continue
            from titanlite.config import variables

            wanted = []
            for name in variables.names_in(entry.value):
                effect = f"reads the environment variable {name}"
                wanted.append(Claim(entry.source.place, entry.name, f"${{{name}}}", effect))
            if refused := refusals(wanted, origin):
                self.problems += refused
                found.append(entry)
                continue
            deferred = self.defer and variables.is_deferred(key_of(entry.name))
            entry, problems = variables.resolved(entry, keep_unset=deferred)
            self.problems += problems
            found.append(entry if deferred else replace(entry, raw=None))
        return found

    def merged(self, flags: list[Entry]) -> LoadedConfig:
        """Return the config of all files, with the flags over them."""
        written = [entry for _, entries in self.files for entry in entries]
        named = {entry.name: entry for entry in [*written, *flags]}
        # Files of torchtitan may have tables of several converters, which set the same keys here.
        values = {name: str(entry.value) for name, entry in named.items()}
        recipe = values.get("float8.recipe_name", "")
        is_mx = MX in values.get("model.converters", "") or recipe.startswith("mx")
        idle = f"{FLOAT8 if is_mx else MX}."
        if without := [name for name in named if name.startswith(idle)]:
            self.note(Weight.REST, f"no effect, by model.converters: {', '.join(without)}")
        layers: list[tuple[Path | None, list[Entry]]] = [*self.files, (None, flags)]
        for file, entries in layers:
            self._add([one for one in entries if not one.name.startswith(idle)], file)
        if self.unsupported or {"job.dialect", *ALIASES} & named.keys():
            from titanlite.config import dialect

            later = (one for one in written if one.name in ALIASES and ALIASES[one.name].is_later)
            dialect.apply_later(self, next(later, None))
            dialect.settle_mx(self, named.get("model.converters"))
            dialect.settle_microbatches(self)
            dialect.settle_unsupported(self)
        if self.sweep is not None:
            self.note(
                Weight.REST,
                f"{self.sweep.source.place}: [sweep] is for `titanlite sweep`; this run has the "
                "values of the files and of the command line",
            )
        return self._loaded()

    def _loaded(self) -> LoadedConfig:
        tree: dict[str, dict[str, Any]] = {name: {} for name in sections()}
        for name, settled in self.values.items():
            section, _, key = name.partition(".")
            table = table_of(name)
            if table:
                # TOML reads the name of an entry, which may have quotes.
                (entry,) = loads(f"{name[len(table) + 1 :]} = 0")
                entries = tree[section].setdefault(table.partition(".")[2], {})
                entries[entry] = settled.value
            else:
                tree[section][key] = settled.value
        others = {name: msgspec.convert(tree.pop(name), owner) for name, owner in OTHERS.items()}
        values = self.values.items()
        return LoadedConfig(
            replace_fields(msgspec.convert(tree, Config), others=others),
            {name: one.source for name, one in values},
            tuple(_short(path) for path, _ in self.files),
            tuple(self.notes),
            {name: one.deferred for name, one in values if one.deferred is not None},
            tuple(claim for _, one in values for claim in one.claims),
            self.origin,
            self.sweep,
        )

    def _add(self, entries: Iterable[Entry], file: Path | None) -> None:
        """file: None for the command line."""
        layer: dict[str, _Value] = {}
        for entry in entries:
            if entry.name in UNSUPPORTED:
                # Whether it matters is known with the values of all layers.
                self.unsupported[entry.name] = entry
                continue
            value = self._value(entry, file)
            if value is None:
                continue
            key = key_of(entry.name)
            before = layer.get(key, value)
            if before.value != value.value:
                both = " and ".join(
                    f"{one.source.written} = {quote(one.raw)} ({one.source.place})"
                    for one in (before, value)
                )
                message = f"two names of one thing, {key}, differ: {both}"
                place = entry.source.place
                self.problems.append(Problem("given-twice", entry.name, message, where=place))
            layer[key] = value
        self._exclude(layer)
        self._drop_overrides(layer)
        self.values.update(layer)

    def _value(self, entry: Entry, file: Path | None) -> _Value | None:
        """None: the entry is wrong, and told."""
        name = entry.name
        key = key_of(name)
        place = entry.source.place
        if message := (_ONLY_FLAGS if file else _ONLY_FILES).get(name):
            self.problems.append(Problem("misplaced", name, message, where=place))
            return None
        normal = normalized(name, entry.value)
        reason = refusal(name, normal)
        if not reason and not fits(type_of_name(name), normal):
            from titanlite.config.value_problems import problems_of

            wrong = problems_of(type_of_name(name), normal)
            self.problems += [_of_entry(problem, entry) for problem in wrong]
            return None
        try:
            value = translated(name, normal)
        except ValueError as error:
            reason = str(error)
        if reason:
            message = f"{quote(entry.value)} is not supported: {reason}"
            self.problems.append(Problem("unsupported", name, message, where=place))
            return None
        if note := NAMES["notes"].get(key, {}).get(str(entry.value)):
            weight, text = note
            self.note(Weight[weight], f"{place}: {text}")
        folder = file.parent if file else Path()
        found = _Value(_anchored(key, value, folder), entry.source, entry.value)
        if file and self.origin is not Origin.OWN:
            from titanlite.config.trust_claims import config_claims

            found.claims = tuple(config_claims(place, key, value, found.value))
        # A value that is converted cannot wait for the machines of a job: it has another form.
        if entry.raw is not None and name not in CONVERTED:
            found.deferred = _anchored(key, normalized(name, entry.raw), folder)
        return found

    def _exclude(self, layer: dict[str, _Value]) -> None:
        """Allow one of the keys for one thing; it replaces one of the layers below."""
        for group in EXCLUSIVE:
            chosen = [key for key in group if key in layer and layer[key].value is not None]
            if len(chosen) > 1:
                places = ", ".join(_assignment(key, layer[key]) for key in chosen)
                place = layer[chosen[-1]].source.place
                message = f"these exclude each other: {places}"
                self.problems.append(Problem("exclusive", chosen[-1], message, where=place))
                continue
            for key in group if chosen else ():
                gone = None if key in chosen else self.values.pop(key, None)
                if gone is not None and gone.value is not None:
                    by = f"{chosen[0]} ({layer[chosen[0]].source})"
                    self.note(Weight.NUMBERS, f"{by} replaces {_assignment(key, gone)}")

    def _drop_overrides(self, layer: dict[str, _Value]) -> None:
        """Drop those of the layers below where this one chooses another model."""
        models = ("model.name", "model.flavor")
        others = [key for key in models if key in layer and layer[key].value != self.get(key)]
        overrides = [name for name in self.values if name.startswith("model.overrides.")]
        if others and overrides:
            dropped = ", ".join(_assignment(name, self.values.pop(name)) for name in overrides)
            by = " and ".join(_assignment(key, layer[key]) for key in others)
            self.note(Weight.NUMBERS, f"{by} drops the overrides of another model: {dropped}")

    def put(self, key: str, value: Any, source: Source) -> None:
        self.values[key] = _Value(value, source)

    def get(self, key: str) -> Any:
        return self.values[key].value if key in self.values else keys()[key].default


def _short(path: Path) -> str:
    absolute = os.path.abspath(path)
    here = os.getcwd()
    is_below = absolute.startswith(here + os.sep)
    return os.path.relpath(absolute, here) if is_below else str(path)


def _anchored(key: str, value: Any, folder: Path) -> Any:
    if key not in import_path_keys.ANCHORED or value is None:
        return value
    if isinstance(value, str):
        return import_path_keys.anchored(value, folder=folder)
    return [import_path_keys.anchored(item, folder=folder) for item in value]


def _of_entry(problem: Problem, entry: Entry) -> Problem:
    key = key_of(entry.name)
    # The key stands beside another name of it, so that both can be searched for.
    shown = entry.name if entry.name == key else f"{entry.name} ({key})"
    hint = problem.remedy
    if entry.source.variables and problem.code == "wrong-type":
        flag = f'--{entry.name}="${entry.source.variables[0]}"'
        hint = f"variables stand in strings only; a shell replaces {flag}"
    place = entry.place(problem.key)
    return replace(problem, where=place, key=shown + problem.key, remedy=hint)


def _assignment(key: str, value: _Value) -> str:
    return f"{key} = {quote(value.value)} ({value.source})"
