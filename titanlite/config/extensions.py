"""Keys that name an object of yours by a dotted path: "package.module:name", or "./file.py:name"
beside the TOML file.

Importing this module needs no torch. A config is loaded without an import of such an object. Only a
model is imported, since its sizes are checked. `load_functions` imports the others before any work
starts.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem, nearest, refuse
from titanlite.config.resolve import resolve_as
from titanlite.utils import is_dotted

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


def missing(config: LoadedConfig) -> list[Problem]:
    """Find dotted paths that surely lead nowhere, without an import: (code, key, message,
    remedy).
    """
    foreign = {claim.key for claim in config.claims}  # such a file is not even read
    paths = []
    for key, path in dotted_paths(config):
        if key != "model.name" and key not in foreign:
            paths.append((key, path))
    if not paths:
        return []
    from titanlite.config.dotted_names import unresolved

    found = []
    for key, path in paths:
        reason = unresolved(path)
        if reason:
            found.append(Problem("unresolved", key, f"{path!r} {reason}", HINT))
    return found


def load_function(key: str, path: str) -> Callable[..., Any]:
    """Return the function that a key of `FUNCTIONS` names.

    Raises ValueError if it cannot be called as it will be.
    """
    arguments = FUNCTIONS[key]

    def accept(found: Any) -> bool:
        try:
            inspect.signature(found).bind(*arguments)
        except (TypeError, ValueError):
            return False
        return True

    function: Callable[..., Any] = resolve_as(
        path, accept, f"a function to call with ({', '.join(arguments)})"
    )
    return function


#: Arguments of an optimizer class that titanlite gives.
_GIVEN = ("params", "lr")


def optimizer_problems(config: LoadedConfig) -> list[Problem]:
    """Compare `[optimizer.args]` with the class that `optimizer.name` names: (code, key, message,
    remedy).

    Only the source of the class is read. Where it does not tell, `load_functions` finds the mistake
    later.
    """
    path = config.value("optimizer.name")
    args = config.value("optimizer.args")
    if not is_dotted(path):
        return []
    from titanlite.config.signatures import class_signature

    signature = class_signature(path)
    if signature is None or "settings" in signature.names:
        return []
    own = [name for name in signature.names if name not in _GIVEN]
    found = []
    for name in args:
        if name in _GIVEN:
            remedy = "set optimizer.lr" if name == "lr" else "remove it"
            found.append(
                Problem(
                    "conflict", f"optimizer.args.{name}", "titanlite gives this argument", remedy
                )
            )
        elif name not in own and not signature.open:
            close = nearest(name, own)
            remedy = f"nearest: {close[0]}" if close else f"it takes {', '.join(own)}"
            message = f"{path!r} has no argument of this name"
            found.append(Problem("unknown-key", f"optimizer.args.{name}", message, remedy))
    for name in signature.required:
        if name not in args and name not in ("params", "lr", signature.names[0]):
            message = f"{path!r} needs the argument {name}"
            found.append(
                Problem("missing", "optimizer.args", message, f"set optimizer.args.{name}")
            )
    return found


def not_given(config: LoadedConfig) -> list[str]:
    """Return a line for the settings of `[optimizer]` that a class of optimizers does not get."""
    path = config.value("optimizer.name")
    if not is_dotted(path):
        return []
    if not gets_args_alone(path):
        return []
    known = {"weight_decay": "weight_decay", "eps": "eps", "beta1": "betas", "beta2": "betas"}
    written = [name for name in known if config.is_given(f"optimizer.{name}")]
    if not written:
        return []
    names = " and ".join(dict.fromkeys(f"optimizer.args.{known[name]}" for name in written))
    return [
        (
            f"optimizer.{', '.join(written)}: a class of optimizers gets lr and [optimizer.args] "
            f"alone; set {names}"
        )
    ]


def gets_args_alone(path: str) -> bool:
    """Return whether a dotted path names a class of optimizers that gets lr and `optimizer.args`
    and no other key, as far as its source tells: it does not ask for a section `[optimizer]`.
    """
    from titanlite.config.signatures import class_signature, names_class

    signature = class_signature(path)
    takes_settings = signature is not None and "settings" in signature.names
    return names_class(path) and not takes_settings


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
        if key in FUNCTIONS:
            try:
                if key == "optimizer.name":
                    load_optimizer(path, config.value("optimizer.args"))
                else:
                    load_function(key, path)
            except ValueError as error:
                problems.append(Problem("unresolved", key, str(error), HINT, config.place(key)))
    refuse(problems)
