"""The files of a tokenizer: behind a URL (https, s3 by fsspec; gs, az by blobfile), and for a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from contextlib import suppress
from pathlib import Path

from titanlite.config.urls import chain_problem, is_url, package_of
from titanlite.data import DataError
from titanlite.data.remote import check_url
from titanlite.data.tokenizer import (
    BUNDLED_SENTENCEPIECE,
    BUNDLED_TOKENIZER,
    FOLDER_FILES,
    Tokenizer,
    find_file,
    kind_of,
    load_tokenizer,
)
from titanlite.data.tokenizer.hf_json import NAMING_FILES
from titanlite.utils import logger, parse_json, public


def load_url(url: str) -> Tokenizer:
    """Copy the files of a tokenizer to a temporary folder and load them. A slash at the end of `url` is a folder's.

    Raises DataError as `load_tokenizer` does, and if `url` cannot be read.
    """
    path, mark, query = url.partition("?")  # a signature is of one file: those beside it have none
    folder, _, file = path.rpartition("/")
    with tempfile.TemporaryDirectory(prefix="titanlite-tokenizer-") as copies:
        for name in [file] if file else FOLDER_FILES:
            with suppress(FileNotFoundError):
                copy = Path(copies, Path(name).name)
                copy.write_bytes(read_url(f"{folder}/{name}{mark}{query}"))
                break
        else:
            expected = "" if file else f" no {' or '.join(FOLDER_FILES)} in it;"
            raise DataError(
                f"model.tokenizer_path: {public(url)} does not exist:{expected} a folder's URL ends with a slash"
            )
        if copy.read_bytes()[:1] == b"{":
            for beside in NAMING_FILES:
                with suppress(FileNotFoundError):
                    Path(copies, beside).write_bytes(read_url(f"{folder}/{beside}"))
        logger.info(f"tokenizer: a copy of {folder}/{name}")
        try:
            tokenizer = load_tokenizer(str(copy))
        except DataError as error:
            raise DataError(str(error).replace(copies, folder)) from error
    tokenizer.folder = folder
    return tokenizer


def read_url(url: str) -> bytes:
    """Return the content of a URL. Raises FileNotFoundError, and DataError for all else that fails."""
    check_url("model.tokenizer_path", url)
    scheme = url.partition("://")[0].lower()
    if reason := chain_problem(url):
        raise DataError(f"model.tokenizer_path: {url} {reason}")
    try:
        if scheme in ("gs", "az"):
            import blobfile

            # It retries for ever by default.
            with blobfile.create_context(retry_limit=5).BlobFile(url, "rb") as file:
                return bytes(file.read())
        from fsspec.core import url_to_fs

        system, path = url_to_fs(url)
        return bytes(system.cat_file(path))
    except FileNotFoundError:
        raise
    except ImportError as error:
        extra = package_of(scheme) if scheme.startswith("s3") else "pip install 'titanlite[data]'"
        raise DataError(
            f"model.tokenizer_path: {public(url)} needs a package that is missing ({error}): {extra}"
        ) from None
    except Exception as error:  # each store has errors of its own
        message = public(f"model.tokenizer_path: {url} cannot be read ({type(error).__name__}: {error})")
        raise DataError(f"{message}; copy the file, and give its path") from error


GENERATION, CONFIG = "generation_config.json", "tokenizer_config.json"
#: Files that `transformers` and vLLM read beside the weights.
FILES = (
    *("tokenizer.json", CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json"),
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
            from titanlite.data.tokenizer.files import read_url

            folder = path.rpartition("/")[0]
            for name in FILES:
                with suppress(FileNotFoundError):
                    found[name] = read_url(f"{folder}/{name}")
        else:
            file = find_file(Path(path))
            found = {name: (file.parent / name).read_bytes() for name in FILES if (file.parent / name).is_file()}
            kind = kind_of(file.read_bytes(), file)
            if kind != "tokenizer.json" and not {"tokenizer.json", CONFIG} & found.keys():
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
        config = parse_json(found.get(CONFIG, b"{}"))
        if "tokenizer.json" in found and "tokenizer_class" not in config:
            # Without a class `transformers` takes that of the model's family, which may split text by rules of its own.
            tokenizer = load_tokenizer(path)
            named = {number: name for name, number in tokenizer.special_tokens.items()}
            ends = {"bos_token": named[tokenizer.bos_id], "eos_token": named[tokenizer.eos_id]}
            config = {"tokenizer_class": "PreTrainedTokenizerFast", **ends, **config}
            found[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    except Exception as error:  # of any package: the weights are worth more than these files
        logger.warning(f"files of the tokenizer are missing beside the weights: {error}")
    try:
        if not isinstance(parse_json(found.get(GENERATION, b"{}")), dict):
            raise ValueError("it holds no object")
    except ValueError as error:
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
