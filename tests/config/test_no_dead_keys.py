"""Every key is read by some code that acts on it."""

from __future__ import annotations

import re
from pathlib import Path

import titanlite
from titanlite.config.keys import keys

#: Read while the config is loaded, and tested there.
AT_LOAD = {"job.config_file", "job.extends", "job.dialect", "metrics.enable_wandb"}
#: The one legal value is the default; the others that users know are refused with a reason.
SINGLE = "float8.scaling_type_"


def test_every_key_is_read_by_code_that_acts_on_it() -> None:
    package = Path(titanlite.__file__).parent
    # These load, check and print keys.
    others = {"config", "resolve", "checks.py"}
    files = [f for f in package.rglob("*.py") if not others & set(f.relative_to(package).parts)]
    code = "\n".join(file.read_text() for file in files)
    templates = "\n".join(file.read_text() for file in (package / "deploy").glob("*.jinja"))
    # A section answers questions about its own keys.
    sections = "".join(file.read_text() for file in (package / "config").glob("*sections.py"))
    read = {*re.findall(r"\.([a-z]\w+)\b(?! *=[^=])", code)}
    read.update(re.findall(r"\{[{%][^}]*\b([a-z]\w+)\b", templates))
    read.update(re.findall(r"\bself\.([a-z]\w+)", sections))
    unread = [key.name for key in keys().values() if key.field not in read]
    assert [key for key in unread if key not in AT_LOAD and not key.startswith(SINGLE)] == []
