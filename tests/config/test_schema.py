"""The JSON Schema that editors use, checked with a reading of the keywords it consists of."""

from __future__ import annotations

import operator as op
import re
from pathlib import Path
from typing import Any

import pytest

from titanlite.config.aliases import ALIASES
from titanlite.config.keys import keys
from titanlite.config.toml import loads
from titanlite.config.unsupported_keys import UNSUPPORTED
from titanlite.tools.config_pages import json_schema, schema_text, template

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))
COMMAND = "titanlite config schema > train_configs/titanlite.schema.json"
KEYWORDS = {
    "$schema", "$ref", "$defs", "title", "description", "default", "deprecated", "type", "enum", "const", "anyOf",
    "properties", "additionalProperties", "required", "items", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "minItems", "minLength", "pattern",
}  # fmt: skip
TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: type(v) is int,
    "number": lambda v: type(v) in (int, float),
}


def fits(schema: Any, value: Any, root: dict[str, Any]) -> bool:
    """Whether a value is valid under a schema, for the keywords in KEYWORDS."""
    if isinstance(schema, bool):
        return schema
    assert set(schema) <= KEYWORDS, set(schema) - KEYWORDS
    if "$ref" in schema and not fits(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root):
        return False
    if "type" in schema and not TYPES[schema["type"]](value):
        return False
    if "enum" in schema and not any(value == v and type(value) is type(v) for v in schema["enum"]):
        return False
    if "const" in schema and (value != schema["const"] or type(value) is not type(schema["const"])):
        return False
    if "anyOf" in schema and not any(fits(option, value, root) for option in schema["anyOf"]):
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        if not set(schema.get("required", ())) <= set(value):
            return False
        return all(fits(known.get(name, rest), item, root) for name, item in value.items())
    if isinstance(value, list):
        return all(fits(schema.get("items", True), item, root) for item in value)
    if isinstance(value, str):
        return len(value) >= schema.get("minLength", 0) and bool(re.search(schema.get("pattern", ""), value))
    limits = {"minimum": op.ge, "maximum": op.le, "exclusiveMinimum": op.gt, "exclusiveMaximum": op.lt}
    return all(holds(value, schema[limit]) for limit, holds in limits.items() if limit in schema)


SCHEMA = json_schema()


def valid(toml: str) -> bool:
    return fits(SCHEMA, loads(toml), SCHEMA)


def find(name: str) -> dict[str, Any]:
    found = SCHEMA
    for part in name.split("."):
        found = found["properties"][part]
    return found


def test_committed_schema_is_that_of_the_code():
    committed = (ROOT / "train_configs" / "titanlite.schema.json").read_text(encoding="utf-8")
    assert committed == schema_text(), f"stale: {COMMAND}"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_file_points_to_the_schema_and_is_valid(path):
    text = path.read_text(encoding="utf-8")
    assert text.splitlines()[0] == "#:schema ./titanlite.schema.json"
    assert valid(text)
    assert not valid(text.replace("[job]\n", '[job]\nstepz = "a"\n'))


def test_every_key_has_its_meaning_and_default():
    for key in keys().values():
        if key.name == "job.config_file":
            continue
        entry = find(key.name)
        assert entry["description"].startswith(key.description)
        assert "deprecated" not in entry
        if key.default is not None:
            assert fits(entry, key.default, SCHEMA)
            assert entry["default"] == key.default


def test_every_other_name_is_known_and_deprecated():
    for alias in ALIASES.values():
        entry = find(alias.name)
        assert entry["deprecated"] is True
        assert alias.key in entry["description"]
    for name, foreign in UNSUPPORTED.items():
        assert find(name)["deprecated"] is True
        assert all(fits(find(name), off, SCHEMA) for off in foreign.off)


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("training.steps = 3", True),
        ('training.steps = "3"', False),
        ("training.steps = 0", False),
        ("optimizer.lr = 1", True),
        ('optimizer.name = "SGD"', False),
        ('training.reshard_after_forward = "never"', True),
        ("training.reshard_after_forward = 1", False),
        ('activation_checkpoint.selective_ac_option = "x"', False),
        ('activation_checkpoint.mode = "memory_budget"', True),
        ("model.rope_scaling = {factor = 8, low_freq_factor = 1.0}", True),
        ('[[data.source]]\npath = "a"\nweight = 2', True),
        ('parallelism.module_fqns_per_model_part = [["a"]]', True),
        ("fault_tolerance.enable = true", False),
        ('float8.scaling_type_input = "delayed"', False),
        ('job.config_file = "a.toml"', False),
    ],
)
def test_value(toml, expected):
    assert valid(toml) is expected


def test_template_without_its_marks_is_valid():
    assert valid(re.sub(r"^#(?=\w)", "", template(), flags=re.MULTILINE))
