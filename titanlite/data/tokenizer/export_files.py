"""The files of a tokenizer for a folder that `transformers` reads."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from titanlite.data.tokenizer.base import Tokenizer
from titanlite.data.tokenizer.hf_export import CONFIG, equal_files, with_class
from titanlite.data.tokenizer.load_local import find_file, kind_of, load_local
from titanlite.utils import logger, parse_json, pip_install

GENERATION = "generation_config.json"
#: Files that `transformers` and vLLM read beside the weights.
FILES = (
    "tokenizer.json",
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)
#: Names of which one is the tokenizer itself.
_OWN = ("tokenizer.json", "tokenizer.model")


def hf_files(path: str) -> dict[str, bytes]:
    """Return the tokenizer's files and a generation_config.json for `transformers`, by name.

    Files are copied if `AutoTokenizer` reads our ids from them, with BOS before a text, or without
    `transformers`. Else a tokenizer.json and its config are made.
    """
    found: dict[str, bytes] = {}
    try:
        file = find_file(Path(path))
        beside = [file.parent / name for name in FILES]
        if file.name not in _OWN:
            # Files of these names are of another tokenizer then.
            beside = [one for one in beside if one.name not in _OWN]
        found = {one.name: one.read_bytes() for one in beside if one.is_file()}
        content = file.read_bytes()
        tokenizer = load_local(path)
        kind = kind_of(content, file)
        found[GENERATION] = _generation(found.get(GENERATION), tokenizer)
        if importlib.util.find_spec("transformers") is not None:
            return equal_files(found, content, kind, tokenizer)
        found.setdefault(kind if kind.endswith(".json") else "tokenizer.model", content)
        found = with_class(found, tokenizer)
        logger.warning(
            f"{file} is copied as it is: a comparison of its ids needs the package transformers: "
            f"{pip_install('transformers')}"
        )
    except Exception as error:
        # An error of any package: the weights are worth more than these files.
        logger.warning(
            f"files of the tokenizer may be missing beside the weights, or give other ids: {error}"
        )
    return found


def _generation(content: bytes | None, tokenizer: Tokenizer) -> bytes:
    config: dict[str, Any] = {"_from_model_config": True, "bos_token_id": tokenizer.bos_id}
    if content is not None:
        config = parse_json(content)
    given = config.get("eos_token_id")
    listed = given if isinstance(given, list) else [given]
    ends = [one for one in dict.fromkeys([*listed, *tokenizer.stop_ids]) if one is not None]
    config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return (json.dumps(config, indent=2) + "\n").encode()
