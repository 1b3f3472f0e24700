"""The functions and classes that dotted paths of a config name. Their modules are imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem, refuse
from titanlite.config.import_objects import resolve_as
from titanlite.config.import_path_keys import FUNCTIONS, HINT, dotted_paths
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.config.loaded import LoadedConfig


def load_function(key: str, path: str) -> Callable[..., Any]:
    """Return the function that a key of `FUNCTIONS` names. Raises ValueError if it does not fit."""
    arguments = FUNCTIONS[key]
    kind = f"a function to call with ({', '.join(arguments)})"
    function: Callable[..., Any] = resolve_as(path, callable, kind)
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        raise ValueError(f"{path!r} is {function!r:.80}, and not {kind}") from None
    return function


def is_optimizer_class(found: Any) -> bool:
    """Return whether it is a class of torch optimizers that does not take `[optimizer]` itself."""
    if not inspect.isclass(found):
        return False
    bases = [f"{base.__module__}.{base.__name__}" for base in found.__mro__]
    return (
        "torch.optim.optimizer.Optimizer" in bases
        and "settings" not in inspect.signature(found).parameters
    )


def load_optimizer(path: str, args: Mapping[str, Any]) -> tuple[Callable[..., Any], bool]:
    """Return what `optimizer.name` names, and whether it is a class of optimizers.

    Raises ValueError where it cannot be called: a class with (params, lr=…, **args), others as in
    `FUNCTIONS`.
    """
    found = resolve_as(path, callable, "a function or a class of optimizers")
    if not is_optimizer_class(found):
        return load_function("optimizer.name", path), False
    try:
        inspect.signature(found).bind("params", lr=0.0, **args)
    except TypeError as error:
        raise ValueError(
            f"{path!r} cannot be called with (params, lr=…, **optimizer.args): {error}"
        ) from None
    try:
        inspect.signature(found.step).bind("self")
    except TypeError:
        raise ValueError(
            f"{path!r} computes the loss itself (its step needs a closure), which is not done"
        ) from None
    return found, True


def load_functions(config: LoadedConfig) -> None:
    """Import every function that a config names. Raises ConfigError with all that do not fit."""
    problems = []
    for key, path in dotted_paths(config):
        try:
            if key == "optimizer.name":
                _, is_class = load_optimizer(path, config.value("optimizer.args"))
                settings = ("weight_decay", "beta1", "beta2", "eps", "momentum", "kahan")
                written = [
                    name
                    for name in (*settings, "implementation")
                    if is_class and config.is_given(f"optimizer.{name}")
                ]
                if written:
                    logger.warning(
                        f"optimizer.{', '.join(written)}: a class of optimizers gets lr and "
                        "[optimizer.args] alone"
                    )
            elif key in FUNCTIONS:
                load_function(key, path)
        except ValueError as error:
            problems.append(Problem("unresolved", key, str(error), HINT, config.place(key)))
    refuse(problems)
