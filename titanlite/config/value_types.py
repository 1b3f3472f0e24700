"""Types of config values, and the base of the sections."""

import os
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(min_length=1)]

#: A day, as 2025-01-31.
Day = Annotated[
    str,
    Meta(
        pattern=r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$",
        extra={"words": 'a day, as "2025-01-31"'},
    ),
]
CountOrRest = Annotated[
    int,
    Meta(
        ge=-1,
        extra={"words": "-1 or an integer >= 1", "refused": 0},
        extra_json_schema={"anyOf": [{"const": -1}, {"minimum": 1}]},
    ),
]
"""-1 stands for all that is left."""

HubName = Annotated[
    str,
    Meta(
        pattern=r"^(\w[\w.-]*/\w[\w.-]*)?$",
        extra={"words": 'OWNER/NAME, as "ada/tiny-llama"'},
    ),
]
"""A repository of the Hugging Face hub; "": none."""

Dtype = Literal["float32", "bfloat16"]
WeightDtype = Literal["float32", "bfloat16", "float16"]
"""Dtype of weights for use elsewhere."""
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1 - 2**20)]
"""Room for a million ranks to add their number to it and still give torch the 64-bit integer that
it takes.
"""

Duration = Annotated[
    str, Meta(pattern=r"^([0-9]+(:[0-9]{2}){1,2}|[0-9]+-[0-9]{1,2}(:[0-9]{2}){0,2}|)$")
]
"""A time as Slurm writes it."""

Amount = Annotated[str, Meta(pattern=r"^(\d+(\.\d+)?([KMGTP]i|[kMGTP])?)?$")]
"""Bytes as Kubernetes writes them."""

HOME = Meta(extra={"home": True})
"""Marks paths: a leading `~` means the home folder, as in a shell."""

Location = Annotated[str, HOME, Meta(min_length=1)]
"""A file or folder."""


def dotted_or(*names: str, classes: bool = False) -> Meta:
    """Limit a string to these names and to dotted paths ("package.module:name").

    classes: also "package.module.Name", which a load turns into the others.
    """
    words = ", ".join(f'"{name}"' for name in names)
    if len(names) > 1:
        words = f"one of {words}"
    extra = {"choices": names, "words": f'{words}, or a dotted path "package.module:name"'}
    imported = r"|^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$" if classes else ""
    return Meta(pattern=rf"^({'|'.join(names)})$|:{imported}", extra=extra)


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """One `[section]`. Loading refuses unknown keys and converts nothing but an integer to
    a float.
    """

    def __post_init__(self) -> None:
        for name in paths(type(self)):
            value = getattr(self, name)
            if value and value.startswith("~"):
                force_setattr(self, name, os.path.expanduser(value))


@cache
def paths(section: type[Section]) -> list[str]:
    """Return the fields that hold paths."""

    def is_path(annotation: Any) -> bool:
        return HOME in getattr(annotation, "__metadata__", ()) or any(
            map(is_path, getattr(annotation, "__args__", ()))
        )

    return [name for name, annotation in section.__annotations__.items() if is_path(annotation)]
