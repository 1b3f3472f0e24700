"""What a user may have meant by a key or a section that does not exist."""

from __future__ import annotations

from titanlite.config.aliases import ALIASES, known_names, known_sections
from titanlite.config.errors import Problem, Source, nearest
from titanlite.config.keys import keys, sections
from titanlite.config.unsupported_keys import NAMES, OTHER_TRAINERS


def unknown_section(name: str, source: Source) -> Problem:
    """Return the problem of an unknown section, with the nearest one."""
    top = [section for section in known_sections() if "." not in section]
    close = nearest(name, top)
    hint = f"nearest section: [{close[0]}]" if close else f"sections: {', '.join(sections())}"
    return Problem("unknown-section", f"[{name}]", "unknown section", hint, source.place)


def unknown(name: str, source: Source) -> Problem:
    """Return the problem of an unknown key, with the nearest one or the place where it lives."""
    section = name.rpartition(".")[0]
    if name in NAMES["gone"]:
        return Problem("unknown-key", name, "this key is gone", NAMES["gone"][name], source.place)
    hint = _nearest_thing(name)
    if not section:
        message = "unknown key outside any section"
        return Problem("unknown-key", name, message, hint, source.place)
    if section not in known_sections():
        message = f"unknown section [{section}]"
        return Problem("unknown-section", name, message, hint, source.place)
    return Problem("unknown-key", name, "unknown key", hint, source.place)


def _nearest_thing(name: str) -> str:
    """Return what a user may have meant by an unknown name."""
    section, _, last = name.rpartition(".")
    elsewhere = [known for known in (*keys(), *ALIASES) if known.endswith(f".{last}")]
    siblings = []
    for known in known_names():
        above, _, key = known.rpartition(".")
        if above == section:
            siblings.append(key)
    if name in OTHER_TRAINERS:
        return f"here this is {OTHER_TRAINERS[name]}"
    if elsewhere:
        meant = (nearest(name, elsewhere) or elsewhere)[0]
        return f"{last} belongs to another section: {meant}"
    if last in OTHER_TRAINERS:
        return f"here this is {OTHER_TRAINERS[last]}"
    if close := nearest(last, siblings):
        return f"nearest: {section}.{close[0]}"
    if siblings:
        return f"keys of [{section}]: {', '.join(sorted(siblings))}"
    if close := nearest(name, known_names()):
        return f"nearest: {close[0]}"
    return "`titanlite config explain` lists the keys"
