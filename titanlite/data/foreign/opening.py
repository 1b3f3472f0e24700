"""From the keys of a config to the parts of a corpus.

What needs a look at files behind URLs, one rank does for all. The parts that each rank makes then
read when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.config.urls import is_url, public_name
from titanlite.data import DataError
from titanlite.data.connectivity import COPY
from titanlite.data.foreign.find import Found, beside, find_tokens
from titanlite.data.foreign.headers import (
    DATATROVE,
    LLMC,
    NUMPY,
    Header,
    Vocabulary,
    check_sizes,
    guess_type,
    read_header,
)
from titanlite.data.foreign.megatron import megatron_part
from titanlite.data.foreign.parts import Cut, ForeignPart, find_cut
from titanlite.data.foreign.ranges import ByteFile, open_bytes
from titanlite.data.listing import Listing, Place
from titanlite.data.token_parts import TokenPart
from titanlite.utils import counted, logger

if TYPE_CHECKING:
    from titanlite.data.remote import Identity
    from titanlite.data.token_files import TokenKeys
    from titanlite.data.tokenizer import Tokenizer

#: Tokens at the head of the first file that tell how documents are divided.
_FIRST_TOKENS = 1 << 16
#: Headers behind URLs that are read at the same time.
_REQUESTS = 16


class ForeignFiles(NamedTuple):
    """Token files of another program. cut: None where each file has an index."""

    parts: list[TokenPart]
    listing: Listing
    cut: Cut | None = None


class _Facts(NamedTuple):
    """What was seen of a file and of those beside it; sizes in bytes."""

    name: str
    size: int
    header: Header
    index_file: tuple[str, int] | None = None
    loss_file: tuple[str, int] | None = None
    identity: Identity | None = None


@dataclass(frozen=True)
class _Examined:
    """What was seen of all files: enough to make the parts without another look."""

    listing: Listing
    facts: list[_Facts] = field(default_factory=list)
    type_name: str = ""
    was_guessed: bool = False
    cut: Cut | None = None
    #: Whether the head of the first file is long and holds no id between documents.
    has_no_cuts: bool = False


def open_foreign(
    path: str, tokenizer: Tokenizer, vocab_size: int, key: str, keys: TokenKeys
) -> ForeignFiles:
    """Open the token files of another program: a file, a pattern, a folder or a URL.

    key: of the config, for errors. Raises DataError for files that are not whole, are of several
    kinds, or do not tell the type of their ids and leave it open. Raises OSError for local files
    that cannot be read.
    """
    look = partial(_examine, Place(path, key, keys.split), tokenizer, vocab_size, keys)
    seen = keys.share(f"token files of {key}", look) if is_url(path) else look()
    if not seen.facts:
        parts: list[TokenPart] = [megatron_part(Path(name)) for name in seen.listing.files]
        return ForeignFiles(parts, seen.listing)
    if seen.was_guessed:
        logger.info(
            f"{key}: {public_name(path)} does not tell the type of its ids. They are read as "
            f"{seen.type_name}, since the vocabulary has {tokenizer.vocab_size:,} "
            f"({keys.dtype_key} names another type)"
        )
    remedy = f", or set {keys.dtype_key} if they are not {seen.type_name}"
    found: list[TokenPart] = []
    for facts in seen.facts:
        part = _part_of(facts, seen, keys.patience)
        if facts.header.dtype is None:
            part.remedy = remedy
        found.append(part)
    has_indexes = all(facts.index_file is not None for facts in seen.facts)
    if seen.has_no_cuts and seen.cut is not None and not has_indexes:
        logger.warning(
            f"{key}: the first {_FIRST_TOKENS:,} tokens of {found[0].name} do not hold id "
            f"{seen.cut.id}, which divides documents: is model.tokenizer_path theirs?"
        )
    return ForeignFiles(found, seen.listing, None if has_indexes else seen.cut)


def whole_parts(path: str) -> tuple[str, list[TokenPart]]:
    """Return the kind of local token files, and their parts after all checks that need no
    tokenizer; no parts where the files tell nothing to compare.

    Raises DataError and OSError as `open_foreign`.
    """
    found = find_tokens(Place(path, "SOURCE"))
    names = found.listing.files
    if found.is_megatron:
        return "Megatron-LM", [megatron_part(Path(name), thorough=True) for name in names]
    facts = _all_facts(found, 0.0)
    form = facts[0].header.form
    if any(one.header.dtype is None for one in facts):
        return form, []
    seen = _Examined(found.listing, cut=Cut(-1, leads=False))
    parts: list[TokenPart] = []
    for one in facts:
        part = _part_of(one, seen, 0.0)
        if part.index is not None:
            part.find_offsets()
        parts.append(part)
    return form, parts


def _part_of(facts: _Facts, seen: _Examined, patience: float) -> ForeignPart:
    header = facts.header
    dtype = np.dtype(header.dtype or seen.type_name)
    tokens = header.tokens
    if tokens is None:
        tokens = (facts.size - header.first_byte) // dtype.itemsize
    assert seen.cut is not None
    return ForeignPart(
        open_bytes(facts.name, facts.size, patience, facts.identity),
        dtype,
        tokens,
        header.first_byte,
        seen.cut,
        index=open_bytes(*facts.index_file, patience) if facts.index_file else None,
        loss=open_bytes(*facts.loss_file, patience) if facts.loss_file else None,
    )


def _examine(place: Place, tokenizer: Tokenizer, vocab_size: int, keys: TokenKeys) -> _Examined:
    found = find_tokens(place)
    if found.is_megatron:
        if is_url(place.path):
            raise DataError(
                f"{place.key}: Megatron-LM's files are read from a local disk, and "
                f"{public_name(place.path)} is a URL; {COPY}. Fetch .bin and .idx, each by its "
                "URL or both by that of their folder"
            )
        return _Examined(found.listing)
    facts = _all_facts(found, keys.patience)
    _check_one_form(facts, place)
    files = [open_bytes(one.name, one.size, keys.patience) for one in facts]
    vocabulary = Vocabulary(tokenizer.vocab_size, vocab_size)
    type_name, was_guessed = _type_of(facts, files, vocabulary, keys)
    first_tokens = _first_tokens(facts[0], files[0], type_name)
    cut = find_cut(first_tokens, tokenizer, facts[0].header.form == LLMC)
    is_long = len(first_tokens) == _FIRST_TOKENS
    has_no_cuts = is_long and not bool((first_tokens == cut.id).any())
    return _Examined(found.listing, facts, type_name, was_guessed, cut, has_no_cuts)


def _all_facts(found: Found, patience: float) -> list[_Facts]:
    """Read the header of each file, of those behind URLs several at a time."""
    names = found.listing.files
    look = partial(_facts_of, found.sizes, patience)
    if not is_url(names[0]):
        return [look(name) for name in names]
    with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="titanlite-headers") as pool:
        return list(pool.map(look, names))


def _facts_of(sizes: Mapping[str, int], patience: float, name: str) -> _Facts:
    size = sizes.get(name)
    if size is None:
        from titanlite.data.remote import file_size

        size = file_size(name, patience) or 0

    def companion(suffix: str) -> ByteFile | None:
        other = beside(name, suffix)
        return open_bytes(other, sizes[other], patience) if other in sizes else None

    file = open_bytes(name, size, patience)
    header = read_header(file, companion)
    facts = _Facts(name, size, header, identity=file.identity)
    if header.form != DATATROVE:
        return facts
    index = beside(name, ".index")
    loss = beside(name, ".loss")
    if loss in sizes and header.tokens not in (None, sizes[loss]):
        raise DataError(
            f"{public_name(loss)} has {sizes[loss]:,} bytes instead of one for each of "
            f"{header.tokens:,} tokens; copy it again"
        )
    return facts._replace(
        index_file=(index, sizes[index]) if index in sizes else None,
        loss_file=(loss, sizes[loss]) if loss in sizes else None,
    )


def _check_one_form(facts: Sequence[_Facts], place: Place) -> None:
    """Raise DataError for files of several kinds."""
    firsts: dict[str, list[str]] = {}
    for one in facts:
        what = one.header.form
        # Each array of numpy tells its own type.
        if one.header.dtype is not None and what != NUMPY:
            what += f" of {np.dtype(one.header.dtype)}"
        if what.startswith(DATATROVE):
            what += " with an index" if one.index_file else " without an index"
        firsts.setdefault(what, []).append(public_name(one.name))
    if len(firsts) > 1:
        kinds = [
            f"{counted(len(names), 'files')} of {what}, as {names[0]}"
            for what, names in firsts.items()
        ]
        raise DataError(
            f"{place.key}: {public_name(place.path)} holds token files of several kinds: "
            f"{'; '.join(kinds)}. Name those of one kind by a pattern, or put them into folders"
        )


def _type_of(
    facts: Sequence[_Facts], files: Sequence[ByteFile], vocabulary: Vocabulary, keys: TokenKeys
) -> tuple[str, bool]:
    """Return the type of ids of all files, and whether it is a guess."""
    told = facts[0].header.dtype
    if told is not None:
        found = str(np.dtype(told))
        if keys.dtype not in ("auto", found):
            raise DataError(
                f"{keys.dtype_key}: {keys.dtype} has no effect on {files[0].name}, which tells "
                f"that its ids are {found}; leave the key out"
            )
        return found, False
    if keys.dtype != "auto":
        check_sizes(files, keys.dtype, keys.dtype_key)
        return keys.dtype, False
    return guess_type(files, vocabulary, keys.dtype_key), True


def _first_tokens(facts: _Facts, file: ByteFile, type_name: str) -> NDArray[Any]:
    header = facts.header
    dtype = np.dtype(header.dtype or type_name)
    head = file.read(header.first_byte, _FIRST_TOKENS * dtype.itemsize)
    return np.frombuffer(head, dtype, len(head) // dtype.itemsize)
