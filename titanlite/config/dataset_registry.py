"""Names of text: bundled, registered data sets of the Hugging Face hub, and any other id there."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from titanlite.config.errors import nearest
from titanlite.config.urls import is_url
from titanlite.utils import is_dotted

BUNDLED = ("c4_test", "c4_validation", "sft_test", "sft_validation")


class HubText(NamedTuple):
    """A data set of the hub, and the part of it that is read."""

    repository: str
    #: None: the default one.
    subset: str | None = None
    split: str = "train"
    text_key: str = "text"
    #: Split for validation; None: there is none, and the same one is read.
    held_out: str | None = None


REGISTERED = {
    "c4": HubText("allenai/c4", "en", held_out="validation"),
    "fineweb": HubText("HuggingFaceFW/fineweb", "default"),
    "fineweb-edu": HubText("HuggingFaceFW/fineweb-edu", "default"),
    "dclm": HubText("mlfoundations/dclm-baseline-1.0-parquet"),
    "slimpajama": HubText("cerebras/SlimPajama-627B", held_out="validation"),
    "wikitext": HubText("Salesforce/wikitext", "wikitext-103-raw-v1", held_out="validation"),
}


def hub_text(name: str) -> HubText | None:
    """Return the hub's data set of a registered name or an id; None: another name, or a path below
    folders of a checkout.
    """
    if name in REGISTERED:
        return REGISTERED[name]
    return HubText(name) if re.fullmatch(r"(?!assets/|outputs/)[\w.-]+/[\w.-]+", name) else None


#: Value of `model.tokenizer_path` for the tokenizer that travels with titanlite, and its ids.
BUNDLED_TOKENIZER_NAME = "bundled"
BUNDLED_IDS = 2304


def fetch_hint(path: str) -> str:
    """Return how to get a tokenizer in place of a path that does not exist."""
    if is_url(path):
        return "copy its files to a folder of this machine, and give that folder"
    owner = path.partition("/")[0]
    if hub_text(path) is None or owner in (".", "..") or os.path.isdir(owner):
        return 'give the path of a tokenizer, or "bundled" for that of debug models'
    return f"`hf download {path} --include 'tokenizer*' --local-dir {path}` fetches it"


def name_problem(name: str) -> tuple[str, str] | None:
    """Return why a name without a path is no text, and a remedy; None if it is."""
    if name in BUNDLED or is_dotted(name) or hub_text(name):
        return None
    known = (*BUNDLED, *REGISTERED)
    close = nearest(name, known)
    hint = "a path or a URL of your own text goes into the path beside it"
    if close:
        hint = f'did you mean "{close[0]}"?'
    return (
        f'is no name of text: expected {", ".join(known)}, an id of the hub ("owner/name") or a '
        "dotted path",
        hint,
    )
