"""What local saves need of other keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.config.entries import quote
from titanlite.config.errors import Problem
from titanlite.config.urls import is_url

if TYPE_CHECKING:
    from titanlite.config.sections import Checkpoint

KEY = "checkpoint.local_folder"
#: Stands for the number of a rank on its node.
PLACE = "{local_rank}"


def findings(section: Checkpoint) -> Iterator[Problem]:
    """Find values that cannot work."""
    folder = section.local_folder or ""
    plain = folder.replace(PLACE, "")
    hint = f"name a folder of each node, such as /local/saves; {PLACE} may stand in it"
    # A variable gets its value on the machines of the job.
    is_known = "${" not in folder
    if is_url(folder):
        yield Problem("url", KEY, f"{quote(folder)} is a store, which all nodes share", hint)
    elif is_known and ("{" in plain or "}" in plain):
        yield Problem("unknown-value", KEY, f"{quote(folder)} has another field than {PLACE}", hint)
    elif is_known and not os.path.isabs(folder):
        yield Problem("unknown-value", KEY, f"{quote(folder)} does not begin with /", hint)
    if section.interval_type == "steps" and section.local_interval >= section.interval:
        message = (
            f"is {section.local_interval}, and checkpoint.interval = {section.interval} saves as "
            "often"
        )
        yield Problem("conflict", "checkpoint.local_interval", message, "lower it, or raise that")
