"""What each key says, who said it, and what it means."""

from __future__ import annotations

from titanlite.config import foreign
from titanlite.config.entries import unknown
from titanlite.config.errors import COMMAND_LINE, ConfigError, Problem
from titanlite.config.foreign import FOREIGN
from titanlite.config.job import JobConfig
from titanlite.config.names import ALIASES, LATER_DEFAULTS, LATER_FLAVORS, MicrobatchSize, later_names
from titanlite.config.schema import Key, keys, quote, sections
from titanlite.config.unbuilt import UNBUILT


class Style:
    """ANSI styles, or none where the output is no terminal."""

    def __init__(self, color: bool) -> None:
        self._color = color

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._color and text else text

    def bold(self, text: str) -> str:
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        return self._wrap("2", text)

    def good(self, text: str) -> str:
        return self._wrap("32", text)

    def warn(self, text: str) -> str:
        return self._wrap("33", text)


def explain_all(config: JobConfig, style: Style) -> str:
    """Every key by section."""
    return "\n\n".join(explain_section(config, name, style) for name in sections())


def explain_section(config: JobConfig, name: str, style: Style) -> str:
    """One section: each key with value, source, type, default and meaning."""
    lines = [style.bold(f"[{name}]") + f"  {(sections()[name].__doc__ or '').splitlines()[0]}"]
    for key in (k for k in keys().values() if k.section == name):
        given = config.is_given(key.name)
        value = f"{key.field} = {quote(config.value(key.name))}"
        lines.append(f"  {style.bold(value) if given else value}  {style.dim(_source(config, key))}")
        lines.append(style.dim(f"      {key.description} ({key.expected}; default {quote(key.default)})"))
    return "\n".join(lines)


def _source(config: JobConfig, key: Key) -> str:
    if key.is_table and config.is_given(key.name):
        prefix = f"{key.name}."
        return ", ".join(f"{n[len(prefix) :]}: {s}" for n, s in config.sources.items() if n.startswith(prefix))
    source = config.source(key.name)
    written = f", as {source.written}" if source.written not in ("", key.name) else ""
    return f"{source}{written}"


def explain_key(config: JobConfig, name: str, style: Style) -> str:
    """One key (by any of its names) or one section in depth. Raises ConfigError for an unknown one."""
    if name in sections():
        return explain_section(config, name, style)
    if name in FOREIGN:
        off = " or ".join(quote(value) for value in FOREIGN[name].off)
        expected = foreign.annotation(name)
        kind = expected.__name__ if isinstance(expected, type) else str(expected)
        return "\n".join(
            [
                f"{style.bold(name)} ({kind}) is a key of other trainers without effect here.",
                f"  accepted  {off}",
                f"  otherwise refused: {FOREIGN[name].reason}",
            ]
        )
    alias = ALIASES.get(name)
    canonical = alias.canonical if alias else name
    if canonical not in keys():
        problem = unknown(name, COMMAND_LINE)
        raise ConfigError([Problem("", name, problem.message, problem.hint)])
    key = keys()[canonical]
    rows = [
        ("value", f"{style.bold(quote(config.value(canonical)))}  from {_source(config, key)}"),
        ("type", key.expected),
        ("default", quote(key.default)),
        ("meaning", key.description),
    ]
    if canonical in LATER_DEFAULTS:
        later = LATER_DEFAULTS[canonical]
        text = f"a micro-batch size of {later.size}" if isinstance(later, MicrobatchSize) else quote(later)
        rows.append(("dialect 2026", f"default {text}, for a file that says so or uses later names of older keys"))
    if canonical == "model.flavor":
        text = ", ".join(f"{quote(there)} is {quote(here)}" for there, (here, _) in LATER_FLAVORS.items())
        rows.append(("dialect 2026", f"of llama3 {text}, in such a file"))
    for other in later_names(canonical):
        rows.append(("also", f"{other.name} ({other.relation})"))
    if canonical in UNBUILT:
        entry = UNBUILT[canonical]
        built = " or ".join(quote(value) for value in (key.default, *entry.built))
        advice = f"; {entry.advice}" if entry.advice else ""
        rows.append(("not built yet", f"{entry.feature}: values other than {built} stop training{advice}"))
    head = f"{style.bold(canonical)}" + (f"  ({name} is another name of it)" if alias else "")
    return "\n".join([head, *(f"  {label:<13} {text}" for label, text in rows)])
