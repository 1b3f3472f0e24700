"""The files of a tokenizer for a folder of Hugging Face's."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from contextlib import suppress
from pathlib import Path

from titanlite.config.urls import is_url
from titanlite.data.tokenizer import (
    BUNDLED_SENTENCEPIECE,
    BUNDLED_TOKENIZER,
    find_file,
    kind_of,
    load_tokenizer,
)
from titanlite.utils import logger

GENERATION = "generation_config.json"
#: Files that `transformers` and vLLM read beside the weights.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", GENERATION),
)


def tokenizer_path(path: str | None, family: str) -> str:
    """Return where a run's tokenizer is, as manifests keep it and `hf_files` takes it. None: the bundled one."""
    bundled = BUNDLED_SENTENCEPIECE if family == "llama2" else BUNDLED_TOKENIZER
    path = path or str(bundled)
    return path if is_url(path) else str(Path(path).resolve())


def hf_files(path: str) -> dict[str, bytes]:
    """Return name → content of the files for `transformers`, and a generation_config.json.

    path: a tokenizer's file or folder, or its URL. Files that lie there are copied. A rank file of tiktoken's or a
    sentencepiece model alone becomes a tokenizer.json, if `transformers` is installed.
    """
    found: dict[str, bytes] = {}
    try:
        if is_url(path):
            from titanlite.data.tokenizer.remote import read_url

            folder = path.rpartition("/")[0]
            for name in FILES:
                with suppress(FileNotFoundError):
                    found[name] = read_url(f"{folder}/{name}")
        else:
            file = find_file(Path(path))
            found = {name: (file.parent / name).read_bytes() for name in FILES if (file.parent / name).is_file()}
            kind = kind_of(file.read_bytes(), file)
            if kind != "tokenizer.json" and not {"tokenizer.json", "tokenizer_config.json"} & found.keys():
                found = {name: found[name] for name in ("chat_template.jinja", GENERATION) if name in found}
                if importlib.util.find_spec("transformers") is not None:
                    found |= _converted(file, kind)
                else:
                    found["tokenizer.model"] = file.read_bytes()
                    logger.warning(f"{file} is copied as it is: tokenizer.json needs `pip install 'titanlite[hf]'`")
        if GENERATION not in found:
            tokenizer = load_tokenizer(path)
            ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
            found[GENERATION] = (json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n").encode()
    except Exception as error:  # of any package: the weights are worth more than these files
        logger.warning(f"files of the tokenizer are missing beside the weights: {error}")
    try:
        if not isinstance(json.loads(found.get(GENERATION, b"{}")), dict):
            raise ValueError("it holds no object")
    except (ValueError, RecursionError) as error:
        logger.warning(f"{GENERATION} beside the tokenizer is left out: {error}")
        del found[GENERATION]
    return found


def _converted(file: Path, kind: str) -> dict[str, bytes]:
    """Return the files that `transformers` makes of a rank file or a sentencepiece model; texts begin with BOS."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "sentencepiece":
            from transformers import LlamaTokenizer

            Path(folder, "tokenizer.model").write_bytes(file.read_bytes())
            LlamaTokenizer.from_pretrained(folder).save_pretrained(folder)
        else:
            from tokenizers.processors import TemplateProcessing
            from transformers import PreTrainedTokenizerFast
            from transformers.convert_slow_tokenizer import TikTokenConverter

            from titanlite.data.tokenizer.tiktoken_ranks import BOS, EOS, SPECIAL_TOKENS, SPLIT_PATTERN

            special = list(SPECIAL_TOKENS)
            made = TikTokenConverter(vocab_file=str(file), pattern=SPLIT_PATTERN, extra_special_tokens=special)
            theirs = made.converted()
            theirs.post_processor = TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, theirs.token_to_id(BOS))]
            )
            PreTrainedTokenizerFast(tokenizer_object=theirs, bos_token=BOS, eos_token=EOS).save_pretrained(folder)
        return {name: Path(folder, name).read_bytes() for name in FILES if Path(folder, name).is_file()}
