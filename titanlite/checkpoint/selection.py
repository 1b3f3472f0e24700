"""Which tensors of a checkpoint a model takes, and how a mismatch is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.loaded import GROUPS, WEIGHT
from titanlite.runs.text_tables import Table, render

#: Kinds of differences.
MISSING = "missing"
UNEXPECTED = "unexpected"
SHAPE = "another shape"
DTYPE = "another dtype"
_FLOATS = {"float64", "float32", "bfloat16", "float16"}
#: Rows of the table of differences: one screen, with the text around it.
_ROWS = 20
_WAYS = (
    "\nIf that is meant: checkpoint.allow_missing takes patterns of tensors that are missing "
    "there, such as model.layers.3.*, which keep their initial values; "
    "checkpoint.exclude_from_loading takes patterns, or groups such as optimizer, that are not "
    "loaded. Another run that has this checkpoint as checkpoint.initial_load_path takes weights of "
    "another dtype"
)
#: Tensor name -> [dtype, shape].
Described = Mapping[str, Sequence[Any]]


class Selection(NamedTuple):
    """The tensors of a model, by the source of their values."""

    #: Read from the checkpoint.
    load: frozenset[str]
    #: Keep their initial values, because the checkpoint lacks them or they are excluded.
    keep: frozenset[str]
    #: Read from another floating-point type.
    converted: frozenset[str]


def select(
    saved: Described,
    wanted: Described,
    exclude: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    convert: bool = False,
    source: str = "the checkpoint",
) -> Selection:
    """Return which tensors to load.

    exclude: names of `GROUPS` and patterns of tensors that are not loaded, nor is their optimizer's
    state. allow_missing: patterns of tensors that the checkpoint may lack. convert: floating-point
    types may differ.

    Raises CheckpointError with a table of differences, for a pattern that matches no tensor, and
    when nothing is left.
    """
    patterns = [entry for entry in exclude if entry not in GROUPS]
    _must_match("checkpoint.exclude_from_loading", patterns, {*saved, *wanted}, GROUPS)
    _must_match("checkpoint.allow_missing", allow_missing, wanted)
    ignored = _ignored(saved, wanted, exclude, allow_missing)

    found: dict[str, str] = {}
    floats = set()
    for name in {*saved, *wanted} - ignored:
        problem = compare_entries(saved.get(name), wanted.get(name))
        if problem == DTYPE and {saved[name][0], wanted[name][0]} <= _FLOATS:
            floats.add(name)
        if problem and not (convert and name in floats):
            found[name] = problem
    if found:
        raise CheckpointError(difference_table(found, saved, wanted, source) + _WAYS)

    load = frozenset(wanted) - ignored
    if not load:
        raise CheckpointError(f"checkpoint.exclude_from_loading leaves nothing of {source} to load")
    return Selection(load, frozenset(wanted) & ignored, frozenset(floats))


def _ignored(
    saved: Described, wanted: Described, exclude: Sequence[str], allow_missing: Sequence[str]
) -> set[str]:
    prefixes = tuple(f"{group}." for group in exclude if group in GROUPS)
    patterns = [entry for entry in exclude if entry not in GROUPS]
    ignored = set()
    for name in {*saved, *wanted}:
        may_be_missing = name not in saved and _matches(name, allow_missing)
        if name.startswith(prefixes) or _matches(name, patterns) or may_be_missing:
            ignored.add(name)
    # State of a weight that is not loaded is not loaded either.
    weights = {name.removeprefix(WEIGHT) for name in ignored if name.startswith(WEIGHT)}
    states = tuple(f"optimizer.state.{name}." for name in weights)
    for name in {*saved, *wanted}:
        # The average of a weight has its name, in another group.
        _, _, name_in_group = name.partition(".")
        if name.startswith(states) or name_in_group in weights:
            ignored.add(name)
    return ignored


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _must_match(
    key: str, patterns: Sequence[str], names: Collection[str], words: Sequence[str] = ()
) -> None:
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        known = f"{', '.join(words)}, and patterns of tensor names" if words else "patterns"
        example = min(names, default="")
        raise CheckpointError(
            f"{key}: {pattern!r} matches no tensor. It takes {known} such as {example!r} or "
            "'model.*'"
        )


def compare_entries(saved: Sequence[Any] | None, wanted: Sequence[Any] | None) -> str:
    """Return how [dtype, shape] of a tensor differ; "": they are equal."""
    if saved is None:
        return MISSING
    if wanted is None:
        return UNEXPECTED
    if list(saved[1]) != list(wanted[1]):
        return SHAPE
    return DTYPE if saved[0] != wanted[0] else ""


def difference_table(
    found: Mapping[str, str], saved: Described, wanted: Described, source: str
) -> str:
    """Return a table of differences (name → problem), at most a screen."""
    counts = Counter(found.values())
    kinds = [kind for kind in (MISSING, UNEXPECTED, SHAPE, DTYPE) if counts[kind]]
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in kinds)
    rows = []
    for name in sorted(found)[:_ROWS]:
        rows.append([name, form_of(saved.get(name)), form_of(wanted.get(name)), found[name]])
    columns = ("tensor", "there", "here", "problem")
    table = render(Table(columns, rows, left=(0, 1, 2, 3)), terminal=False)
    lines = [f"{source} does not fit this model: {summary}"]
    lines += [f"  {line}" for line in table.splitlines()]
    if len(found) > _ROWS:
        lines.append(f"  … and {len(found) - _ROWS} more")
    return "\n".join(lines)


def form_of(entry: Sequence[Any] | None) -> str:
    """Return type and shape of a tensor."""
    if entry is None:
        return "–"
    # A tensor of a foreign file has its place.
    place = f" ({entry[2]})" if len(entry) > 2 else ""
    return f"{entry[0]}{list(entry[1])}{place}"
