"""`torch._dynamo` without its import, for runs that compile nothing: it takes a quarter of a rank's start.

Each DTensor, FSDP hook and optimizer step of torch calls `torch._dynamo.disable` or `graph_break`. While dynamo is not
loaded it traces nothing, so there is nothing to disable. Any other use loads it.
"""

from __future__ import annotations

import functools
import importlib._bootstrap
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"


class _Deferred(ModuleType):
    """Stands for `torch._dynamo`, and becomes it at the first use of another name than those below."""

    def __getattr__(self, name: str) -> Any:
        # Python's own lock for the import of a module, which finds threads that wait for each other.
        with importlib._bootstrap._ModuleLockManager(NAME):  # type: ignore[attr-defined]
            if isinstance(self, _Deferred):  # else another thread has just loaded it
                spec = self.__spec__
                assert spec is not None and spec.loader is not None
                object.__setattr__(self, "__class__", ModuleType)
                vars(self)["__path__"] = spec.submodule_search_locations
                spec.loader.exec_module(self)
        return getattr(self, name)


def defer_dynamo() -> None:
    """Let torch import dynamo when something needs it. Does nothing if it is imported already."""
    if NAME in sys.modules or (spec := importlib.util.find_spec(NAME)) is None:
        return
    module = _Deferred(NAME)
    # Without a path: the import of any part but its settings, which `FakeTensorMode` reads, loads all of it.
    module.__spec__, module.__file__, module.__package__ = spec, spec.origin, NAME

    def disable(function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        if function is None:
            return functools.partial(disable, recursive=recursive, **options)
        disabled: Callable[..., Any] | None = None

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal disabled
            if isinstance(module, _Deferred):
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
