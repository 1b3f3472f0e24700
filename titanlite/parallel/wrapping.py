"""Wrapping policies: which modules `fully_shard` gathers and frees together, for any model.

    apply_fsdp(model, groups_by_class(model, ["DecoderLayer"]), mesh)

An FSDP group is a tuple of module names. Parameters in no group belong to the root, which is gathered first and freed
last. Groups are listed in the order they last run, and a nested group before the one around it. The order in which a
model registers its modules is taken for the order in which it runs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from titanlite.parallel import ParallelismError

FSDPGroup = tuple[str, ...]

#: They use the weights of inner modules without calling those, so hooks on these would never run.
_INDIVISIBLE = (nn.MultiheadAttention,)


def choose_groups(
    model: nn.Module, policy: str | Sequence[str], min_params: int, blocks: Sequence[FSDPGroup]
) -> list[FSDPGroup]:
    """Return the FSDP groups of a policy. Call it before modules are wrapped: it goes by classes.

    policy: "block" (`blocks`, the groups that the model itself proposes), "root" (the whole model), "size" (at least
    `min_params` parameters each), or names of classes. Raises ParallelismError.
    """
    if not isinstance(policy, str):
        return groups_by_class(model, policy)
    if policy == "size":
        return groups_by_size(model, min_params)
    return list(blocks) if policy == "block" else []


def groups_by_class(model: nn.Module, names: Iterable[str]) -> list[FSDPGroup]:
    """Make a group of every module whose class has one of these names; modules that share a parameter are one group.

    Raises ParallelismError, with a list of the classes, for a name that matches no module that can be a group.
    """
    found = {path: type(module).__name__ for path, module in _post_order(model) if _can_be_group(path, module)}
    wanted = tuple(names)
    missing = [name for name in wanted if name not in found.values()]
    if missing or not wanted:
        count = Counter(found.values())
        there = ", ".join(f"{name} ({number})" for name, number in sorted(count.items())) or "none"
        what = " or ".join(missing) if missing else "an empty list of classes"
        raise ParallelismError(
            f"no FSDP group can be made of {what}; classes of {type(model).__name__} with parameters: {there}"
        )
    return _merge_shared(model, [(path,) for path, name in found.items() if name in wanted])


def groups_by_size(model: nn.Module, min_params: int) -> list[FSDPGroup]:
    """Make groups of at least `min_params` parameters each, from the smallest modules up.

    A module that holds so many is a group; smaller ones join the next small ones until they do. A module with one
    group inside and a smaller rest is a group as a whole. A remainder at the end belongs to the root. Modules that
    share a parameter are one group, and the parameter counts once.

    Raises ParallelismError if that makes no group.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    groups = _merge_shared(model, _SizeGrouping(model, min_params).groups)
    if not groups:
        name = type(model).__name__
        raise ParallelismError(f"no FSDP group has {min_params:,} parameters or more: {name} has {total:,} in all")
    return groups


class _Loose(NamedTuple):
    """A module and the number of its parameters that are in no group yet."""

    path: str
    size: int


class _SizeGrouping:
    """One walk through a model for `groups_by_size`."""

    def __init__(self, model: nn.Module, min_params: int) -> None:
        self.min_params = min_params
        self.groups: list[FSDPGroup] = []
        self._counted: set[int] = set()
        self._visit("", model)

    def _visit(self, path: str, module: nn.Module) -> tuple[list[_Loose], int]:
        """Group a module's content. Return the rest: modules inside it, or it as a whole, and its own parameters."""
        first = len(self.groups)
        indivisible = isinstance(module, _INDIVISIBLE)
        own = self._count(module.parameters(recurse=indivisible))
        children: list[_Loose] = []
        for name, child in () if indivisible else module.named_children():
            inside, loose = self._visit(_join(path, name), child)
            children += inside
            own += loose
        left = self._group(children)
        rest = own + sum(child.size for child in left)
        if not path or not _is_called(module):
            return left, own
        made = len(self.groups) - first
        if made == 1 and rest < self.min_params:
            self.groups[first:] = [(path,)]
            return [], 0
        if rest and (own or not made):
            return [_Loose(path, rest)], 0
        return left, 0

    def _count(self, parameters: Iterable[nn.Parameter]) -> int:
        new = {id(p): p.numel() for p in parameters if id(p) not in self._counted}
        self._counted |= new.keys()
        return sum(new.values())

    def _group(self, modules: Sequence[_Loose]) -> list[_Loose]:
        """Make groups of neighbours. Return the modules that stayed too small."""
        left: list[_Loose] = []
        run: list[_Loose] = []
        joinable = False  # whether the last group ends right before the run and was itself made of a run
        for module in modules:
            if module.size >= self.min_params:
                left, run, joinable = left + run, [], False
                self.groups.append((module.path,))
                continue
            run.append(module)
            if sum(m.size for m in run) >= self.min_params:
                self.groups.append(tuple(m.path for m in run))
                run, joinable = [], True
        if joinable and run:
            self.groups[-1] += tuple(m.path for m in run)
            run = []
        return left + run


def _is_called(module: nn.Module) -> bool:
    """Return False for a list or dictionary of modules, on which hooks would never run."""
    return type(module).forward is not nn.Module.forward


def _can_be_group(path: str, module: nn.Module) -> bool:
    return path != "" and _is_called(module) and next(module.parameters(), None) is not None


def _post_order(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module, every module once and after its children: the order in which modules end."""
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


def _is_inside(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")


def _merge_shared(model: nn.Module, groups: Sequence[FSDPGroup]) -> list[FSDPGroup]:
    """Merge groups that share a parameter, and return all in the order they last run.

    A parameter can belong to one group only. A group around a merged one is merged too, so that groups stay nested. If
    the root shares a parameter of its own, the modules that use it stay in the root.
    """
    groups = list(groups)
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(path)
    shared = [paths for paths in owners.values() if len(paths) > 1]
    while (merged := _merge_once(model, groups, shared)) is not None:
        groups = merged
    last = {path: index for index, (path, _) in enumerate(_post_order(model))}
    return sorted(groups, key=lambda group: max(last.get(path, 0) for path in group))


def _merge_once(
    model: nn.Module, groups: Sequence[FSDPGroup], shared: Sequence[Sequence[str]]
) -> list[FSDPGroup] | None:
    """Merge groups of one shared parameter; None when there is nothing to merge."""
    group_of = {model.get_submodule(path): index for index, group in enumerate(groups) for path in group}
    for paths in shared:
        homes = {path: _home(model, path, group_of) for path in paths}
        if len(set(homes.values())) == 1:
            continue
        taken = {home for home in homes.values() if home is not None}
        callers = [_caller(model, path) for path, home in homes.items() if home is None]
        members = {path for home in taken for path in groups[home]} | set(callers)
        # Groups around the merged ones, which would otherwise hold a part of a group.
        around = {i for i, group in enumerate(groups) for m in members if any(_is_inside(m, path) for path in group)}
        taken |= around
        members |= {path for home in around for path in groups[home]}
        kept = [group for index, group in enumerate(groups) if index not in taken]
        if "" in members:
            return kept
        outer = [path for path in members if not any(path != other and _is_inside(path, other) for other in members)]
        order = {path: index for index, (path, _) in enumerate(model.named_modules())}
        return [*kept, tuple(sorted(outer, key=lambda path: order.get(path, 0)))]
    return None


def _home(model: nn.Module, path: str, group_of: Mapping[nn.Module, int]) -> int | None:
    """Return the index of the innermost group around `path`; None: the root. A module may have several paths."""
    while path:
        module = model.get_submodule(path)
        if module in group_of:
            return group_of[module]
        path = path.rpartition(".")[0]
    return None


def _caller(model: nn.Module, path: str) -> str:
    """Return `path` or the innermost module around it that is called; "" for the root."""
    while path and not _is_called(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    return path
