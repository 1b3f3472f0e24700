"""From a model in JSON, as checkpoints hold it, to its family and arguments. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from titanlite.config.trust import Origin, admit
from titanlite.models.args import made
from titanlite.models.argument_fields import checked_fields
from titanlite.models.families import get_spec
from titanlite.models.spec import ShapeError
from titanlite.utils import is_dotted


def from_record(
    record: Mapping[str, Any],
    origin: Origin = Origin.OWN,
    place: str = "",
    key: str = "config.model.family",
) -> tuple[str, Any]:
    """Return family and arguments.

    origin: who wrote the record. place, key: for messages.

    Raises ShapeError for a record without a model, ConfigError for a foreign dotted path.
    """
    values = dict(record)
    family = str(values.pop("family", None))
    if values.get("final_softcap") == 0:  # of a version before 0.3
        del values["final_softcap"]
    if is_dotted(family):
        from titanlite.config.trust_claims import code_claim

        admit([code_claim(place, key, family)], origin)
    cls = get_spec(family).args_class
    checked = checked_fields(cls, values, "")
    missing = []
    for field in fields(cls):
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and field.name not in checked:
            missing.append(field.name)
    if missing:
        raise ShapeError(f"{', '.join(missing)} is missing")
    return family, made(lambda: cls(**checked))
