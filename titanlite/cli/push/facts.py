"""What a model card tells of a run: figures, text, config, without secrets and private paths."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf_files import HF_CONFIG, PEFT_CONFIG
from titanlite.cli.push.subject import Subject
from titanlite.config.text_names import BUNDLED, hub_text
from titanlite.config.toml import TOMLDecodeError, loads, quote
from titanlite.config.urls import public_name
from titanlite.features.hub.contact import without_token
from titanlite.runs.provenance import public_config
from titanlite.runs.read import TASKS, Row
from titanlite.utils import parse_json

#: A quoted text of TOML, or a comment, which tells where a value comes from.
_QUOTED_OR_COMMENT = re.compile(r"""("(?:[^"\\\n]|\\.)*"|'[^'\n]*')|[ \t]*#.*""")
#: How a place on a machine, or in a store that is not open to all, begins.
_PRIVATE = re.compile(
    r"[/~$]|\.\.[/\\]|[a-z]:[/\\]|\\\\|(?!https?:|hf:)[a-z][\w+.-]*://", re.IGNORECASE
)
_LAUNCH = re.compile(r"^\[+launch\b.*?(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
#: Where the run uploads its own checkpoints: a reader may not write there.
_UPLOADS = re.compile(r"^hub = .*\n", re.MULTILINE)
#: A URL of a data set of the hub.
_OF_HUB = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)")
_BASE = "base_model_name_or_path"
#: Bytes of a safetensors file's first number, and the most that its header may have.
_LENGTH = 8
_LONGEST = 100 << 20


@dataclass(frozen=True)
class Weights:
    """What exported files hold."""

    parameters: int
    dtypes: tuple[str, ...]
    #: Of config.json, or of adapter_config.json.
    config: Mapping[str, Any]
    is_adapters: bool

    @property
    def architecture(self) -> str:
        if self.is_adapters:
            return f"LoRA adapters of rank {self.config.get('r', '?')}"
        names = self.config.get("architectures") or [self.config.get("model_type", "?")]
        return str(names[0])

    @property
    def base_name(self) -> str:
        """The model under adapters: its id on the hub, or the last part of its folder."""
        name = str(self.config.get(_BASE) or "")
        return name if _is_id(name) else _name(name)

    @property
    def base_model(self) -> str:
        """The id of the model under adapters on the hub; "" where it is a folder."""
        return self.base_name if _is_id(self.base_name) else ""

    @property
    def public_files(self) -> dict[str, bytes]:
        """Files that differ from the export: adapters do not tell the folder of their base."""
        if not self.is_adapters or self.base_model:
            return {}
        content = {**self.config, _BASE: self.base_name}
        return {PEFT_CONFIG: (json.dumps(content, indent=2) + "\n").encode()}


def _is_id(name: str) -> bool:
    """Return whether a name may be an id of the hub, and is no folder here."""
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None
    return is_id and not Path(name).exists()


def weights_in(folder: Path) -> Weights:
    """Read what the safetensors files of an export hold, by their headers. Raises
    CheckpointError.
    """
    parameters = 0
    dtypes: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for entry in _entries(file):
            count = math.prod(entry["shape"])
            parameters += count
            dtypes[entry["dtype"]] = dtypes.get(entry["dtype"], 0) + count
    if not dtypes:
        raise CheckpointError(f"{folder} holds no *.safetensors: export it with `titanlite export`")
    is_adapters = (folder / PEFT_CONFIG).is_file()
    file = folder / (PEFT_CONFIG if is_adapters else HF_CONFIG)
    try:
        config = parse_json(file.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is no table")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    by_count = sorted(dtypes, key=lambda name: -dtypes[name])
    return Weights(parameters, tuple(by_count), config, is_adapters)


def _entries(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield type and shape of each tensor of a safetensors file."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH), "little")
            if not 0 < length <= _LONGEST:
                raise ValueError("its header has an impossible length")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                yield {"dtype": str(entry["dtype"]), "shape": [int(n) for n in entry["shape"]]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}") from None


def shown_config(subject: Subject) -> str:
    """Return the config for everybody: no secrets, no `[launch]`, and of private paths the last
    part.
    """
    text = _LAUNCH.sub("", public_config(subject.config_toml))
    text = _UPLOADS.sub("", text)
    return without_token(_QUOTED_OR_COMMENT.sub(_public_part, text)).strip()


def _public_part(match: re.Match[str]) -> str:
    """Return a quoted text without private folders; "" for a comment."""
    quoted = match[1]
    if quoted is None:
        return ""
    try:
        text: str = loads(f"text = {quoted}")["text"]
    except TOMLDecodeError:
        # Of a checkpoint that another program wrote.
        return quote("…")
    return quote(f"…/{_name(text)}") if _PRIVATE.match(text) else quoted


def _name(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def rows_until(subject: Subject) -> list[Row]:
    """Return the rows of metrics.jsonl up to the step of the weights."""
    if subject.run is None:
        return []
    last = math.inf if subject.step is None else subject.step
    return [row for row in subject.run.rows if row["step"] <= last]


def validation_loss(subject: Subject) -> float | None:
    """Return the loss on the held-out text with these weights; None where it was not measured."""
    if subject.manifest is not None and subject.manifest.validation_loss is not None:
        return subject.manifest.validation_loss
    for row in reversed(rows_until(subject)):
        found = row.get("validation_loss")
        if found is not None and row["step"] == subject.step:
            return found if math.isfinite(found) else None
    return None


def tokens_seen(subject: Subject) -> int | None:
    """Return the tokens of training; None where they are not known."""
    found = subject.manifest.train.get("tokens_seen") if subject.manifest is not None else None
    if found is None:
        for row in reversed(rows_until(subject)):
            if "tokens_seen" in row:
                return int(row["tokens_seen"])
    return found if isinstance(found, int) else None


def task_figures(subject: Subject) -> tuple[int | None, dict[str, float]]:
    """Return the newest figures of tasks, as `quiz/acc`, and the step of them."""
    for row in reversed(rows_until(subject)):
        found = {}
        for name, value in row.items():
            if name.startswith(TASKS) and math.isfinite(value):
                found[name.removeprefix(TASKS)] = value
        if found:
            return int(row["step"]), found
    return None, {}


@dataclass(frozen=True)
class Text:
    """A source of training text."""

    name: str
    #: Id of a data set of the hub; "": it is none.
    dataset: str = ""
    #: Its share of the sequences, as written; None: it is the only one.
    weight: float | None = None


def texts(subject: Subject) -> list[Text]:
    """Return the text that the run was trained on."""
    config = subject.config
    found = []
    for source in config.get("data.source") or []:
        if isinstance(source, Mapping):
            found.append(_text(source.get("name"), source.get("path"), source.get("weight")))
    if not found:
        name = config.get("training.dataset")
        found.append(_text(name, config.get("training.dataset_path"), None))
    return [text for text in found if text.name]


def _text(name: object, path: object, weight: object) -> Text:
    """Return a text by its name or by its path, which goes first."""
    shown = str(path or name or "")
    dataset = ""
    of_hub = _OF_HUB.match(shown)
    if of_hub is not None:
        dataset = of_hub[1]
    elif not path and shown not in BUNDLED:
        known = hub_text(shown)
        dataset = "" if known is None else known.repository
    if dataset:
        shown = dataset
    elif shown.startswith(("http://", "https://")):
        shown = public_name(shown)
    elif _name(shown) != shown:
        shown = f"…/{_name(shown)}"
    number = weight if isinstance(weight, (int, float)) else None
    return Text(shown, dataset, number)
