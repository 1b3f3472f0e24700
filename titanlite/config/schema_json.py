"""The dialect as JSON Schema (draft 2020-12), so that editors complete and check the keys of a TOML file.

Later names are accepted and marked deprecated; so are keys of other trainers, with the values that switch them off.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from titanlite.config.dialect import Dialect
from titanlite.config.foreign import FOREIGN
from titanlite.config.names import ALIASES, COMMA_LISTS, VALUE_NAMES, Alias
from titanlite.config.schema import NOT_IN_FILES, keys
from titanlite.config.unbuilt import UNBUILT

Schema = dict[str, Any]


def json_schema() -> Schema:
    """The schema of a whole file."""
    raw = Dialect.model_json_schema()
    shared: Schema = {}
    found: Schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "titanlite config",
        "description": "A training run of titanlite: sections and keys of its TOML file.",
        "type": "object",
        "additionalProperties": False,
        "properties": {},
    }
    for section, reference in raw["properties"].items():
        table = _clean(raw["$defs"][_target(reference)], raw["$defs"], shared)
        table.pop("default", None)
        found["properties"][section] = table
    for key in NOT_IN_FILES:
        section, _, field = key.partition(".")
        found["properties"][section]["properties"].pop(field)
    for key in keys():
        if key in UNBUILT:
            _find(found, key)["description"] += f" Not built yet: {UNBUILT[key].feature}."
    for (key, later), value in VALUE_NAMES.items():
        _accept_later_value(_find(found, key), later, value)
    for key in keys():
        if key in COMMA_LISTS:
            _accept_commas(_find(found, key))
    for alias in ALIASES.values():
        _place(found, alias.name, _alias(found, alias))
    for name, foreign in FOREIGN.items():
        description = f"Without effect here, accepted switched off: {foreign.reason}."
        _place(found, name, {"description": description, "deprecated": True, "enum": list(foreign.off)})
    found["$defs"] = shared
    return found


def to_text() -> str:
    """The schema as the text of its file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _target(schema: Schema) -> str:
    reference = schema.get("$ref") or schema["allOf"][0]["$ref"]
    return reference.rpartition("/")[2]


def _clean(schema: Schema, definitions: Schema, shared: Schema) -> Schema:
    """Without what says nothing to a person who writes TOML: titles, and null, which TOML does not have."""
    result: Schema = {}
    for name, value in schema.items():
        if name == "title" or (name == "default" and value is None):
            continue
        if name == "$ref":
            target = value.rpartition("/")[2]
            if target not in shared:
                shared[target] = {}
                shared[target] = _clean(definitions[target], definitions, shared)
            result[name] = value
        elif name == "properties":
            result[name] = {key: _clean(entry, definitions, shared) for key, entry in value.items()}
        elif name == "anyOf":
            options = [_clean(option, definitions, shared) for option in value if option != {"type": "null"}]
            result.update(options[0] if len(options) == 1 else {name: options})
        elif isinstance(value, dict):
            result[name] = _clean(value, definitions, shared)
        else:
            result[name] = value
    return result


def _find(schema: Schema, name: str) -> Schema:
    for part in name.split("."):
        schema = schema["properties"][part]
    return schema


def _alias(schema: Schema, alias: Alias) -> Schema:
    """The values that another name takes."""
    if alias.annotation is None:
        values = {k: v for k, v in _find(schema, alias.canonical).items() if k not in ("default", "description")}
    else:
        values = TypeAdapter(alias.annotation).json_schema()
        if alias.name in COMMA_LISTS:
            _accept_commas(values)
    age = "Later" if alias.later else "Older"
    relation = "" if alias.convert is None else f" ({alias.relation})"
    return {"description": f"{age} name of {alias.canonical}{relation}.", "deprecated": True, **values}


def _accept_later_value(schema: Schema, later: str, value: str) -> None:
    old = {"const": later, "deprecated": True, "description": f'Another name of "{value}".'}
    own = {name: schema.pop(name) for name in ("enum", "type") if name in schema}
    schema["anyOf"] = [own, old]


def _accept_commas(schema: Schema) -> None:
    one = {"type": "string", "deprecated": True, "description": "The list as one string, with commas."}
    own = {name: schema.pop(name) for name in ("type", "items") if name in schema}
    schema["anyOf"] = [own, one]


def _place(schema: Schema, name: str, entry: Schema) -> None:
    *sections, field = name.split(".")
    for section in sections:
        empty: Schema = {"type": "object", "additionalProperties": False, "properties": {}}
        if section not in schema["properties"]:
            empty["deprecated"] = True
        schema = schema["properties"].setdefault(section, empty)
    schema["properties"].setdefault(field, entry)
