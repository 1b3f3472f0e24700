#!/usr/bin/env python
"""Write what follows from the keys of the config: docs/config-keys.md, a page of all keys, and
train_configs/titanlite.schema.json, a JSON Schema for editors.

usage: python scripts/config_keys.py

A test compares the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Union

import jinja2
import msgspec

from titanlite.cli.config import summary
from titanlite.config.aliases import ALIASES, COMMA_LISTS, VALUES, Alias, names_of
from titanlite.config.dialect import LATER_DEFAULTS, LATER_MODELS
from titanlite.config.key_types import inner_section, members, names_beside_paths
from titanlite.config.keys import Key, keys, sections
from titanlite.config.raw_values import SWEEP
from titanlite.config.toml import quote
from titanlite.config.unsupported_keys import UNSUPPORTED, Unsupported
from titanlite.config.value_types import Section

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "config-keys.md"
SCHEMA = ROOT / "train_configs" / "titanlite.schema.json"


def markdown() -> str:
    """Return the page."""
    found = []
    for section, owner in sections().items():
        own = [key for key in keys().values() if key.section == section]
        tables = []
        for key in own:
            table = inner_section(key.type)
            if table:
                tables.append((key.name, [_row(one) for one in Key.all_of(key.name, table)]))
        rows = [(*_row(key), _other_names(key)) for key in own]
        found.append((section, summary(owner), rows, tables))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("config-keys.md.jinja")
    return template.render(
        sections=found,
        sweep=_SWEEP_ROWS,
        defaults=[
            (_code(key), _value(there), _value(keys()[key].default))
            for key, there in LATER_DEFAULTS.items()
        ],
        models=[_later_model(model) for model in LATER_MODELS],
        off=[(_code(name), _accepted(key), key.reason) for name, key in UNSUPPORTED.items()],
    ).rstrip()


_SWEEP_ROWS = (
    ("`section.key`", "a list", "values of the key, in all combinations with other lists"),
    ("`points`", "a list of tables of keys", "values of keys that change together"),
)


def _later_model(model: tuple[str, str]) -> tuple[str, str, str, str]:
    name, flavor = model
    later = LATER_MODELS[model]
    keys_ = ", ".join(f"{_code(key)} = {_value(value)}" for key, value in later.settings.items())
    there = f"{_code(name)} {_code(flavor)}"
    return there, f"{_code(later.name or name)} {_code(later.flavor)}", later.difference, keys_


def _accepted(key: Unsupported) -> str:
    values = " or ".join(map(_value, key.off))
    return f"{values}; any while {_code(key.switch)} is off" if key.switch else values


def _row(key: Key) -> tuple[str, str, str, str]:
    return (
        _code(key.field),
        key.expected,
        "required" if key.required else _value(key.default),
        key.description,
    )


def _other_names(key: Key) -> str:
    names = []
    for alias in names_of(key.name):
        name = _code(alias.name)
        if alias.conversion:
            name += f" ({alias.relation})"
        names.append(name)
    if key.name in COMMA_LISTS:
        names.append("one string with commas")
    names += [f"{_code(later)} for {_code(v)}" for later, v in VALUES.get(key.name, {}).items()]
    return ", ".join(names)


def _value(value: object) -> str:
    return "none" if value is None else _code(quote(value))


def _code(text: str) -> str:
    return f"`{text}`"


Schema = dict[str, Any]
#: The points of a sweep.
_SWEEP: Schema = {
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
                SWEEP: _SWEEP,
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
    section = inner_section(type_)
    named = names_beside_paths(type_)
    given = tuple(part for part in members(type_) if part is not type(None))
    if section is not None:
        own: Schema = {"type": "array", "items": _section("", section)}
    elif named:
        own = {"anyOf": [{"enum": named}, {"type": "string", "pattern": ":"}]}
    else:
        own = msgspec.json.schema(Union[given])  # noqa: UP007
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


if __name__ == "__main__":
    PAGE.write_text(markdown() + "\n", encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
