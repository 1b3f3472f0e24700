"""`titanlite config diff`: what differs in effect between two configs, each a file or the folder of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanlite.config.checks import contradictions
from titanlite.config.derive import RunConfig
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.explain import Style
from titanlite.config.job import JobConfig
from titanlite.config.load import load_file, read_text
from titanlite.config.schema import keys, quote, quote_key
from titanlite.config.unbuilt import implied_unbuilt

RUN_CONFIG = "config.toml"
_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d+)")
#: What only says where a config was written.
_NOT_COMPARED = ("job.config_file", "job.extends", "job.dialect")
_ABSENT = "(not set)"


@dataclass(frozen=True)
class Side:
    """One of the two configs."""

    #: As the user named it.
    name: str
    config: JobConfig
    #: Lines of a config that a run recorded, whose comments say where each value came from; else empty.
    recorded: tuple[str, ...] = ()

    def source(self, key: str) -> str:
        """Where the value of a key (or of a table's entry) was written."""
        source = self.config.source(key)
        text = str(source)
        if source.written not in ("", key):
            text += f", as {source.written}"
        if self.recorded and source.line is not None:
            _, mark, origin = self.recorded[source.line - 1].rpartition("  # ")
            text += f" ({origin})" if mark else ""
        return text


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same on both sides, each as (value, source)."""

    key: str
    left: tuple[str, str]
    right: tuple[str, str]


def side(name: str) -> Side:
    """The config that a name means: a TOML file, a run's folder, a checkpoint's folder. Raises ConfigError."""
    path = Path(name)
    if not path.is_dir():
        return Side(name, load_file(name))
    file = path / RUN_CONFIG
    if file.is_file():
        return Side(name, load_file(file), tuple(file.read_text(encoding="utf-8").splitlines()))
    for manifest in _manifests(path):
        text = _recorded(manifest)
        if text is not None:
            config, problems = read_text(text, manifest)
            problems += contradictions(config)
            if problems:
                raise ConfigError(problems)
            return Side(name, config, tuple(text.splitlines()))
    hint = f"give a TOML file, or a folder with {RUN_CONFIG} or a checkpoint (step-N/{_MANIFEST})"
    raise ConfigError([Problem("command line", "", f"no config in {quote(name)}", hint)])


def _manifests(folder: Path) -> list[Path]:
    """Manifests of the checkpoints in a checkpoint's own folder, a folder of them, or a run's; the newest first."""
    if (folder / _MANIFEST).is_file():
        return [folder / _MANIFEST]
    found = [*folder.glob(f"step-*/{_MANIFEST}"), *folder.glob(f"*/step-*/{_MANIFEST}")]
    steps = {path: int(match[1]) for path in found if (match := _STEP.fullmatch(path.parent.name))}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def _recorded(manifest: Path) -> str | None:
    """The config that a checkpoint's manifest holds; None when it cannot be read or holds none."""
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    config = content.get("config") if isinstance(content, dict) else None
    text = config.get("toml") if isinstance(config, dict) else None
    return text if isinstance(text, str) and text else None


def differences(left: Side, right: Side) -> list[Difference]:
    """Keys whose values differ in effect, in the dialect's order; entries of tables one by one."""
    found = []
    ours, theirs = dict(_values(left.config)), dict(_values(right.config))
    for key in dict.fromkeys([*ours, *theirs]):
        if key not in ours or key not in theirs or ours[key] != theirs[key]:
            found.append(Difference(key, _shown(left, ours, key), _shown(right, theirs, key)))
    order = list(keys())
    return sorted(found, key=lambda difference: order.index(".".join(difference.key.split(".")[:2])))


def _values(config: JobConfig) -> Iterator[tuple[str, Any]]:
    """What has an effect: an implied default that waits for its feature counts as the plain one."""
    waiting = implied_unbuilt(config)
    for key in keys().values():
        value = config.value(key.name)
        if key.is_table:
            yield from ((f"{key.name}.{quote_key(name)}", entry) for name, entry in value.items())
        elif key.name not in _NOT_COMPARED:
            effective = key.default if key.name in waiting else value
            yield key.name, None if config.superseded(key.name) else effective


def _shown(side: Side, values: Mapping[str, Any], key: str) -> tuple[str, str]:
    if key not in values:
        return _ABSENT, ""
    if key in keys() and keys()[key].default is not None and side.config.superseded(key):
        return _ABSENT, "said in another way"
    return quote(side.config.value(key) if key in keys() else values[key]), side.source(key)


def derived_differences(left: RunConfig, right: RunConfig) -> list[Difference]:
    """Return the derived numbers that differ."""
    ours, theirs = dict(_derived(left)), dict(_derived(right))
    return [
        Difference(f"derived.{name}", (quote(value), ""), (quote(theirs[name]), ""))
        for name, value in ours.items()
        if theirs[name] != value
    ]


def _derived(run: RunConfig) -> Iterator[tuple[str, Any]]:
    yield "steps", run.steps
    for group in ("mesh", "batch", "pipeline", "schedule", "deadlines"):
        yield from ((f"{group}.{name}", value) for name, value in asdict(getattr(run, group)).items())


def report(found: Iterable[Difference], style: Style) -> str:
    """The differences, each key with its value and source on the left (-) and on the right (+)."""
    lines = []
    for difference in found:
        lines.append(style.bold(difference.key))
        for mark, (value, source) in (("-", difference.left), ("+", difference.right)):
            lines.append(f"  {mark} {value}" + (style.dim(f"  {source}") if source else ""))
    return "\n".join(lines)
