"""The files of a tokenizer: behind a URL (https, s3 by fsspec; gs, az by blobfile), and for a
Hugging Face folder.
"""

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
from titanlite.data.tokenizer.hf_export import CONFIG, equal_files, with_class
from titanlite.data.tokenizer.hf_json import NAMING_FILES
from titanlite.utils import logger, parse_json, public


def load_url(url: str) -> Tokenizer:
    """Copy the files of a tokenizer to a temporary folder and load them.

    A slash at the end of `url` is a folder's.

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
                f"model.tokenizer_path: {public(url)} does not exist:{expected} a folder's URL "
                "ends with a slash"
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
    """Return the content of a URL. Raises FileNotFoundError, and DataError for all else
    that fails.
    """
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
            f"model.tokenizer_path: {public(url)} needs a package that is missing ({error}): "
            f"{extra}"
        ) from None
    except Exception as error:  # each store has errors of its own
        message = public(
            f"model.tokenizer_path: {url} cannot be read ({type(error).__name__}: {error})"
        )
        raise DataError(f"{message}; copy the file, and give its path") from error


GENERATION = "generation_config.json"
#: Files that `transformers` and vLLM read beside the weights.
FILES = (
    *("tokenizer.json", CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", GENERATION),
)


def tokenizer_path(path: str | None, family: str) -> str:
    """Return where a run's tokenizer is, as manifests keep it and `hf_files` takes it.

    None: the bundled one.
    """
    bundled = BUNDLED_SENTENCEPIECE if family == "llama2" else BUNDLED_TOKENIZER
    path = path or str(bundled)
    return path if is_url(path) else str(Path(path).resolve())


def hf_files(path: str) -> dict[str, bytes]:
    """Return name → content of the files for `transformers`, and a generation_config.json.

    path: a tokenizer's file or folder, or its URL. Files that lie there are copied, if
    `AutoTokenizer` reads the ids of titanlite from them, with BOS before a text. Else a
    tokenizer.json and its config are made that give these ids. Without `transformers` the files are
    copied as they are.
    """
    found: dict[str, bytes] = {}
    try:
        if is_url(path):
            with tempfile.TemporaryDirectory(prefix="titanlite-tokenizer-") as copies:
                return hf_files(_download(path, copies))
        file = find_file(Path(path))
        found = {
            name: (file.parent / name).read_bytes()
            for name in FILES
            if (file.parent / name).is_file()
        }
        content, tokenizer = file.read_bytes(), load_tokenizer(path)
        kind = kind_of(content, file)
        if GENERATION not in found:
            ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
            found[GENERATION] = (
                json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n"
            ).encode()
        if importlib.util.find_spec("transformers") is not None:
            found = equal_files(found, content, kind, tokenizer)
        else:
            found.setdefault(
                "tokenizer.json" if kind == "tokenizer.json" else "tokenizer.model", content
            )
            found = with_class(found, tokenizer)
            logger.warning(
                f"{file} is copied as it is: a comparison of its ids needs `pip install "
                "'titanlite[hf]'`"
            )
    except Exception as error:  # of any package: the weights are worth more than these files
        logger.warning(
            f"files of the tokenizer may be missing beside the weights, or give other ids: {error}"
        )
    try:
        if not isinstance(parse_json(found.get(GENERATION, b"{}")), dict):
            raise ValueError("it holds no object")
    except ValueError as error:
        logger.warning(f"{GENERATION} beside the tokenizer is left out: {error}")
        del found[GENERATION]
    return found


def _download(url: str, copies: str) -> str:
    """Copy the files of a tokenizer from a URL, of a file or of a folder; return the path to load
    it by.
    """
    folder, _, file = url.rpartition("/")
    for name in {*FILES, *([file] if file else FOLDER_FILES)}:
        with suppress(FileNotFoundError):
            content = read_url(f"{folder}/{name}")
            copy = Path(copies, name)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(content)
    return str(Path(copies, file))
