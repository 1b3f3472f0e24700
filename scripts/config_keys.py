#!/usr/bin/env python
"""Write docs/config-keys.md: every key with what it takes, its default, meaning and other names.

usage: python scripts/config_keys.py > docs/config-keys.md

A test compares the page.
"""

from __future__ import annotations

from pathlib import Path

import jinja2

from titanlite.cli.config import summary
from titanlite.config.aliases import COMMA_LISTS, VALUES, names_of
from titanlite.config.dialect import LATER_DEFAULTS, LATER_MODELS
from titanlite.config.key_types import inner_section
from titanlite.config.keys import Key, keys, sections
from titanlite.config.toml import quote
from titanlite.config.unsupported_keys import UNSUPPORTED, Unsupported


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


if __name__ == "__main__":
    print(markdown())
