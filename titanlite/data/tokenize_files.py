"""Tokenize whole files of text into one array of token ids, with several threads.

The tokenizers' libraries work outside Python's lock, so threads are enough. No process needs a
start, data and an end, and the text is in memory once.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.records import Record
from titanlite.data.rows import FilePlace
from titanlite.data.text_files import iter_records
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import cores, counted, logger, progress_text

if TYPE_CHECKING:
    from titanlite.data.token_files import TokenFiles

#: Seconds between two lines about progress.
REPORT_EVERY = 5.0

#: Part of the fingerprint. Change it with anything that changes the token stream.
PACKING = "BOS + ids + EOS per document, split at seq_len, no document mask, order 2"

#: Characters of text that a thread takes at once. They take a tenth of a second at most, so that an
#: interrupted run ends quickly.
_CHUNK = 256 * 1024

_In = TypeVar("_In")
_Out = TypeVar("_Out")


#: Tokenized documents end to end, in memory or in files.
Tokens: TypeAlias = "Corpus | TokenFiles"


class DocumentArray:
    """Documents end to end: document d is tokens[offsets[d] : offsets[d + 1]], offsets [documents +
    1].
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]

    def documents_in(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return number, from 0, and first token in [begin, end) of each document [documents,
        2].
        """
        place = self.offsets.searchsorted
        numbers = np.arange(place(begin, side="right") - 1, place(end - 1, side="right"))
        return np.stack([numbers, np.maximum(self.offsets[numbers], begin)], axis=1)

    def begins_in(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the first token in [begin, end) of each document there; the first is `begin`."""
        return self.documents_in(begin, end)[:, 1]


@dataclass(frozen=True)
class Corpus(DocumentArray):
    """Tokenized documents in memory, or mapped.

    `tokens`: [all tokens] uint16 (uint32 for vocabularies over 65,536), with BOS and EOS.
    `offsets`: [documents + 1] int64, where documents begin, and the end.
    `fingerprint`: hex sha256 of the texts in order, the tokenizer and the way of packing.
    `files`: of the texts, in order; empty for those of a function.
    `targets`: [all tokens] bool, false for a prompt; None: all tokens count.
    `characters`: of the texts and prompts, if counted.
    """

    tokens: NDArray[np.unsignedinteger]
    offsets: NDArray[np.int64]
    pad_id: int
    fingerprint: str
    files: tuple[Path, ...]
    targets: NDArray[np.bool_] | None = None
    characters: int | None = None
    #: Whether all epochs have the documents in this order, and the order of windows is computed
    #: place by place.
    keeps_order: ClassVar[bool] = False
    #: Files of tokens have hashes, and count bytes; their ids alone may tell documents apart.
    check: ClassVar[None] = None
    text_bytes: ClassVar[None] = None
    cut: ClassVar[str] = ""

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def has_targets(self) -> bool:
        return self.targets is not None

    def read(self, begin: int, end: int) -> NDArray[Any]:
        return self.tokens[begin:end]

    def is_target(self, begin: int, end: int) -> NDArray[np.bool_]:
        if self.targets is None:
            return np.ones(end - begin, dtype=bool)
        return self.targets[begin:end]

    def place_of(self, document: int) -> FilePlace | None:
        """Return None: to find a document, its file is read again."""
        return None

    def describe(self) -> str:
        return f"{counted(self.documents, 'documents')}, {self.size:,} tokens per epoch"


class Document(NamedTuple):
    """A record, its ids with BOS and EOS [tokens], and which of the first are targets."""

    record: Record
    ids: NDArray[Any]
    mask: NDArray[np.bool_]


def tokenize(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    vocab_size: int,
    workers: int = 0,
    records: Iterable[Record] | None = None,
) -> Corpus:
    """Read and tokenize whole files.

    `records` None reads `files` in the default format. `workers` threads tokenize besides this one,
    with the same result. Raises DataError with file and line for the first record that is damaged
    or has an id of `vocab_size` or more.
    """
    digest = hashlib.sha256(f"{PACKING}\n{tokenizer.fingerprint}\n".encode())
    dtype = dtype_for(vocab_size)
    parts: list[NDArray[Any]] = []
    lengths: list[int] = []
    masks: list[NDArray[np.bool_]] = []
    progress = _Progress(files)
    characters = 0
    if records is None:
        records = iter_records(files)
    for documents in encode(records, tokenizer, vocab_size, workers):
        parts.append(np.concatenate([document.ids for document in documents]).astype(dtype))
        for record, ids, mask in documents:
            progress.bytes += _add_text(digest, record)
            characters += len(record.text) + len(record.prompt or "")
            lengths.append(len(ids))
            masks.append(mask)
        progress.report(documents[-1].record, len(lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Corpus(
        tokens=np.concatenate(parts),
        offsets=offsets,
        pad_id=tokenizer.eos_id,
        fingerprint=digest.hexdigest(),
        files=tuple(files),
        targets=targets_of(offsets, masks) if any(map(len, masks)) else None,
        characters=characters,
    )


def workers_of(wanted: int | None, alone: bool = False) -> int:
    """Return `wanted` threads that tokenize, else the node's cores per rank, 8 at most.

    With `alone` the node's other ranks wait meanwhile. Raises DataError if LOCAL_WORLD_SIZE is no
    number.
    """
    if wanted is not None:
        return wanted
    text = "1" if alone else os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdigit():
        raise DataError(
            f"environment variable LOCAL_WORLD_SIZE is {text!r}, expected the number of ranks of "
            "this node; torchrun sets it"
        )
    share = cores() // max(int(text), 1)
    return min(share, 8) if share > 1 else 0


def _add_text(digest: hashlib._Hash, record: Record) -> int:
    texts = [(b"", record.text)]
    if record.prompt:
        texts.insert(0, (b"prompt ", record.prompt))
    size = 0
    for kind, text in texts:
        content = text.encode("utf-8", errors="surrogatepass")
        digest.update(b"%s%d %s" % (kind, len(content), content))
        size += len(content)
    return size


class _Progress:
    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._began = self._reported = time.monotonic()
        #: Bytes of text so far.
        self.bytes = 0

    def report(self, record: Record, documents: int) -> None:
        now = time.monotonic()
        if now - self._reported <= REPORT_EVERY:
            return
        self._reported = now
        # About the bytes of text.
        size = 0.0
        with suppress(OSError):
            size = sum(file.stat().st_size * packing_ratio(file.name) for file in self._files)
        share = progress_text(self.bytes, size, now - self._began)
        logger.info(
            f"reading text: {documents:,} documents, {self.bytes / 1e6:,.0f} MB so "
            f"far{share and f', {share}'}; now in {record.file}, one of "
            f"{counted(len(self._files) or 1, 'files')}"
        )


#: Endings of files whose text is packed.
_PACKED = (".gz", ".zst", ".parquet")
#: Bytes of text to a byte of such a file, as a guess.
_PACKING_RATIO = 2.5


def packing_ratio(name: str) -> float:
    """Return about how many bytes of text a byte of such a file holds."""
    return _PACKING_RATIO if name.endswith(_PACKED) else 1.0


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest dtype that holds the ids of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def targets_of(
    offsets: Sequence[int] | NDArray[np.int64], masks: Sequence[NDArray[np.bool_]]
) -> NDArray[np.bool_]:
    """Return whether each token is a target, by `masks` of documents' first tokens."""
    targets = np.ones(int(offsets[-1]), dtype=bool)
    for begin, mask in zip(offsets, masks, strict=False):
        targets[begin : begin + len(mask)] = mask
    return targets


def encode(
    records: Iterable[Record], tokenizer: Tokenizer, vocab_size: int, workers: int
) -> Iterator[list[Document]]:
    """Tokenize records in `workers` threads; yield some documents at a time, in order.

    Raises DataError for the first bad record or id, after the documents before it.
    """

    def work(chunk: list[Record]) -> list[Document]:
        return [Document(record, *encode_record(record, tokenizer, vocab_size)) for record in chunk]

    return in_order(work, _chunks(records), workers)


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    chunk: list[Record] = []
    size = 0
    try:
        for record in records:
            chunk.append(record)
            size += len(record.text)
            if size >= _CHUNK:
                yield chunk
                chunk = []
                size = 0
    except DataError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def in_order(function: Callable[[_In], _Out], items: Iterable[_In], workers: int) -> Iterator[_Out]:
    """Map over several threads; results and errors come in the items' order."""
    if workers == 0:
        yield from map(function, items)
        return
    ahead: deque[Future[_Out]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="titanlite-tokenize")
    source = iter(items)
    error: StopIteration | DataError | None = None
    try:
        while error is None:
            try:
                ahead.append(pool.submit(function, next(source)))
            except (StopIteration, DataError) as end:
                error = end
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
        if isinstance(error, DataError):
            raise error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encode_record(
    record: Record, tokenizer: Tokenizer, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the ids of a document [tokens], and whether each of its first tokens is a target.

    Later tokens are all targets. A prompt is encoded alone, so that its tokens do not depend on the
    text; it and BOS are no targets. A rendered conversation gets no other BOS or EOS. Raises
    DataError for an id of `vocab_size` or more.
    """
    if record.prompt is None:
        from titanlite.data.chat import encode_chat

        ids, mask = encode_chat(record.text, tokenizer)
    else:
        ids = tokenizer.encode_document(record.text)
        mask = np.zeros(0, dtype=bool)
    if record.prompt:
        before = tokenizer.encode_document(record.prompt)[:-1]
        ids = np.concatenate([before, ids[1:]])
        mask = np.zeros(len(before), dtype=bool)
    if not len(ids):
        raise DataError(
            f"{record.file}: record {record.number} has no tokens; leave it out, or mend the chat "
            "template"
        )
    if ids.max() >= vocab_size:
        wrong = int(ids[ids >= vocab_size][0])
        raise DataError(
            f"{record.file}, line {record.number}: token id {wrong} is outside the model's "
            f"vocabulary of {vocab_size} (the tokenizer has {tokenizer.vocab_size}). Set "
            f"model.vocab_size to at least {tokenizer.vocab_size}, or give the model's own "
            "tokenizer by model.tokenizer_path"
        )
    return ids, mask
