"""Load a config.

Layers: defaults < `[job] extends` in order < the TOML files in order < the command line.

This is the first of three stages of checks: each key by itself. `titanlite.config.checks` has the
others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from titanlite.config import extensions
from titanlite.config.aliases import (
    ALIASES,
    LATER_DEFAULTS,
    LATER_FLAVORS,
    VALUE_NOTES,
    MicrobatchSize,
    Refused,
    key_of,
    normalized,
)
from titanlite.config.checks import contradictions
from titanlite.config.entries import Entry, command_line_entries, file_entries, type_of_name
from titanlite.config.errors import DEFAULT, ConfigError, Problem, Source, nearest
from titanlite.config.keys import check, fits, keys, sections, table_of
from titanlite.config.loaded import EXCLUSIVE, LoadedConfig
from titanlite.config.sections import Config
from titanlite.config.toml import loads, quote
from titanlite.config.trust import (
    Claim,
    Origin,
    config_claims,
    file_claim,
    refusals,
    variable_claim,
)
from titanlite.config.unsupported_keys import UNSUPPORTED, is_off
from titanlite.config.variables import is_deferred, names_in, resolved

_MICROBATCHES = "experimental.pipeline_parallel_microbatches"

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
    contradiction between keys. `-h` or `--help` prints the usage and exits with 0.
    """
    config, problems = read(argv)
    if problems := problems or contradictions(config):
        raise ConfigError(problems)
    return config


def read(argv: Sequence[str], defer: bool = False) -> tuple[LoadedConfig, list[Problem]]:
    """Return the config of a command line, and what is wrong key by key; such keys are left at the
    layers below.

    defer: `to_toml` keeps environment variables as they are written, for other machines; here they
    may be unset. Contradictions between keys are not looked for. `-h` or `--help` prints the usage
    and exits with 0.
    """
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        raise SystemExit(0)
    entries, problems = command_line_entries(argv)
    layers = _Layers(problems, defer)
    entries = layers.resolved(entries)
    for path in next((e.value or [""] for e in entries if e.name == "job.config_file"), []):
        found = find_config(path)
        if found is None:
            problems.append(_missing(path))
        else:
            layers.read(
                found, path, (), Problem("command line", "job.config_file", "", code="unreadable")
            )
    layers.add(entries, file=None)
    return layers.finish(), problems


def read_text(
    text: str, path: Path, flags: Sequence[str] = (), origin: Origin = Origin.OWN
) -> tuple[LoadedConfig, list[Problem]]:
    """Do as `read` for a text that stands or shall stand in the file `path`; files it extends are
    found from there.

    flags: laid over it, as those of a command line. origin: who wrote the text. Of a foreign one no
    variable is replaced and no other file is read, which are problems; the code that it names is in
    the config's `claims`.
    """
    entries, problems = command_line_entries(flags)
    layers = _Layers(problems, origin=origin)
    layers.read_text(text, path, chain=())
    layers.add(layers.resolved(entries), file=None)
    return layers.finish(), layers.problems


def load_file(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the config of a file, with flags over it as on a command line. Raises ConfigError."""
    return load([f"--job.config_file={os.fspath(path)}", *overrides])


def config_folders() -> list[Path]:
    """Return where configs given by a bare name are looked up, after the working directory."""
    return [Path("train_configs"), Path(__file__).resolve().parents[1] / "train_configs"]


def find_config(path: str) -> Path | None:
    """Return the file that a name on the command line means, or None."""
    direct = Path(os.path.expanduser(path))
    if (
        os.path.exists(direct) or direct.name != path
    ):  # that of Path raises for names that are too long
        return direct if os.path.exists(direct) else None
    return next(
        (folder / path for folder in config_folders() if os.path.isfile(folder / path)), None
    )


def _missing(path: str) -> Problem:
    known = dict.fromkeys(
        file.name for folder in config_folders() for file in sorted(folder.glob("*.toml"))
    )
    close = nearest(Path(path).name, known)
    hint = (
        f"nearest in train_configs/: {close[0]}"
        if close
        else f"train_configs/ has {', '.join(known)}"
    )
    return Problem(
        "command line",
        "job.config_file",
        f"no file {quote(path)}",
        hint if known else "",
        code="no-file",
    )


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
    """One value of a layer under its key."""

    value: Any
    source: Source
    #: As written, under the name in `source`.
    raw: Any = None
    #: With its environment variables as written, for other machines; None: it has none.
    deferred: Any = None
    #: Of a foreign file: what the value would run.
    claims: tuple[Claim, ...] = ()


@dataclass
class _Layers:
    """Puts layers over each other and collects what is wrong."""

    problems: list[Problem]
    #: Leave environment variables to other machines.
    defer: bool = False
    #: Who wrote the files. Flags are always the user's own.
    origin: Origin = Origin.OWN
    values: dict[str, _Value] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: The first sign that a file was written for torchtitan 0.2.x.
    later: Source | None = None
    #: Where a file names the tokenizer as torchtitan did until 0.1.0, and as it does since.
    tokenizer_path: Source | None = None
    hf_assets_path: Source | None = None

    def read(self, path: Path, shown: str, chain: tuple[Path, ...], failure: Problem) -> None:
        """Add a file and all it extends; chain: the files that led here, failure: the problem, but
        for the reason.
        """
        try:
            identity = path.resolve()
            if identity in chain:
                circle = " -> ".join(p.name for p in (*chain[chain.index(identity) :], identity))
                message = f"files extend each other in a circle: {circle}"
                self.problems.append(replace(failure, message=message, code="circle"))
                return
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            known = (
                "is not UTF-8 text"
                if isinstance(error, UnicodeDecodeError)
                else getattr(error, "strerror", None)
            )
            reason = known or str(error)
            self.problems.append(
                replace(failure, message=f"cannot read {quote(str(shown))}: {reason}")
            )
            return
        self.read_text(text, path, chain)

    def read_text(self, text: str, path: Path, chain: tuple[Path, ...]) -> None:
        """Add the text of a file and all it extends."""
        # A byte order mark is no part of TOML, but editors on Windows write one.
        entries, problems = file_entries(text.removeprefix("\ufeff"), _short(path))
        self.problems += problems
        entries = self.resolved(entries, self.origin)
        for entry in entries:
            if entry.name == "job.extends" and fits(list[str], entry.value):
                for name in entry.value:
                    self._extend(entry.source.place, path, name, chain)
        self.files.append(_short(path))
        self.add(entries, file=path)

    def _extend(self, place: str, path: Path, name: str, chain: tuple[Path, ...]) -> None:
        """Add a file that the file `path` extends. place: of its name."""
        file = path.parent / os.path.expanduser(name)
        claim = file_claim(place, "job.extends", name, file)
        if refused := refusals([claim], self.origin):
            self.problems += refused
            return
        failure = Problem(place, "job.extends", "", code="unreadable")
        self.read(file, name, (*chain, path.resolve()), failure)

    def resolved(self, entries: Iterable[Entry], origin: Origin = Origin.OWN) -> list[Entry]:
        """Return entries with the values of their environment variables. origin: who wrote them."""
        found = []
        for entry in entries:
            names = names_in(entry.value)
            claims = [variable_claim(entry.source.place, entry.name, name) for name in names]
            if refused := refusals(claims, origin):
                self.problems += refused
                found.append(entry)
                continue
            deferred = self.defer and is_deferred(key_of(entry.name))
            entry, problems = resolved(entry, keep_unset=deferred)
            self.problems += problems
            found.append(entry if deferred else replace(entry, raw=None))
        return found

    def add(self, entries: Iterable[Entry], file: Path | None) -> None:
        """Check the entries of one layer and put them over the values so far."""
        layer: dict[str, _Value] = {}
        for entry in entries:
            alias = ALIASES.get(entry.name)
            if alias and alias.is_later and file and self.later is None:
                self.later = entry.source
            if file and entry.name == "model.tokenizer_path":
                self.tokenizer_path = entry.source
            if file and entry.name == "model.hf_assets_path":
                self.hf_assets_path = entry.source
            found = self._check(entry, file)
            if isinstance(found, _Value):
                key = key_of(entry.name)
                before = layer.setdefault(key, found)
                if before.value != found.value:
                    self.problems.append(_given_twice(key, before, found))
                layer[key] = found
            else:
                self.problems += found
        self._exclude(layer)
        self.values.update(layer)

    def _check(self, entry: Entry, file: Path | None) -> _Value | list[Problem]:
        """Return an entry as the key's own kind of value, or what is wrong with it: nothing for an
        unsupported key.
        """
        name, value, source, key = entry.name, entry.value, entry.source, key_of(entry.name)
        problem = partial(Problem, source.place, name)
        if misplaced := (_ONLY_FLAGS if file else _ONLY_FILES).get(name):
            return [problem(misplaced, code="misplaced")]
        if name in UNSUPPORTED:
            hint = f"remove it, or leave it at {' or '.join(map(quote, UNSUPPORTED[name].off))}"
            message = f"{quote(value)} is not supported: {UNSUPPORTED[name].reason}"
            return [] if is_off(name, value) else [problem(message, hint, code="unsupported")]
        anchor = partial(extensions.anchored, folder=file.parent if file else Path())

        def renamed(value: Any) -> Any:
            return ALIASES[name].converted(value) if name in ALIASES else value

        def converted(value: Any) -> Any:
            value = renamed(value)
            if key in extensions.ANCHORED and value is not None:
                return anchor(value) if isinstance(value, str) else [*map(anchor, value)]
            return value

        try:
            normal = normalized(name, value)
            wrong = check(type_of_name(name), normal)
            right = None if wrong else _Value(converted(normal), source, value)
            if right and file and self.origin is not Origin.OWN:
                right.claims = tuple(config_claims(source.place, key, renamed(normal), right.value))
            if right and entry.raw is not None:
                right.deferred = converted(normalized(name, entry.raw))
        except Refused as error:
            return [problem(f"{quote(value)} is not supported: {error}", code="unsupported")]
        if (
            right is None
        ):  # the key stands beside another name of it, so that both can be searched for
            shown = name if name == key else f"{name} ({key})"
            for i, one in enumerate(wrong):
                if source.variables and one.hint.startswith("write it"):
                    flag = f'--{name}="${source.variables[0]}"'
                    wrong[i] = replace(
                        one, hint=f"variables stand in strings only; a shell replaces {flag}"
                    )
            return [replace(p, where=entry.place(p.key), key=shown + p.key) for p in wrong]
        if isinstance(value, str) and (note := VALUE_NOTES.get((key, value))):
            self.notes.append(f"{source.place}: {note}")
        return right

    def _exclude(self, layer: dict[str, _Value]) -> None:
        """Allow one of the keys for one thing in a layer; it replaces another one of the layers
        below.
        """
        for group in EXCLUSIVE:
            chosen = [key for key in group if key in layer and layer[key].value is not None]
            if len(chosen) > 1:
                places = ", ".join(
                    f"{key} = {quote(layer[key].value)} ({layer[key].source})" for key in chosen
                )
                place = layer[chosen[-1]].source.place
                message = f"these exclude each other: {places}"
                self.problems.append(Problem(place, chosen[-1], message, code="exclusive"))
                continue
            for key in chosen:
                for other in (other for other in group if other != key):
                    gone = self.values.pop(other, None)
                    if gone is not None and gone.value is not None:
                        replaced = f"{other} = {quote(gone.value)} ({gone.source})"
                        self.notes.append(f"{key} ({layer[key].source}) replaces {replaced}")

    def finish(self) -> LoadedConfig:
        """Return the config of all layers."""
        self._apply_later_defaults()
        self._apply_microbatch_size()
        written: dict[str, dict[str, Any]] = {name: {} for name in sections()}
        for name, settled in self.values.items():
            section, _, key = name.partition(".")
            if table := table_of(name):
                (entry,) = loads(f"{name[len(table) + 1 :]} = 0")
                written[section].setdefault(table.partition(".")[2], {})[entry] = settled.value
            else:
                written[section][key] = settled.value
        sources = {name: settled.source for name, settled in self.values.items()}
        deferred = {
            name: settled.deferred
            for name, settled in self.values.items()
            if settled.deferred is not None
        }
        claims = tuple(claim for settled in self.values.values() for claim in settled.claims)
        return LoadedConfig(
            msgspec.convert(written, Config),
            sources,
            tuple(self.files),
            tuple(self.notes),
            deferred,
            claims,
            self.origin,
        )

    def _get(self, key: str) -> Any:
        return self.values[key].value if key in self.values else keys()[key].default

    def _apply_later_defaults(self) -> None:
        """Give a file of torchtitan 0.2.x the model and the defaults it expects, for keys that no
        layer sets.
        """
        sign, why = self.later, f"uses the later name {self.later.written}" if self.later else ""
        if said := self.values.get("job.dialect"):
            sign, why = said.source if said.value == "2026" else None, 'says dialect "2026"'
        if sign is None:
            self._note_scaled_405b()
            return
        source = Source("dialect", sign.file, sign.line)
        self.values.setdefault("job.dialect", _Value("2026", source))
        taken = [key for key in LATER_DEFAULTS if key not in self.values]
        self.values.update({key: _Value(LATER_DEFAULTS[key], source) for key in taken})
        if taken:
            self.notes.append(f"{sign.place} {why}: later defaults for {', '.join(taken)}")
        if "lr_scheduler.style" in taken:
            self.notes.append(
                "the warm-up of torchtitan 0.2.x is n / W at step n: lr_scheduler.style = "
                '"titan-0.2"'
            )
        there = self._get("model.flavor")
        if (self._get("model.name"), there) == ("qwen3", "debugmodel"):
            self.notes.append(
                'the "debugmodel" of qwen3 is titanlite\'s own: that of torchtitan has another '
                "shape"
            )
        if self._is_of_0_1_0(sign):
            self._apply_0_1_0(source)
        elif self._get("model.name") == "llama3" and there in LATER_FLAVORS:
            flavor, difference = LATER_FLAVORS[there]
            given = self.values.get("model.flavor", _Value(there, DEFAULT)).source
            if given.file == sign.file or given.kind == "command line":
                source = replace(given, written=f"model.flavor = {quote(there)}")
            self.values["model.flavor"] = _Value(flavor, source)
            self.notes.append(
                f"model.flavor {quote(there)} of torchtitan 0.2.x is {quote(flavor)}: {difference}"
            )

    def _is_of_0_1_0(self, sign: Source) -> bool:
        """Return whether a file with later names is of torchtitan 0.1.0 (spring 2025).

        That names the tokenizer model.tokenizer_path, and 0.2.x names it model.hf_assets_path: so
        do all their files.
        """
        if "job.dialect" in self.values and self.values["job.dialect"].source.kind != "dialect":
            return False
        told = self.tokenizer_path
        return told is not None and told.file == sign.file and self.hf_assets_path is None

    def _apply_0_1_0(self, source: Source) -> None:
        """Give a file of torchtitan 0.1.0 its models: RoPE without scaling, and 6 layers in the
        debug model.
        """
        there = self._get("model.flavor")
        if self._get("model.name") != "llama3" or there not in LATER_FLAVORS:
            return
        if there == "debugmodel":
            given = self.values.get("model.flavor", _Value(there, DEFAULT)).source
            if given.file == source.file or given.kind == "command line":
                source = replace(given, written=f"model.flavor = {quote(there)}")
            self.values["model.flavor"] = _Value(LATER_FLAVORS[there][0], source)
        is_scaled = there in ("debugmodel", "405B")
        if is_scaled and {"model.rope_scaling", "model.overrides.rope_scaling"}.isdisjoint(
            self.values
        ):
            self.values["model.rope_scaling"] = _Value(
                "none", Source("dialect", source.file, source.line)
            )
        place = self.tokenizer_path.place if self.tokenizer_path else ""
        self.notes.append(
            f"{place} names model.tokenizer_path, as torchtitan 0.1.0 does, where 0.2.x has "
            "model.hf_assets_path: "
            f'model.flavor {quote(there)} has RoPE without scaling. [job] dialect = "2026" gives '
            "it that of 0.2.x"
        )

    def _note_scaled_405b(self) -> None:
        scaled = {"model.rope_scaling", "model.overrides.rope_scaling"}.isdisjoint(self.values)
        if (self._get("model.name"), self._get("model.flavor")) == ("llama3", "405B") and scaled:
            self.notes.append(
                'model.flavor "405B" is Llama 3.1: RoPE scaled by 8. torchtitan of autumn 2024 '
                'trained it without: model.rope_scaling = "none"'
            )

    def _apply_microbatch_size(self) -> None:
        """Turn a micro-batch size into the count of micro-batches, now that the batch size is
        known.
        """
        settled, batch_size = self.values.get(_MICROBATCHES), self._get("training.batch_size")
        if settled is None or not isinstance(settled.value, MicrobatchSize):
            return
        size, source = settled.value.size, settled.source
        self.values[_MICROBATCHES] = _Value(max(batch_size // size, 1), source)
        if batch_size % size and not self.problems:  # else the batch size may be wrong
            message = f"micro-batches of {size} do not divide training.batch_size = {batch_size}"
            self.problems.append(
                Problem(source.place, f"{source.written} ({_MICROBATCHES})", message)
            )


def _short(path: Path) -> str:
    """Return a path as messages show it: from the working directory where it lies below it."""
    absolute, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, here) if absolute.startswith(here + os.sep) else str(path)


def _given_twice(key: str, first: _Value, second: _Value) -> Problem:
    both = " and ".join(
        f"{v.source.written} = {quote(v.raw)} ({v.source.place})" for v in (first, second)
    )
    message = f"two names of one thing, {key}, differ: {both}"
    return Problem(second.source.place, second.source.written, message, code="given-twice")
