"""Commands of `titanlite` beside training. Training never imports them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.utils import templates


def refuse_keys(flags: Sequence[str], hints: Mapping[str, str]) -> None:
    """Raise ConfigError for flags of keys that a command sets itself.

    hints: key -> what to use instead.
    """
    from titanlite.config.aliases import key_of
    from titanlite.config.entries import command_line_entries
    from titanlite.config.errors import ConfigError, Problem

    names = [entry.name for entry in command_line_entries(flags)[0]]
    keys = {name: key_of(name) for name in names}
    if found := [(name, hints[key]) for name, key in keys.items() if key in hints]:
        raise ConfigError(
            [
                Problem("does-not-fit", name, "cannot be set here", hint, "command line")
                for name, hint in found
            ]
        )


def render_page(template: str, **values: Any) -> str:
    """Return a page of `pages/` with its variables filled in; an unknown one is an error."""
    return templates(Path(__file__).parent / "pages").get_template(template).render(values)


def at_least(lowest: int) -> Callable[[str], int]:
    """Return a type for argparse: an integer that is not less."""

    def integer(text: str) -> int:
        if (value := int(text)) < lowest:
            raise argparse.ArgumentTypeError(f"expected an integer >= {lowest}, got {value}")
        return value

    return integer
