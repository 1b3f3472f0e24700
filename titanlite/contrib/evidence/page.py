"""Make checks, and write proof.json and proof.html: their figures and their origin."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titanlite import exit_codes
from titanlite.cli.run_figures import to_json
from titanlite.contrib.evidence.checks import FAILS, FOUND, NOT_RUN, Check
from titanlite.contrib.evidence.tiny import TinyCopy
from titanlite.contrib.processes import tell
from titanlite.runs import provenance
from titanlite.utils import atomic_write, human_time, public_tree, timestamp

NAME = "proof"
PROVED = "proved"


def verdict(checks: Sequence[Mapping[str, Any]], left_out: Sequence[str] = ()) -> str:
    """Return void, failed, incomplete or proved."""
    states = {check["state"] for check in checks}
    if {check["state"] for check in checks if check["is_control"]} - {FOUND}:
        return "void"
    if FAILS in states:
        return "failed"
    return "incomplete" if NOT_RUN in states or left_out else PROVED


def report(
    folder: Path, subject: str, checks: Iterable[Check], tiny: TinyCopy | None = None
) -> tuple[str, int]:
    """Make the checks and write the page; return its verdict and the exit code.

    tiny: of the runs that are compared, if the checks are of a config.
    """
    from jinja2 import Environment, StrictUndefined

    found = []
    for check in checks:
        tell(f"{check.name}: {check.state} ({human_time(check.seconds)}) {check.note}".rstrip())
        found.append(asdict(check))
    left_out = sorted(tiny.left_out) if tiny else []
    judged = verdict(found, left_out)
    content = {
        "verdict": judged,
        "subject": subject,
        "time": timestamp(),
        "host": socket.gethostname(),
        "ranks": tiny and tiny.run.mesh.world_size,
        "checks": found,
        "left_out": left_out,
        "changes": tiny and tiny.changes,
        **provenance.origin(),
    }
    told = public_tree(content)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / f"{NAME}.json", to_json(told) + "\n")
    template = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = folder / f"{NAME}.html"
    atomic_write(page, environment.from_string(template).render(told))
    code = exit_codes.DONE if judged == PROVED else exit_codes.ERROR
    return f"{judged}; written: {page}", code
