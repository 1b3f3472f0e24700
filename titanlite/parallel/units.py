"""Units of sharding: which modules `fully_shard` gathers and frees together, for any model.

    shard(model, units_by_class(model, ["DecoderLayer"]), mesh, plan)

A unit is a tuple of module names. Parameters in none of them belong to the root, which is gathered first and freed
last. Units are listed in the order they last run, and one inside another before it. The order in which a model
registers its modules is taken for the order in which it runs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from titanlite.config.plans import ShardPlan

Unit = tuple[str, ...]

#: They use the weights of modules inside them without calling those, so hooks on these would never run.
_WHOLE = (nn.MultiheadAttention,)


class UnitError(ValueError):
    """A choice of units that fits no module of the model; the message says what there is."""


def choose_units(model: nn.Module, plan: ShardPlan, blocks: Sequence[Unit]) -> list[Unit]:
    """The units that the plan asks for. Call it before modules are wrapped: it goes by classes.

    blocks: what `plan.units = "block"` means for this model. Raises UnitError.
    """
    if isinstance(plan.units, tuple):
        return units_by_class(model, plan.units)
    if plan.units == "size":
        return units_by_size(model, plan.min_params)
    return list(blocks) if plan.units == "block" else []


def units_by_class(model: nn.Module, names: Iterable[str]) -> list[Unit]:
    """Every module whose class has one of these names, each a unit; modules that share a parameter are one unit.

    Raises UnitError, listing the classes there are, for a name that matches nothing which could be a unit.
    """
    found = {path: type(module).__name__ for path, module in _post_order(model) if _can_be_unit(path, module)}
    wanted = tuple(names)
    missing = [name for name in wanted if name not in found.values()]
    if missing or not wanted:
        count = Counter(found.values())
        there = ", ".join(f"{name} ({number})" for name, number in sorted(count.items())) or "none"
        what = " or ".join(missing) if missing else "module of no class at all"
        raise UnitError(f"no unit can be made of {what}; classes of {type(model).__name__} with parameters: {there}")
    return _together(model, [(path,) for path, name in found.items() if name in wanted])


def units_by_size(model: nn.Module, min_params: int) -> list[Unit]:
    """Units of at least `min_params` parameters each, built from the smallest modules up.

    A module that holds so many is a unit; smaller ones are put together with the next small ones until they do. A
    module with one unit inside and a smaller rest is a unit as a whole. What is left at the end belongs to the root.
    Modules that share a parameter are one unit, and the parameter counts once.

    Raises UnitError if that makes no unit.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    units = _together(model, _Grouping(model, min_params).units)
    if not units:
        raise UnitError(f"no unit has {min_params:,} parameters or more: {type(model).__name__} has {total:,} in all")
    return units


class _Piece(NamedTuple):
    """A module and the number of parameters in it that no unit holds yet."""

    path: str
    size: int


class _Grouping:
    """One walk through a model for `units_by_size`."""

    def __init__(self, model: nn.Module, least: int) -> None:
        self.least = least
        self.units: list[Unit] = []
        self._counted: set[int] = set()
        self._visit("", model)

    def _visit(self, path: str, module: nn.Module) -> tuple[list[_Piece], int]:
        """What of a module is in no unit afterwards: modules inside it, or it as a whole, and parameters of its own."""
        first = len(self.units)
        own = self._count(module.parameters() if isinstance(module, _WHOLE) else module.parameters(recurse=False))
        pieces: list[_Piece] = []
        for name, child in module.named_children() if not isinstance(module, _WHOLE) else ():
            inside, loose = self._visit(_join(path, name), child)
            pieces += inside
            own += loose
        left = self._group(pieces)
        rest = own + sum(piece.size for piece in left)
        if not path or not _runs(module):
            return left, own
        made = len(self.units) - first
        if made == 1 and rest < self.least:
            self.units[first:] = [(path,)]
            return [], 0
        if rest and (own or not made):
            return [_Piece(path, rest)], 0
        return left, 0

    def _count(self, parameters: Iterable[nn.Parameter]) -> int:
        new = {id(p): p.numel() for p in parameters if id(p) not in self._counted}
        self._counted |= new.keys()
        return sum(new.values())

    def _group(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        """Make units; returns the pieces that stayed too small."""
        left: list[_Piece] = []
        run: list[_Piece] = []
        joinable = False  # whether the last unit ends right before the run and is a group itself
        for piece in pieces:
            if piece.size >= self.least:
                left, run, joinable = left + run, [], False
                self.units.append((piece.path,))
                continue
            run.append(piece)
            if sum(p.size for p in run) >= self.least:
                self.units.append(tuple(p.path for p in run))
                run, joinable = [], True
        if joinable and run:
            self.units[-1] += tuple(p.path for p in run)
            run = []
        return left + run


def _runs(module: nn.Module) -> bool:
    """Whether a module is called at all: a list of modules is not, and hooks on it would never run."""
    return type(module).forward is not nn.Module.forward


def _can_be_unit(path: str, module: nn.Module) -> bool:
    return path != "" and _runs(module) and next(module.parameters(), None) is not None


def _post_order(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module, every module once and after those inside it: the order in which modules end."""
    seen: set[nn.Module] = set()

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        for name, child in module.named_children():
            yield from walk(_join(path, name), child)
        yield path, module

    return walk("", model)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _inside(path: str, other: str) -> bool:
    """Whether `path` names the module `other` or one inside it."""
    return path == other or path.startswith(f"{other}.")


def _together(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """The units, with those merged that share a parameter, in the order they last run.

    A parameter can belong to one unit only. A unit around a merged one is merged too, so that units stay nested; and if
    the root shares a parameter of its own, what it shares it with stays in the root.
    """
    units = list(units)
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(path)
    shared = [paths for paths in owners.values() if len(paths) > 1]
    while (merged := _merge_once(model, units, shared)) is not None:
        units = merged
    last = {path: index for index, (path, _) in enumerate(_post_order(model))}
    return sorted(units, key=lambda unit: max(last.get(path, 0) for path in unit))


def _merge_once(model: nn.Module, units: Sequence[Unit], shared: Sequence[Sequence[str]]) -> list[Unit] | None:
    """One merge of units that share a parameter; None when there is nothing to merge."""
    unit_of = {model.get_submodule(path): index for index, unit in enumerate(units) for path in unit}
    for paths in shared:
        homes = {path: _home(model, path, unit_of) for path in paths}
        if len(set(homes.values())) == 1:
            continue
        taken = {home for home in homes.values() if home is not None}
        callers = [_caller(model, path) for path, home in homes.items() if home is None]
        members = {path for home in taken for path in units[home]} | set(callers)
        # Units around what is merged, which would otherwise hold a part of a unit.
        around = {i for i, unit in enumerate(units) for m in members if any(_inside(m, path) for path in unit)}
        taken |= around
        members |= {path for home in around for path in units[home]}
        kept = [unit for index, unit in enumerate(units) if index not in taken]
        if "" in members:
            return kept
        outermost = [path for path in members if not any(path != other and _inside(path, other) for other in members)]
        order = {path: index for index, (path, _) in enumerate(model.named_modules())}
        return [*kept, tuple(sorted(outermost, key=lambda path: order.get(path, 0)))]
    return None


def _home(model: nn.Module, path: str, unit_of: Mapping[nn.Module, int]) -> int | None:
    """Index of the innermost unit that holds the module at `path`; None: the root. A module may have several paths."""
    while path:
        module = model.get_submodule(path)
        if module in unit_of:
            return unit_of[module]
        path = path.rpartition(".")[0]
    return None


def _caller(model: nn.Module, path: str) -> str:
    """The innermost module around `path`, or it, that is called; "" for the root."""
    while path and not _runs(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    return path
