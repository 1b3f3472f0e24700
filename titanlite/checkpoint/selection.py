"""Which tensors of a checkpoint are loaded into a model, and what does not fit, as a table. No torch here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from titanlite.checkpoint.manifest import CheckpointError
from titanlite.utils import Table, render

#: Parts of a checkpoint by name: weights, the optimizer's state, the step that the schedule began at, the place in the
#: text, torch's random generators.
GROUPS = ("model", "optimizer", "lr_scheduler", "dataloader", "rng")
#: Tensor name -> [dtype, shape].
Tensors = Mapping[str, Sequence[Any]]

MISSING, UNEXPECTED, SHAPE, DTYPE = "missing", "unexpected", "another shape", "another dtype"
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_MODEL, _STATE = "model.", "optimizer.state."
#: Rows of the table: a screen, with what is said around it.
_ROWS = 20


@dataclass(frozen=True)
class Difference:
    """A tensor that a checkpoint and a model do not have alike; `there` and `here` are [dtype, shape] or None."""

    name: str
    there: Sequence[Any] | None
    here: Sequence[Any] | None
    problem: str


@dataclass(frozen=True)
class Selection:
    """What becomes of the tensors of a model."""

    #: Are read from the checkpoint.
    load: frozenset[str]
    #: Keep the values that they were built with, because the checkpoint lacks them or they are left out.
    keep: frozenset[str]
    #: Are read from another floating-point type.
    converted: frozenset[str]


def groups_of(entries: Collection[str]) -> frozenset[str]:
    """Those entries of `exclude_from_loading` that are names of whole parts."""
    return frozenset(entry for entry in entries if entry in GROUPS)


def select(
    saved: Tensors,
    wanted: Tensors,
    exclude: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    convert: bool = False,
    source: str = "the checkpoint",
) -> Selection:
    """Which tensors to load.

    saved, wanted: those of the checkpoint and of the model. exclude: names of `GROUPS` and patterns of tensor names:
    these are not loaded. allow_missing: patterns of tensors that the checkpoint may lack. The optimizer's state of a
    weight that is not loaded is not loaded either. convert: floating-point types may differ.

    Raises CheckpointError with a table of what differs, for a pattern that matches no tensor, and when nothing is left.
    """
    prefixes = tuple(f"{group}." for group in groups_of(exclude))
    patterns = [entry for entry in exclude if entry not in GROUPS]
    _must_match("checkpoint.exclude_from_loading", patterns, {*saved, *wanted}, GROUPS)
    _must_match("checkpoint.allow_missing", allow_missing, wanted)

    def left_out(name: str) -> bool:
        return name.startswith(prefixes) or any(fnmatchcase(name, pattern) for pattern in patterns)

    keep = {name for name in wanted if left_out(name)}
    keep |= {name for name in wanted if name not in saved and any(fnmatchcase(name, p) for p in allow_missing)}
    ignored = {name for name in saved if left_out(name)}
    fresh = tuple(f"{_STATE}{name.removeprefix(_MODEL)}." for name in keep | ignored if name.startswith(_MODEL))
    keep |= {name for name in wanted if name.startswith(fresh)}
    ignored |= {name for name in saved if name.startswith(fresh)}

    found = list(_differences(saved, wanted, keep, ignored))
    converted = {d.name for d in found if convert and d.problem == DTYPE and _both_floats(d)}
    found = [difference for difference in found if difference.name not in converted]
    if found:
        raise CheckpointError(misfit(found, source, {*saved, *wanted}))
    load = frozenset(wanted) - keep
    if not load:
        raise CheckpointError(f"checkpoint.exclude_from_loading leaves nothing of {source} to load")
    return Selection(load, frozenset(keep), frozenset(converted))


def _must_match(key: str, patterns: Sequence[str], names: Collection[str], words: Sequence[str] = ()) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = f" It takes {', '.join(words)}, and patterns of tensor names" if words else " It takes patterns"
            example = next(iter(sorted(names, key=_natural)), "")
            raise CheckpointError(f"{key}: {pattern!r} matches no tensor.{known} such as {example!r} or 'model.*'")


def _differences(saved: Tensors, wanted: Tensors, keep: set[str], ignored: set[str]) -> Iterator[Difference]:
    for name in sorted({*saved, *wanted}, key=_natural):
        if name in keep or name in ignored:
            continue
        there, here = saved.get(name), wanted.get(name)
        if there is None:
            yield Difference(name, None, here, MISSING)
        elif here is None:
            yield Difference(name, there, None, UNEXPECTED)
        elif list(there[1]) != list(here[1]):
            yield Difference(name, there, here, SHAPE)
        elif there[0] != here[0]:
            yield Difference(name, there, here, DTYPE)


def _natural(name: str) -> list[tuple[int, str]]:
    """Order of names in which layers.2 comes before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _both_floats(difference: Difference) -> bool:
    there, here = difference.there, difference.here
    return there is not None and here is not None and there[0] in _FLOATS and here[0] in _FLOATS


def misfit(found: Sequence[Difference], source: str, names: Collection[str] = ()) -> str:
    """What does not fit, at most a screen of it, and which keys accept it. names: of all tensors, these among them."""
    counts = Counter(difference.problem for difference in found)
    said = ", ".join(f"{counts[kind]} {kind}" for kind in (MISSING, UNEXPECTED, SHAPE, DTYPE) if counts[kind])
    rows = [[d.name, _shown(d.there), _shown(d.here), d.problem] for d in found[:_ROWS]]
    table = render(Table(("tensor", "there", "here", "problem"), rows, left=(0, 1, 2, 3)), terminal=False)
    lines = [f"{source} does not fit this model: {said}", *(f"  {line}" for line in table.splitlines())]
    if len(found) > _ROWS:
        lines.append(f"  … and {len(found) - _ROWS} more")
    ways = []
    # A weight's word covers the optimizer's state of it.
    weights = [d for d in found if d.name.startswith(_MODEL)] or list(found)
    missing = [d.name for d in weights if d.problem == MISSING]
    rest = [d.name for d in weights if d.problem != MISSING]
    if missing and all(name.startswith("optimizer.") for name in missing):
        ways.append('checkpoint.exclude_from_loading = ["optimizer"] begins with a new state of the optimizer')
    elif missing:
        patterns = _patterns(missing, {*names} - {*missing})
        ways.append(f"checkpoint.allow_missing = {patterns} keeps the initial values of what is missing")
    if rest:
        patterns = _patterns(rest, {*names} - {*rest})
        ways.append(f"checkpoint.exclude_from_loading = {patterns} leaves out what {'else ' * bool(missing)}differs")
    return "\n".join([*lines, "If that is meant: " + "; ".join(ways)])


def _shown(entry: Sequence[Any] | None) -> str:
    return "–" if entry is None else f"{entry[0]}{list(entry[1])}"


def _patterns(names: Sequence[str], others: Collection[str], most: int = 4) -> str:
    """A few patterns for these names that match none of the others: whole blocks, or one tensor of all blocks."""
    found: dict[str, None] = {}
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in found):
            continue
        block = re.sub(r"(\.layers\.\d+)\..*", r"\1.*", name)
        across = re.sub(r"\.layers\.\d+\.", ".layers.*.", name)
        fitting = (p for p in (block, across) if not any(fnmatchcase(other, p) for other in others))
        found[next(fitting, name)] = None
    shown = [f'"{pattern}"' for pattern in list(found)[:most]] + ["…"] * (len(found) > most)
    return f"[{', '.join(shown)}]"
