"""The files of a tokenizer behind a URL: https, s3 by fsspec; gs, az by blobfile."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from titanlite.data import DataError
from titanlite.data.connectivity import reach
from titanlite.data.remote import check_url, url_to_fs
from titanlite.data.tokenizer.base import Tokenizer
from titanlite.data.tokenizer.hf_json import NAMING_FILES
from titanlite.data.tokenizer.local import FOLDER_FILES, load_local
from titanlite.utils import MissingPackageError, logger, pip_install, public


def load_url(url: str, family: str) -> Tokenizer:
    """Copy the files of a tokenizer to a temporary folder and load them.

    A slash at the end of `url` is a folder's.

    Raises DataError as `load_tokenizer` does, and if `url` cannot be read.
    """
    # A signature is of one file: those beside it have none.
    path, mark, query = url.partition("?")
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
            tokenizer = load_local(str(copy), family)
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
    remedy = "copy the file on a machine with a network, and give its path"
    # blobfile takes the account from the URL.
    server = url
    if scheme == "az":
        server = f"https://{url.split('/')[2]}.blob.core.windows.net"
    reach(server, f"model.tokenizer_path: {public(url)} cannot be read", remedy)
    try:
        if scheme in ("gs", "az"):
            import blobfile

            # It retries for ever by default.
            with blobfile.create_context(retry_limit=5).BlobFile(url, "rb") as file:
                return bytes(file.read())
        system, path = url_to_fs(url)
        return bytes(system.cat_file(path))
    except FileNotFoundError:
        raise
    except MissingPackageError as error:
        raise DataError(f"model.tokenizer_path: {public(url)} cannot be read: {error}") from None
    except ImportError:
        raise DataError(
            f"model.tokenizer_path: {public(url)} needs the package blobfile: "
            f"{pip_install('blobfile')}"
        ) from None
    except Exception as error:
        # Each store has its own errors.
        message = public(
            f"model.tokenizer_path: {url} cannot be read ({type(error).__name__}: {error})"
        )
        raise DataError(f"{message}; copy the file, and give its path") from error
