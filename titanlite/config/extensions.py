"""Keys that name an object of yours by a dotted path: "package.module:name", or "./file.py:name"
beside the TOML file.

Importing this module needs no torch. A config is loaded without an import of such an object. Only a
model is imported, since its sizes are checked. `load_functions` imports the others before any work
starts.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem, refuse
from titanlite.config.resolve import resolve_as
from titanlite.utils import is_dotted, logger

if TYPE_CHECKING:
    from titanlite.config.loaded import LoadedConfig

#: Key → the arguments with which its function is called.
FUNCTIONS = {
    "optimizer.name": ("parameters", "settings", "device"),
    "training.loss": ("logits", "labels"),
    "training.dataset": (),
    "validation.dataset": (),
}
KEYS = ("job.callbacks", "model.name", *FUNCTIONS)
#: Keys whose paths, if they begin with a dot, are relative to the file that names them.
ANCHORED = (*KEYS, "model.hf_config")
HINT = 'name it as "package.module:name", or as "./file.py:name" beside the TOML file'


def anchored(path: str, folder: Path) -> str:
    """Return a dotted path with its file made absolute: in `folder`, else in the working directory
    if it is there.
    """
    file, colon, name = path.partition(":")
    if not file.startswith("."):
        return path
    places = [os.path.abspath(base / file) for base in (folder, Path())]
    return f"{next(filter(os.path.exists, places), places[0])}{colon}{name}"


def dotted_paths(config: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Yield each dotted path in a config with its key."""
    for key in KEYS:
        value = config.value(key)
        paths = [value] if isinstance(value, str) else value
        for path in paths:
            if is_dotted(path):
                yield key, path


def missing(config: LoadedConfig) -> Iterator[Problem]:
    """Find dotted paths whose file or package is not there. `load_functions` finds all others."""
    foreign = {claim.key for claim in config.claims}  # such a file is not even looked for
    for key, path in dotted_paths(config):
        module, _, name = path.partition(":")
        package = module.partition(".")[0]
        reason = ""
        if not (module and name):
            reason = "names no object: a colon comes before its name"
        elif module.startswith((".", "/")):
            if not os.path.isfile(module):
                reason = f"cannot be imported: there is no file {os.path.realpath(module)}"
        elif package not in sys.modules and importlib.util.find_spec(package) is None:
            reason = f"cannot be imported: No module named {package!r}"
        if reason and key != "model.name" and key not in foreign:
            yield Problem("unresolved", key, f"{path!r} {reason}", HINT)


def load_function(key: str, path: str) -> Callable[..., Any]:
    """Return the function that a key of `FUNCTIONS` names.

    Raises ValueError if it cannot be called as it will be.
    """
    arguments = FUNCTIONS[key]
    kind = f"a function to call with ({', '.join(arguments)})"
    function: Callable[..., Any] = resolve_as(path, callable, kind)
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        raise ValueError(f"{path!r} is {function!r:.80}, and not {kind}") from None
    return function


def is_optimizer_class(found: Any) -> bool:
    """Return whether an object is a class of torch optimizers that does not take a section
    `[optimizer]` itself.
    """
    if not inspect.isclass(found):
        return False
    bases = [f"{base.__module__}.{base.__name__}" for base in found.__mro__]
    return (
        "torch.optim.optimizer.Optimizer" in bases
        and "settings" not in inspect.signature(found).parameters
    )


def load_optimizer(path: str, args: Mapping[str, Any]) -> tuple[Callable[..., Any], bool]:
    """Return what `optimizer.name` names, and whether it is a class of optimizers.

    Raises ValueError where it cannot be called: a class with (params, lr=…, **args), any other as
    in `FUNCTIONS`.
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
    """Import every function that a config names. Raises ConfigError with all that cannot be
    used.
    """
    problems = []
    for key, path in dotted_paths(config):
        try:
            if key == "optimizer.name":
                if load_optimizer(path, config.value("optimizer.args"))[1]:
                    _warn_of_settings(config)
            elif key in FUNCTIONS:
                load_function(key, path)
        except ValueError as error:
            problems.append(Problem("unresolved", key, str(error), HINT, config.place(key)))
    refuse(problems)


def _warn_of_settings(config: LoadedConfig) -> None:
    """Warn of settings of `[optimizer]` that a class of optimizers does not get."""
    names = ("weight_decay", "beta1", "beta2", "eps", "momentum", "kahan", "implementation")
    written = [name for name in names if config.is_given(f"optimizer.{name}")]
    if written:
        logger.warning(
            f"optimizer.{', '.join(written)}: a class of optimizers gets lr and [optimizer.args] "
            "alone"
        )
