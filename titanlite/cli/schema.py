"""The JSON Schema of a whole config, for editors."""

from __future__ import annotations

import json
from typing import Any, Union

import msgspec

from titanlite.config.aliases import ALIASES, COMMA_LISTS, VALUES, Alias
from titanlite.config.key_types import inner_section, members, names_beside_paths
from titanlite.config.keys import Key, sections
from titanlite.config.unsupported_keys import UNSUPPORTED
from titanlite.config.value_types import Section
from titanlite.config.written_values import SWEEP

Schema = dict[str, Any]


def schema_text() -> str:
    """Return the JSON Schema as the text of its file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def json_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of a whole file.

    Other names are accepted and marked deprecated; so are keys of other trainers, with the values
    that switch them off.
    """
    found: Schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "titanlite config",
        "description": "A training run of titanlite: sections and keys of its TOML file.",
        **_object(
            {
                **{section: _section(section, owner) for section, owner in sections().items()},
                SWEEP: _sweep(),
            }
        ),
    }
    for alias in ALIASES.values():
        _place(found, alias.name, _alias(alias))
    for name, key in UNSUPPORTED.items():
        description = f"Without effect here, accepted switched off: {key.reason}."
        entry: Schema = {"description": description, "deprecated": True}
        if not key.switch:
            entry["enum"] = list(key.off)
        _place(found, name, entry)
    return found


def _sweep() -> Schema:
    return {
        "type": "object",
        "description": "The points of `titanlite sweep`, by section.key; a run itself ignores it.",
        "properties": {
            "points": {
                "type": "array",
                "description": "Keys that change together: each table is combined with the rest.",
                "items": {"type": "object", "minProperties": 1},
                "minItems": 1,
            },
        },
        # A key without quotes, as optimizer.lr, is a table in a table.
        "additionalProperties": {"anyOf": [{"type": "array", "minItems": 1}, {"type": "object"}]},
    }


def _object(properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _section(name: str, owner: type[Section]) -> Schema:
    properties: Schema = {}
    required = []
    for key in Key.all_of(name, owner):
        if key.name == "job.config_file":
            continue  # a file cannot name itself
        if key.required:
            required.append(key.field)
        default = {} if key.default is None else {"default": key.default}
        properties[key.field] = {
            "description": key.description,
            **default,
            **_values(key.name, key.type),
        }
    return {
        "description": " ".join((owner.__doc__ or "").split()),
        **_object(properties),
        **({"required": required} if required else {}),
    }


def _values(name: str, type_: Any) -> Schema:
    own = _type(type_)
    later = [
        {"const": other, "deprecated": True, "description": f'Another name of "{value}".'}
        for other, value in VALUES.get(name, {}).items()
    ]
    if name in COMMA_LISTS:
        later.append(
            {
                "type": "string",
                "deprecated": True,
                "description": "The list as one string, with commas.",
            }
        )
    return {"anyOf": [own, *later]} if later else own


def _type(type_: Any) -> Schema:
    if (section := inner_section(type_)) is not None:
        return {"type": "array", "items": _section("", section)}
    if named := names_beside_paths(type_):
        return {"anyOf": [{"enum": named}, {"type": "string", "pattern": ":"}]}
    given = tuple(part for part in members(type_) if part is not type(None))
    return msgspec.json.schema(Union[given])  # noqa: UP007


def _alias(alias: Alias) -> Schema:
    relation = f" ({alias.relation})" if alias.conversion else ""
    name = alias.name if alias.conversion else alias.key
    return {
        "description": f"Another name of {alias.key}{relation}.",
        "deprecated": True,
        **_values(name, alias.type),
    }


def _place(schema: Schema, name: str, entry: Schema) -> None:
    *path, field = name.split(".")
    for section in path:
        schema = schema["properties"].setdefault(section, {**_object({}), "deprecated": True})
    schema["properties"].setdefault(field, entry)
