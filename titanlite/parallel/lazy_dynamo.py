"""`torch._dynamo` without its import, for runs that compile nothing: it takes a quarter of a rank's
start.

Each DTensor, FSDP hook and optimizer step of torch calls `torch._dynamo.disable` or `graph_break`.
While dynamo is not loaded it traces nothing, so there is nothing to disable. Any other use loads
it.
"""

from __future__ import annotations

import functools
import importlib._bootstrap
import importlib.util
import os
import sys
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"


class _Deferred(ModuleType):
    """Stands for `torch._dynamo`, and becomes it at the first use of another name than
    those below.
    """

    def __getattr__(self, name: str) -> Any:
        _load(self)
        return getattr(self, name)


def _load(module: ModuleType) -> None:
    # Python's own lock for the import of a module: it finds threads that wait for each other.
    with importlib._bootstrap._ModuleLockManager(NAME):  # type: ignore[attr-defined]
        if not isinstance(module, _Deferred):  # another thread has just loaded it
            return
        spec: Any = module.__spec__
        object.__setattr__(module, "__class__", ModuleType)
        vars(module)["__path__"] = spec.submodule_search_locations
        spec._initializing = True  # other threads that import it wait
        try:
            spec.loader.exec_module(module)
        finally:
            spec._initializing = False


def defer_dynamo() -> None:
    """Let torch import dynamo when something needs it. Does nothing if it is imported already."""
    if NAME in sys.modules or (spec := importlib.util.find_spec(NAME)) is None:
        return
    module = _Deferred(NAME)
    # Without a path: the import of any part but its settings, which `FakeTensorMode` reads, loads
    # all of it.
    module.__spec__, module.__file__, module.__package__ = spec, spec.origin, NAME

    def disable(
        function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any
    ) -> Any:
        if function is None:
            return functools.partial(disable, recursive=recursive, **options)
        if not isinstance(
            function, (FunctionType, MethodType)
        ):  # a module would lose its parameters
            _load(module)
            return module.disable(function, recursive, **options)
        disabled: Callable[..., Any] | None = None

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal disabled
            if (
                isinstance(module, _Deferred) or module.disable is disable
            ):  # it is not loaded, or not to the end
                return function(*arguments, **named)
            disabled = disabled or module.disable(function, recursive, **options)
            return disabled(*arguments, **named)

        return call

    path = os.path.join(os.path.dirname(str(spec.origin)), "config.py")
    settings = importlib.util.spec_from_file_location(f"{NAME}.config", path)
    assert settings is not None and settings.loader is not None
    config = sys.modules[f"{NAME}.config"] = importlib.util.module_from_spec(settings)
    settings.loader.exec_module(config)
    vars(module).update(config=config, disable=disable, graph_break=lambda *_, **__: None)
    sys.modules[NAME] = torch._dynamo = module
