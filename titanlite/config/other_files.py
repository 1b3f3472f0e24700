"""Files that are no configs of titanlite: what they are, and where their user finds help."""

from __future__ import annotations

import re

from titanlite.config.errors import Problem, Source
from titanlite.config.toml import quote
from titanlite.config.unsupported_keys import OTHER_MODELS

#: How a line of Python begins that is no line of TOML.
_PYTHON = re.compile(
    r"^(from [\w.]+ import |import [\w.]+|def \w+\(|class \w+[(:]|@\w+)", re.MULTILINE
)
_HELP = "docs/from-torchtitan.md has the fields of its Python configs as keys of a TOML file"


def broken(text: str, file: str, error: Exception) -> Problem:
    """Return the problem of a text that is no TOML. error: what the parser says."""
    if not file.endswith(".py") and not _PYTHON.search(text):
        return Problem("broken-toml", "", f"broken TOML: {error}", where=file)
    if "torchtitan" in text or "Trainer.Config" in text:
        message = (
            "is a Python config of torchtitan after 0.2.2; titanlite reads TOML, runs no config"
        )
        return Problem("broken-toml", "", message, _HELP, file)
    hint = "`titanlite config template` prints a TOML file with every key"
    return Problem("broken-toml", "", "is Python; a config is a TOML file", hint, file)


def other_model(name: str, file: str, line: int | None) -> Problem:
    """Return the problem of a file of torchtitan's for a model that titanlite will not have."""
    reason, hint = OTHER_MODELS[name]
    place = Source("file", file, line).place
    return Problem("other-trainer", "model.name", f"{quote(name)} {reason}", hint, place)
