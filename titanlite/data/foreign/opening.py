"""From the keys of a config to the parts of a corpus.

What needs a look at files behind URLs, one rank does for all. The parts that each rank makes then
read when they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from titanlite.config.urls import is_url, public_name
from titanlite.data import DataError
from titanlite.data.connectivity import COPY
from titanlite.data.foreign.find import find_tokens
from titanlite.data.foreign.headers import Header, check_size, guess_type, read_header
from titanlite.data.foreign.megatron import megatron_part
from titanlite.data.foreign.parts import Cut, ForeignPart, find_cut
from titanlite.data.foreign.ranges import ByteFile, open_bytes
from titanlite.data.listing import Listing, Place
from titanlite.data.token_parts import TokenPart
from titanlite.utils import logger

if TYPE_CHECKING:
    from titanlite.data.token_files import TokenKeys
    from titanlite.data.tokenizer import Tokenizer

#: Tokens at the head of the first file that tell how documents are divided.
_FIRST_TOKENS = 1 << 16
#: Headers behind URLs that are read at the same time.
_REQUESTS = 16


class _File(NamedTuple):
    """A file, its bytes, and what it tells."""

    name: str
    size: int
    header: Header


class _Seen(NamedTuple):
    """What was seen of all files: enough to make the parts without another look.

    files: of others than Megatron-LM. raw_type: of ids that no file tells; "": all tell it. cut:
    None: an index tells documents apart.
    """

    listing: Listing
    files: Sequence[_File] = ()
    raw_type: str = ""
    cut: Cut | None = None


def open_foreign(
    path: str, tokenizer: Tokenizer, vocab_size: int, key: str, keys: TokenKeys
) -> tuple[list[TokenPart], Listing, Cut | None]:
    """Open the token files of another program: a file, a pattern, a folder or a URL.

    Returns the parts, the files, and what tells documents apart (None: an index).

    key: of the config, for errors. Raises DataError for files that are not whole, are of several
    kinds, or do not tell the type of their ids and leave it open. Raises OSError for local files
    that cannot be read.
    """
    look = partial(_look, Place(path, key, keys.split), tokenizer, vocab_size, keys)
    seen = keys.share(f"token files of {key}", look) if is_url(path) else look()
    if seen.cut is None:
        return [megatron_part(Path(name)) for name in seen.listing.files], seen.listing, None
    if seen.raw_type and keys.dtype == "auto":
        logger.info(
            f"{key}: {public_name(path)} does not tell the type of its ids. They are read as "
            f"{seen.raw_type}, since the vocabulary has {tokenizer.vocab_size:,} "
            f"({keys.dtype_key} names another type)"
        )
    parts: list[TokenPart] = []
    for name, size, header in seen.files:
        dtype = np.dtype(header.dtype or seen.raw_type)
        remedy = "" if header.tokens else f", or set {keys.dtype_key} if they are not {dtype}"
        tokens = header.tokens or (size - header.first_byte) // dtype.itemsize
        file = open_bytes(name, size, keys.patience)
        parts.append(ForeignPart(file, dtype, tokens, header.first_byte, seen.cut, remedy))
    return parts, seen.listing, seen.cut


def _look(place: Place, tokenizer: Tokenizer, vocab_size: int, keys: TokenKeys) -> _Seen:
    found = find_tokens(place)
    if found.is_megatron and not is_url(place.path):
        return _Seen(found.listing)
    if found.is_megatron:
        raise DataError(
            f"{place.key}: Megatron-LM's files are read from a local disk, and "
            f"{public_name(place.path)} is a URL; {COPY}"
        )
    names = found.listing.files
    with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="titanlite-headers") as pool:
        files = list(pool.map(partial(_read, found.sizes, keys.patience), names))
    raw_type = _raw_type(files, tokenizer, vocab_size, keys)
    name, size, header = files[0]
    dtype = np.dtype(header.dtype or raw_type)
    head = open_bytes(name, size, keys.patience).read(
        header.first_byte, _FIRST_TOKENS * dtype.itemsize
    )
    first_tokens = np.frombuffer(head, dtype, len(head) // dtype.itemsize)
    cut = find_cut(first_tokens, tokenizer, header.leads)
    if len(first_tokens) == _FIRST_TOKENS and not (first_tokens == cut.id).any():
        logger.warning(
            f"{place.key}: the first {_FIRST_TOKENS:,} tokens of {public_name(name)} do not hold "
            f"id {cut.id}, which divides documents: is model.tokenizer_path theirs?"
        )
    return _Seen(found.listing, files, raw_type, cut)


def _read(sizes: Mapping[str, int], patience: float, name: str) -> _File:
    """Read the header of a file."""
    loss = f"{name}.loss"
    if name.endswith(".ds") and (loss in sizes or os.path.exists(loss)):
        raise DataError(
            f"{public_name(loss)} masks tokens, which is not read; prepare the text, or remove the "
            "file to train on all tokens"
        )
    size = sizes.get(name)
    if size is None:
        from titanlite.data.remote import file_size

        size = file_size(name, patience) or 0
    return _File(name, size, read_header(open_bytes(name, size, patience)))


def _raw_type(
    files: Sequence[_File], tokenizer: Tokenizer, vocab_size: int, keys: TokenKeys
) -> str:
    """Return the type of the ids of files that do not tell it; "": all tell it.

    Raises DataError where the config gives a type to a file that tells another one.
    """
    raw: list[ByteFile] = []
    for name, size, header in files:
        told = header.dtype and str(np.dtype(header.dtype))
        if not told:
            raw.append(open_bytes(name, size, keys.patience))
        elif keys.dtype not in ("auto", told):
            raise DataError(
                f"{keys.dtype_key}: {keys.dtype} has no effect on {public_name(name)}, which tells "
                f"that its ids are {told}; leave the key out"
            )
    if not raw:
        return ""
    found = keys.dtype
    if found == "auto":
        found = guess_type(raw, tokenizer.vocab_size, vocab_size, keys.dtype_key)
    for file in raw:
        check_size(file, found, keys.dtype_key)
    return found
