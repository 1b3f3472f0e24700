"""titanlite trains Llama-family language models with PyTorch FSDP2 from one TOML file.

Importing it is quick: `import titanlite` loads neither torch nor any room; `titanlite.parallel`, say, is imported
when it is first used.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from titanlite._version import __version__

__all__ = ["__version__", "load_config"]


def _rooms() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]


def __getattr__(name: str) -> Any:
    if name == "load_config":
        from titanlite.config.fit import load_config

        return load_config
    if name.startswith("_") or name not in _rooms():
        raise AttributeError(f"module 'titanlite' has no attribute {name!r}")
    return importlib.import_module(f"titanlite.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_rooms()])
