"""Commands of `titanlite` beside training. Training never imports them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlite.utils import templates


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
