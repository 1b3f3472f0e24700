"""The JSON Schema that editors use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import titanlite
from tests.support.processes import ROOT
from tests.support.scripts import load_script
from titanlite.config.keys import keys
from titanlite.config.toml import loads

SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))
PAGES = load_script("config_keys")
SCHEMA = PAGES.json_schema()


def find(name: str) -> dict[str, Any]:
    found = SCHEMA
    for part in name.split("."):
        assert found["additionalProperties"] is False
        found = found["properties"][part]
    return found


def test_the_committed_schema_and_the_page_of_all_keys_are_those_of_the_code():
    for path, text in ((PAGES.SCHEMA, PAGES.schema_text()), (PAGES.PAGE, PAGES.markdown() + "\n")):
        assert path.read_text(encoding="utf-8") == text, "run: python scripts/generate.py"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_file_points_to_the_schema_and_has_only_its_names(path):
    text = path.read_text(encoding="utf-8")
    assert text.splitlines()[0] == "#:schema ./titanlite.schema.json"
    for section, table in loads(text).items():
        for name in table:
            find(f"{section}.{name}")


# The code that reads the keys


#: Read while the config is loaded, and tested there.
AT_LOAD = {"job.config_file", "job.extends", "job.dialect", "metrics.enable_wandb"}
#: The one legal value is the default; the others that users know are refused with a reason.
SINGLE = "float8.scaling_type_"


def test_every_key_is_read_by_code_that_acts_on_it():
    package = Path(titanlite.__file__).parent
    # These load, check and print keys.
    others = {"config", "resolve", "checks.py"}
    files = [f for f in package.rglob("*.py") if not others & set(f.relative_to(package).parts)]
    code = "\n".join(file.read_text() for file in files)
    templates = "\n".join(file.read_text() for file in (package / "deploy").glob("*.jinja"))
    # A section answers questions about its own keys.
    sections = "".join(file.read_text() for file in (package / "config").glob("*sections.py"))
    read = {
        *re.findall(r"\.([a-z]\w+)\b(?! *=[^=])", code),
        *re.findall(r"\{[{%][^}]*\b([a-z]\w+)\b", templates),
        *re.findall(r"\bself\.([a-z]\w+)", sections),
    }
    unread = [key.name for key in keys().values() if key.field not in read]
    assert [key for key in unread if key not in AT_LOAD and not key.startswith(SINGLE)] == []
