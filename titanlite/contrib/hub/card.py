"""The files beside uploaded weights: a model card and the config, without secrets and private
paths.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from titanlite.checkpoint.hf_files import PEFT_CONFIG
from titanlite.config.toml import TOMLDecodeError, loads, quote
from titanlite.contrib.hub.hide_private_paths import last_part, public_place
from titanlite.contrib.hub.push_source import Weights
from titanlite.runs.provenance import public_config
from titanlite.runs.read import TASKS
from titanlite.utils import parse_json

README = "README.md"
CONFIG_FILE = "train.toml"
#: The last line of a card: one without it is of people, and is not replaced.
MARK = "<!-- written by titanlite push: delete this line, and no upload replaces this card -->"
#: A quoted text of TOML, or a comment, which tells where a value comes from.
_QUOTED_OR_COMMENT = re.compile(r"""("(?:[^"\\\n]|\\.)*"|'[^'\n]*')|[ \t]*#.*""")
_LAUNCH = re.compile(r"^\[+launch\b.*?(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
#: The key of the run's own uploads: a reader may not write to that repository.
_UPLOADS = re.compile(r"^hub = .*\n", re.MULTILINE)
_BASE = "base_model_name_or_path"


def files_beside(
    weights: Weights, folder: Path, place: tuple[str, str], license: str | None
) -> dict[str, bytes]:
    """Return the files that go up with weights, by name. place: repository and branch."""
    found = {}
    base = ""
    if (folder / PEFT_CONFIG).is_file():
        config = parse_json((folder / PEFT_CONFIG).read_bytes())
        base = str(config.get(_BASE) or "")
        # A folder of this machine is its own affair.
        if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", base) or Path(base).exists():
            base = last_part(base)
        found[PEFT_CONFIG] = json.dumps({**config, _BASE: base}, indent=2).encode()
    if weights.manifest is not None or not (folder / README).is_file():
        found[README] = _card(weights, base, place, license).encode()
    if toml := shown_config(weights.config_toml):
        found[CONFIG_FILE] = f"{toml}\n".encode()
    return found


def _card(weights: Weights, base: str, place: tuple[str, str], license: str | None) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    repository, branch = place
    data = ModelCardData(
        base_model=base if "/" in base else None,
        library_name="peft" if base else "transformers",
        license=license,
        pipeline_tag="text-generation",
        tags=["titanlite"],
    )
    text = ModelCard.from_template(
        data,
        str(Path(__file__).with_name("card.md.jinja")),
        repository=repository,
        branch=branch,
        base=base,
        step=weights.step,
        steps=weights.run.steps,
        figures=weights.figures,
        tasks=TASKS,
        manifest=weights.manifest,
        mark=MARK,
    )
    return str(text)


def shown_config(toml: str) -> str:
    """Return a config without secrets and `[launch]`, and only the last part of private paths."""
    from huggingface_hub import get_token

    text = _UPLOADS.sub("", _LAUNCH.sub("", public_config(toml)))
    text = _QUOTED_OR_COMMENT.sub(_public_part, text).strip()
    return text.replace(get_token() or "\0", "(removed)")


def _public_part(match: re.Match[str]) -> str:
    quoted = match[1]
    if quoted is None:
        return ""
    try:
        text: str = loads(f"text = {quoted}")["text"]
    except TOMLDecodeError:
        # The checkpoint is by another program.
        return quote("…")
    shown = public_place(text)
    return quoted if shown == text else quote(shown)
