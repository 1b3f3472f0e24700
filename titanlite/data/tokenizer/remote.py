"""Tokenizers behind a URL: https and s3 by fsspec, gs and az by blobfile."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from titanlite.config.urls import package_of
from titanlite.data import DataError
from titanlite.data.tokenizer import FOLDER_FILES, Tokenizer, load_tokenizer
from titanlite.data.tokenizer.hf_json import NAMING_FILES
from titanlite.utils import logger


def load_url(url: str) -> Tokenizer:
    """Copy the files of a tokenizer to a temporary folder and load them. A slash at the end of `url` is a folder's.

    Raises DataError as `load_tokenizer` does, and if `url` cannot be read.
    """
    folder, _, file = url.rpartition("/")
    with tempfile.TemporaryDirectory(prefix="titanlite-tokenizer-") as copies:
        for name in [file] if file else FOLDER_FILES:
            with suppress(FileNotFoundError):
                copy = Path(copies, Path(name).name)
                copy.write_bytes(read_url(f"{folder}/{name}"))
                break
        else:
            expected = "" if file else f" no {' or '.join(FOLDER_FILES)} in it;"
            raise DataError(f"model.tokenizer_path: {url} does not exist:{expected} a folder's URL ends with a slash")
        if copy.read_bytes()[:1] == b"{":
            for beside in NAMING_FILES:
                with suppress(FileNotFoundError):
                    Path(copies, beside).write_bytes(read_url(f"{folder}/{beside}"))
        logger.info(f"tokenizer: a copy of {folder}/{name}")
        try:
            return load_tokenizer(str(copy))
        except DataError as error:
            raise DataError(str(error).replace(copies, folder)) from error


def read_url(url: str) -> bytes:
    scheme = url.partition("://")[0].lower()
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
        raise DataError(f"model.tokenizer_path: {url} needs a package that is missing ({error}): {extra}") from None
    except Exception as error:  # each store has errors of its own
        message = f"model.tokenizer_path: {url} cannot be read ({type(error).__name__}: {error})"
        raise DataError(f"{message}; copy the file, and give its path") from error
