"""What a ladder compares: four levels, and overlays of one's own, each a TOML file on top of the same config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.schema import quote
from titanlite.runs.attempts import RunError


class LadderError(RunError):
    """A ladder cannot be begun or continued; the text says why and what to do."""


@dataclass(frozen=True)
class Rung:
    """One of the four levels, and the keys it switches on beside those of the level below."""

    name: str
    about: str
    adds: tuple[str, ...] = ()


RUNGS = (
    Rung("default", "the config with all of these off"),
    Rung("compile", "torch.compile of each block and the loss", ("training.compile",)),
    Rung("float8", "products of linear layers in float8", ("float8.enable_float8_linear",)),
    Rung(
        "float8-all-gather",
        "weights gathered in float8, their scales computed ahead",
        ("float8.enable_fsdp_float8_all_gather", "float8.precompute_float8_dynamic_scale_for_fsdp"),
    ),
)
#: The keys that the levels differ in.
SWITCHES = tuple(key for rung in RUNGS for key in rung.adds)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Level:
    """One line of the table."""

    name: str
    about: str
    #: Its TOML file, which `extends` the level below; named after the level.
    text: str

    @property
    def file(self) -> str:
        return f"{self.name}.toml"


def overlay(words: str) -> tuple[str, Path]:
    """`NAME=FILE.toml` as name and file. Raises LadderError."""
    name, equals, file = words.partition("=")
    if not equals or not file or not _NAME.fullmatch(name):
        raise LadderError(
            f"--overlay {words}: expected NAME=FILE.toml, the name of letters, digits, dots, dashes and underscores"
        )
    if not Path(file).is_file():
        raise LadderError(f"--overlay {words}: there is no file {file}")
    return name, Path(file)


def make_levels(config: Path, overlays: Sequence[tuple[str, Path]]) -> list[Level]:
    """The four levels over a config, then the overlays over the first of them. Raises LadderError for equal names."""
    levels: list[Level] = []
    for rung in RUNGS:
        if levels:
            below, values = levels[-1].file, dict.fromkeys(rung.adds, True)
        else:
            below, values = str(config.resolve()), dict.fromkeys(SWITCHES, False)
        levels.append(Level(rung.name, rung.about, _text(rung.name, [below], values)))
    base = levels[0]
    for name, file in overlays:
        if name in [level.name for level in levels]:
            raise LadderError(f"--overlay {name}={file}: there is a level {name} already; take another name")
        levels.append(Level(name, f"{file} over {base.name}", _text(name, [base.file, str(file.resolve())], {})))
    return levels


def _text(name: str, extends: Sequence[str], values: Mapping[str, bool]) -> str:
    sections: dict[str, list[str]] = {"job": [f"extends = {quote(list(extends))}"]}
    for key, value in values.items():
        section, _, field = key.partition(".")
        sections.setdefault(section, []).append(f"{field} = {quote(value)}")
    body = [f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items()]
    return "\n\n".join([f'# Level "{name}", written by `titanlite ladder`.', *body]) + "\n"


def write_levels(levels: Sequence[Level], folder: Path) -> None:
    """Write the files of all levels, those too that only others build on. Raises LadderError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for level in levels:
            (folder / level.file).write_text(level.text, encoding="utf-8")
    except OSError as error:
        raise LadderError(f"cannot write to {folder}: {error.strerror or error}; name another with --out") from None
