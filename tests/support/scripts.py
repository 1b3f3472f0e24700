"""Scripts of the repository, loaded as modules."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from tests.support.processes import ROOT


def load_script(name: str) -> Any:
    """Load `scripts/NAME.py`; its `main` does not run."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
