"""Write proof.json and proof.html: the checks, their figures and their origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.cli.run_figures import to_json
from titanlite.contrib.evidence.checks import FAILS, FOUND, IDLE, NOT_RUN
from titanlite.utils import atomic_write, public_tree

NAME = "proof"
PROVED = "proved"


def verdict(checks: Sequence[Mapping[str, Any]], left_out: Sequence[str] = ()) -> str:
    """Return void, failed, incomplete or proved."""
    states = {check["state"] for check in checks}
    lost = [one for one in checks if one["is_control"] and one["state"] not in (FOUND, IDLE)]
    if lost:
        return "void"
    if FAILS in states:
        return "failed"
    return "incomplete" if NOT_RUN in states or left_out else PROVED


def write(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write both files; return the page."""
    from jinja2 import Environment, StrictUndefined

    folder.mkdir(parents=True, exist_ok=True)
    told = public_tree(content)
    template = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    atomic_write(folder / f"{NAME}.json", to_json(told) + "\n")
    page = folder / f"{NAME}.html"
    atomic_write(page, environment.from_string(template).render(told))
    return page
