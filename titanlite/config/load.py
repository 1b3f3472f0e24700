"""Layers: defaults < `[job] extends` in order < the TOML file < the command line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titanlite.config import foreign
from titanlite.config.checks import contradictions
from titanlite.config.dialect import Dialect
from titanlite.config.entries import Entry, command_line_entries, file_entries, table_of
from titanlite.config.errors import DEFAULT, ConfigError, Problem, Source, nearest
from titanlite.config.foreign import FOREIGN
from titanlite.config.job import EXCLUSIVE, JobConfig, independent
from titanlite.config.names import (
    ALIASES,
    LATER_DEFAULTS,
    LATER_FLAVORS,
    REFUSED_VALUES,
    VALUE_NAMES,
    VALUE_NOTES,
    MicrobatchSize,
    Unfit,
    listed,
)
from titanlite.config.scan import loads
from titanlite.config.schema import check_value, keys, quote, sections

USAGE = """\
usage: train.py [--job.config_file FILE] [--section.key VALUE ...]

  --job.config_file FILE   the TOML file; a bare name is also looked up in train_configs/
  --section.key VALUE      any key, over the file: --training.steps 100, --optimizer.lr=3e-4
  --section.key            turns a switch on;  --no-section.key or --section.no_key turns it off
  --section.key a,b        a list

  titanlite config explain [FILE]          every key: value, source, default, meaning
  titanlite config explain SECTION.KEY     one key in depth
  titanlite config check FILE              is it right, and what follows from it

Start it with torchrun for more than one rank: torchrun --nproc_per_node 2 train.py ..."""


def load(argv: Sequence[str]) -> JobConfig:
    """The config of a command line (without the program's name), its files included.

    Raises ConfigError with every problem found. `-h` or `--help` prints the usage and exits with 0.
    """
    config, problems = read(argv)
    problems += independent(contradictions(config), problems, config)
    if problems:
        raise ConfigError(problems)
    return config


def read(argv: Sequence[str]) -> tuple[JobConfig, list[Problem]]:
    """The config of a command line, wrong keys left at what lies below them, and what is wrong key by key.

    Contradictions between keys are not looked for. `-h` or `--help` prints the usage and exits with 0.
    """
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        raise SystemExit(0)
    entries, problems = command_line_entries(argv)
    path = next((e.value for e in entries if e.name == "job.config_file" and isinstance(e.value, str)), None)
    builder = _Builder(problems)
    if path is not None:
        found = find_config(path)
        if found is None:
            builder.problems.append(_missing(path))
        else:
            builder.read(found, shown=path, chain=())
    builder.lay(entries, file=None)
    return builder.finish(), builder.problems


def read_text(text: str, path: Path) -> tuple[JobConfig, list[Problem]]:
    """As `read`, for a text that stands or shall stand in the file `path`; what it extends is found from there."""
    builder = _Builder([])
    builder.read_text(text, path, chain=())
    return builder.finish(), builder.problems


def load_file(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> JobConfig:
    """The config of a file, with flags laid over it as on a command line. Raises ConfigError."""
    return load([f"--job.config_file={os.fspath(path)}", *overrides])


def config_folders() -> list[Path]:
    """Where configs given by a bare name are looked up, after the working directory."""
    return [Path("train_configs"), Path(__file__).resolve().parents[1] / "train_configs"]


def find_config(path: str) -> Path | None:
    """The file that a name on the command line means, or None."""
    direct = Path(os.path.expanduser(path))
    if direct.exists() or direct.name != path:
        return direct if direct.exists() else None
    return next((folder / path for folder in config_folders() if (folder / path).is_file()), None)


def _missing(path: str) -> Problem:
    known = [file.name for folder in config_folders() for file in sorted(folder.glob("*.toml"))]
    close = nearest(Path(path).name, known)
    listed = ", ".join(dict.fromkeys(known))
    hint = f"nearest in train_configs/: {close[0]}" if close else f"train_configs/ has {listed}"
    return Problem("command line", "job.config_file", f"no file {quote(path)}", hint if known else "")


@dataclass
class _Value:
    """One settled value of a layer."""

    value: Any
    source: Source
    #: As it was written, under the name in `source`.
    raw: Any = None


@dataclass
class _Builder:
    """Lays layers over each other and collects what is wrong."""

    problems: list[Problem]
    values: dict[str, _Value] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: The first sign that a file was written for the later dialect.
    later: Source | None = None

    def read(self, path: Path, shown: str, chain: tuple[Path, ...], named_at: str = "command line") -> None:
        """Lay a file and all it extends; `chain`: the files that led here."""
        key = "job.extends" if chain else "job.config_file"
        identity = path.resolve()
        if identity in chain:
            cycle = " -> ".join(p.name for p in (*chain[chain.index(identity) :], identity))
            self.problems.append(Problem(named_at, key, f"files extend each other in a circle: {cycle}"))
            return
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else (error.strerror or str(error))
            self.problems.append(Problem(named_at, key, f"cannot read {quote(str(shown))}: {reason}"))
            return
        self.read_text(text, path, chain)

    def read_text(self, text: str, path: Path, chain: tuple[Path, ...]) -> None:
        """Lay the text of a file and all it extends."""
        # A byte order mark is no part of TOML, but editors on Windows write one.
        entries, problems = file_entries(text.removeprefix("\ufeff"), _short(path))
        self.problems += problems
        for entry in entries:
            if entry.name == "job.extends" and not check_value(keys()["job.extends"], entry.value):
                for base in entry.value:
                    file = path.parent / os.path.expanduser(base)
                    self.read(file, base, (*chain, path.resolve()), entry.source.place)
        self.files.append(_short(path))
        self.lay(entries, file=path)

    def lay(self, entries: Iterable[Entry], file: Path | None) -> None:
        """Check the entries of one layer and put them over what is there."""
        layer: dict[str, _Value] = {}
        for entry in entries:
            settled = self.settle(entry, file)
            if settled is None:
                continue
            canonical, value = settled
            before = layer.get(canonical)
            if before is not None and before.value != value.value:
                self.problems.append(_clash(canonical, before, value))
            layer[canonical] = value
        self.exclude(layer)
        self.values.update(layer)

    def settle(self, entry: Entry, file: Path | None) -> tuple[str, _Value] | None:
        """An entry under its key, with the key's own kind of value; None when it is wrong or without effect."""
        place, name, value = entry.source.place, entry.name, entry.value
        misplaced = _misplaced(name, file)
        if misplaced:
            self.problems.append(Problem(place, name, misplaced))
            return None
        if name in FOREIGN:
            refusal = foreign.check(name, value)
            if refusal:
                self.problems.append(Problem(place, name, f"{quote(value)} is {refusal}", _off_hint(name)))
            return None
        table = table_of(name)
        if table:
            return self.settle_in_table(entry, table)
        alias = ALIASES.get(name)
        canonical = alias.canonical if alias else name
        if alias and file and alias.implies_later_defaults and self.later is None:
            self.later = Source("file", entry.source.file, entry.source.line, name)
        source = Source(entry.source.kind, entry.source.file, entry.source.line, name)
        try:
            value = listed(name, value)
            if alias and alias.convert:
                value = alias.convert(value)
        except Unfit as error:
            self.problems.append(Problem(place, name, str(error), about=(canonical,)))
            return None
        if isinstance(value, str):
            if (canonical, value) in VALUE_NOTES:
                self.notes.append(f"{place}: {VALUE_NOTES[canonical, value]}")
            value = VALUE_NAMES.get((canonical, value), value)
            if (canonical, value) in REFUSED_VALUES:
                reason = REFUSED_VALUES[canonical, value]
                message = f"{quote(value)} is not supported: {reason}"
                self.problems.append(Problem(place, name, message, about=(canonical,)))
                return None
        wrong = [] if isinstance(value, MicrobatchSize) else check_value(keys()[canonical], value)
        # A later name stands beside its key in messages, so that both can be searched for.
        shown = f"{name} ({canonical})" if alias else name
        self.problems += [
            Problem(entry.place(path), shown + path, message, hint, (canonical,)) for path, message, hint in wrong
        ]
        return None if wrong else (canonical, _Value(value, source, entry.value))

    def settle_in_table(self, entry: Entry, table: str) -> tuple[str, _Value] | None:
        wrong = check_value(keys()[table], {"field": entry.value})
        if wrong:
            expected = "a string" if table == "launch.environment" else "a value"
            self.problems.append(
                Problem(entry.source.place, entry.name, f"expected {expected}, got {quote(entry.value)}")
            )
            return None
        return entry.name, _Value(entry.value, entry.source, entry.value)

    def exclude(self, layer: dict[str, _Value]) -> None:
        """One way to say a thing per layer; a later layer's choice replaces an earlier one's."""
        for group in EXCLUSIVE:
            chosen = [key for key in group if key in layer and layer[key].value is not None]
            if len(chosen) > 1:
                places = ", ".join(f"{key} = {quote(layer[key].value)} ({layer[key].source})" for key in chosen)
                place = layer[chosen[-1]].source.place
                message = f"these exclude each other: {places}"
                self.problems.append(Problem(place, chosen[-1], message, about=group))
            elif chosen:
                for other in group:
                    if other != chosen[0] and other in self.values:
                        gone = self.values.pop(other)
                        if gone.value is not None:
                            self.notes.append(
                                f"{chosen[0]} ({layer[chosen[0]].source}) replaces {other} = {quote(gone.value)} "
                                f"({gone.source})"
                            )

    def finish(self) -> JobConfig:
        self.apply_later_defaults()
        misfits = self.apply_microbatch_size()
        written: dict[str, dict[str, Any]] = {name: {} for name in sections()}
        for name, settled in self.values.items():
            table = table_of(name)
            if table:
                section, _, key = table.partition(".")
                written[section].setdefault(key, {})[_table_field(name, table)] = settled.value
            else:
                section, _, key = name.partition(".")
                written[section][key] = settled.value
        dialect = Dialect.model_validate(
            {name: model.model_validate(written[name]) for name, model in sections().items()}
        )
        config = JobConfig(
            dialect, {name: v.source for name, v in self.values.items()}, tuple(self.files), tuple(self.notes)
        )
        self.problems += independent(misfits, self.problems, config)
        return config

    def apply_later_defaults(self) -> None:
        """Give a file of the later dialect the model and the defaults it expects, for what no layer says."""
        said = self.values.get("job.dialect")
        if said is not None:
            sign = said.source if said.value == "2026" else None
            why = 'says dialect "2026"'
        else:
            sign = self.later
            why = f"uses the later name {sign.written}" if sign else ""
        if sign is None:
            self.note_scaled_405b()
            return
        if said is None:
            self.values["job.dialect"] = _Value("2026", Source("dialect", sign.file, sign.line))
        taken = [key for key in LATER_DEFAULTS if key not in self.values]
        for key in taken:
            self.values[key] = _Value(LATER_DEFAULTS[key], Source("dialect", sign.file, sign.line))
        if taken:
            self.notes.append(f"{sign.place} {why}: later defaults for {', '.join(taken)}")
        if "lr_scheduler.style" in taken:
            self.notes.append('the warm-up of torchtitan 0.2.x is n / W at step n: lr_scheduler.style = "titan-0.2"')
        self.apply_later_flavor(sign)

    def apply_later_flavor(self, sign: Source) -> None:
        """Take the flavor of llama3 that the later versions mean by a name; sign: what shows the file's dialect."""
        written = self.values.get("model.flavor", _Value(keys()["model.flavor"].default, DEFAULT))
        if not self.is_llama3() or written.value not in LATER_FLAVORS:
            return
        flavor, difference = LATER_FLAVORS[written.value]
        source = Source("dialect", sign.file, sign.line)
        if written.source.file == sign.file or written.source.kind == "command line":
            source = replace(written.source, written=f"model.flavor = {quote(written.value)}")
        self.values["model.flavor"] = _Value(flavor, source)
        self.notes.append(f"model.flavor {quote(written.value)} of torchtitan 0.2.x is {quote(flavor)}: {difference}")

    def note_scaled_405b(self) -> None:
        flavor = self.values.get("model.flavor")
        scaling = {"model.rope_scaling", "model.overrides.rope_scaling"} & set(self.values)
        if flavor is not None and flavor.value == "405B" and self.is_llama3() and not scaling:
            self.notes.append(
                'model.flavor "405B" is Llama 3.1: RoPE scaled by 8. torchtitan of autumn 2024 trained it without: '
                'model.rope_scaling = "none"'
            )

    def is_llama3(self) -> bool:
        """Whether the model is of the family llama3, which is the default."""
        name = self.values.get("model.name")
        return name is None or name.value == "llama3"

    def apply_microbatch_size(self) -> list[Problem]:
        """Turn a micro-batch size into the count of micro-batches, now that the batch size is settled."""
        key = "experimental.pipeline_parallel_microbatches"
        settled = self.values.get(key)
        if settled is None or not isinstance(settled.value, MicrobatchSize):
            return []
        batch = self.values.get("training.batch_size")
        batch_size = batch.value if batch else keys()["training.batch_size"].default
        count, rest = divmod(batch_size, settled.value.size)
        if not rest:
            self.values[key] = _Value(count, settled.source)
            return []
        del self.values[key]
        return [
            Problem(
                settled.source.place,
                f"{settled.source.written} ({key})",
                f"micro-batches of {settled.value.size} do not divide training.batch_size = {batch_size}",
                about=(key, "training.batch_size"),
            )
        ]


def _short(path: Path) -> str:
    """A path as messages show it: from the working directory where it lies below it."""
    absolute, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, here) if absolute.startswith(here + os.sep) else str(path)


def _misplaced(name: str, file: Path | None) -> str:
    """Why a key cannot be said in this layer."""
    if file is not None and name == "job.config_file":
        return "a file cannot name itself; to build on another file use job.extends"
    if file is None and name == "job.extends":
        return 'belongs in a file: [job] extends = ["base.toml"]'
    if file is None and name == "job.dialect":
        return 'tells how a file is written, so it belongs in the file: [job] dialect = "2026"'
    return ""


def _clash(canonical: str, first: _Value, second: _Value) -> Problem:
    both = " and ".join(f"{v.source.written} = {quote(v.raw)} ({v.source.place})" for v in (first, second))
    message = f"two names of one thing, {canonical}, differ: {both}"
    return Problem(second.source.place, second.source.written, message, about=(canonical,))


def _off_hint(name: str) -> str:
    return f"remove it, or leave it at {' or '.join(quote(off) for off in FOREIGN[name].off)}"


def _table_field(name: str, table: str) -> str:
    """The entry's own name, unquoted."""
    written = name[len(table) + 1 :]
    return next(iter(loads(f"{written} = 0"))) if written.startswith('"') else written
