"""Suggestions for a key or a section that does not exist."""

from __future__ import annotations

from titanlite.config.aliases import BROKEN, known_names, known_sections
from titanlite.config.errors import Problem, Source, nearest
from titanlite.config.keys import tables
from titanlite.config.unsupported_keys import NAMES

_HELP = "`titanlite config explain` lists the keys"


def unknown_section(name: str, source: Source) -> Problem:
    """Return the problem of an unknown section, with the nearest one."""
    if name in BROKEN:
        hint = "mend or remove the package, or leave the section out"
        return Problem("missing-package", f"[{name}]", BROKEN[name], hint, source.place)
    close = nearest(name, known_sections())
    hint = f"nearest section: [{close[0]}]" if close else _HELP
    return Problem("unknown-section", f"[{name}]", "unknown section", hint, source.place)


def unknown(name: str, source: Source) -> Problem:
    """Return the problem of an unknown key, with the nearest one or the place where it lives."""
    if name in NAMES["gone"]:
        return Problem("unknown-key", name, "this key is gone", NAMES["gone"][name], source.place)
    section, _, last = name.rpartition(".")
    if section in BROKEN:
        return unknown_section(section, source)
    code, message = "unknown-key", "unknown key"
    if table := next((key for key in tables() if name.startswith(f"{key}.")), ""):
        message = f"names no entry of {table}; one that is a table is one value, as {{factor = 8}}"
    elif section and section not in known_sections():
        code, message = "unknown-section", f"unknown section [{section}]"
    others = NAMES["other_trainers"]
    elsewhere = [known for known in sorted(known_names()) if known.endswith(f".{last}")]
    siblings = [known for known in sorted(known_names()) if known.startswith(f"{section}.")]
    if name in others or last in others:
        hint = f"here this is {others.get(name) or others[last]}"
    elif elsewhere:
        hint = f"{last} belongs to another section: {(nearest(name, elsewhere) or elsewhere)[0]}"
    elif close := nearest(name, siblings) or nearest(name, known_names()):
        hint = f"nearest: {close[0]}"
    else:
        hint = _HELP
    return Problem(code, name, message, hint, source.place)
