"""Wrapping policies: which modules `fully_shard` gathers and frees together, for any model.

    apply_fsdp(model, groups_by_class(model, ["DecoderLayer"]), mesh)

An FSDP group is a tuple of module names. Parameters in no group belong to the root, which is
gathered first and freed last. Groups are listed in the order they last run, and a nested group
before the one around it. The order in which a model registers its modules is taken for the order in
which it runs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from titanlite.dist import ParallelismError

FSDPGroup = tuple[str, ...]

#: They use the weights of inner modules without calling those, so hooks on these would never run.
_INDIVISIBLE = (nn.MultiheadAttention,)


def choose_groups(
    model: nn.Module, policy: str | Sequence[str], min_params: int, blocks: Sequence[FSDPGroup]
) -> list[FSDPGroup]:
    """Return the FSDP groups of a policy. Call it before modules are wrapped: it goes by classes.

    policy: "block" (`blocks`, the groups that the model itself proposes), "root" (the whole model),
    "size" (at least `min_params` parameters each), or names of classes. Raises ParallelismError.
    """
    if not isinstance(policy, str):
        return groups_by_class(model, policy)
    if policy == "size":
        return groups_by_size(model, min_params)
    return list(blocks) if policy == "block" else []


def groups_by_class(model: nn.Module, names: Iterable[str]) -> list[FSDPGroup]:
    """Make a group of every module whose class has one of these names.

    Modules that share a parameter stay in the root.

    Raises ParallelismError, with a list of the classes, for a name that matches no module that can
    be a group.
    """
    found = {
        path: type(module).__name__
        for path, module in _post_order(model)
        if _can_be_group(path, module)
    }
    wanted = tuple(names)
    missing = [name for name in wanted if name not in found.values()]
    if missing or not wanted:
        count = Counter(found.values())
        there = ", ".join(f"{name} ({number})" for name, number in sorted(count.items())) or "none"
        what = " or ".join(missing) if missing else "an empty list of classes"
        raise ParallelismError(
            f"no FSDP group can be made of {what}; classes of {type(model).__name__} with "
            f"parameters: {there}"
        )
    return _in_order(model, [(path,) for path, name in found.items() if name in wanted])


def groups_by_size(model: nn.Module, min_params: int) -> list[FSDPGroup]:
    """Make groups of at least `min_params` parameters each.

    A module is divided where two modules inside it hold that many each. Neighbours that hold fewer
    join until they do. A remainder joins the neighbours before it. Parameters of divided modules,
    and modules that share a parameter with others, belong to the root. Raises ParallelismError if
    that makes no group.
    """
    groups: list[FSDPGroup] = []
    run: list[str] = []
    size, counted = 0, set[nn.Parameter]()
    for path, module in _pieces("", model, min_params):
        new = set(module.parameters()) - counted
        counted |= new
        more = sum(parameter.numel() for parameter in new)
        if more >= min_params:
            groups.append((path,))
            run, size = [], 0
        elif more:
            run, size = [*run, path], size + more
            if size >= min_params:
                groups.append(tuple(run))
                run, size = [], 0
    if groups and len(groups[-1]) > 1:
        groups[-1] += tuple(run)
    if not groups:
        name, total = type(model).__name__, _count(model)
        raise ParallelismError(
            f"no FSDP group has {min_params:,} parameters or more: {name} has {total:,} in all"
        )
    return _in_order(model, groups)


def _pieces(path: str, module: nn.Module, min_params: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that are gathered as a whole, in order, with their paths."""
    children = [] if isinstance(module, _INDIVISIBLE) else list(_called_children(path, module))
    large = {name for name, child in children if _count(child) >= min_params}
    if path and len(large) < 2:
        yield path, module
        return
    for name, child in children:
        if name in large:
            yield from _pieces(name, child, min_params)
        else:
            yield name, child


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _called_children(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules inside, those of lists and dictionaries too, instead of the list or
    dictionary.
    """
    for name, child in module.named_children():
        if _is_called(child):
            yield _join(path, name), child
        else:
            yield from _called_children(_join(path, name), child)


def _is_called(module: nn.Module) -> bool:
    """Return False for a list or dictionary of modules, on which hooks would never run."""
    return type(module).forward is not nn.Module.forward


def _can_be_group(path: str, module: nn.Module) -> bool:
    return path != "" and _is_called(module) and next(module.parameters(), None) is not None


def _post_order(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module, every module once and after its children: the order in which modules
    end.
    """
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


def _in_order(model: nn.Module, groups: Sequence[FSDPGroup]) -> list[FSDPGroup]:
    """Return the groups in the order they last run, without those that share a parameter with
    modules outside.

    A parameter can belong to one group only. So the modules that share it stay in the group around
    all of them or in the root.
    """
    owners: dict[nn.Parameter, list[str]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(path)

    def around(path: str) -> set[FSDPGroup]:
        names = path.split(".")
        outer = {modules[".".join(names[: n + 1])] for n in range(len(names))}
        return {group for group in groups if any(modules[name] in outer for name in group)}

    split: set[FSDPGroup] = set()
    for first, *others in owners.values():
        for path in others:
            split |= around(path) ^ around(first)
    last = {path: index for index, (path, _) in enumerate(_post_order(model))}
    kept = [group for group in groups if group not in split]
    return sorted(kept, key=lambda group: max(last.get(path, 0) for path in group))
