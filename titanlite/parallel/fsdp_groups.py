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


def choose_groups(
    model: nn.Module, policy: str | Sequence[str], blocks: Sequence[FSDPGroup]
) -> list[FSDPGroup]:
    """Return the FSDP groups of a policy: "block" (`blocks`), "root" (the whole model), or names of
    classes.

    Call it before modules are wrapped. Raises ParallelismError.
    """
    if not isinstance(policy, str):
        return groups_by_class(model, policy)
    return list(blocks) if policy == "block" else []


def groups_by_class(model: nn.Module, names: Iterable[str]) -> list[FSDPGroup]:
    """Make a group of every module whose class has one of these names.

    Modules that share a parameter stay in the root.

    Raises ParallelismError, with a list of the classes, for a name that matches no module that can
    be a group.
    """
    found = {}
    for path, module in _post_order(model):
        # Hooks on a list or dictionary of modules would never run.
        is_called = type(module).forward is not nn.Module.forward
        if path and is_called and next(module.parameters(), None) is not None:
            found[path] = type(module).__name__
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


def _post_order(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[nn.Module] = set()

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        for name, child in module.named_children():
            yield from walk(f"{path}.{name}" if path else name, child)
        yield path, module

    return walk("", model)


def _in_order(model: nn.Module, groups: Sequence[FSDPGroup]) -> list[FSDPGroup]:
    """Return the groups in the order they last run.

    Those that share a parameter with modules outside are left out: it can belong to one group only.
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
