"""Tokenize whole files of text into one array of token ids, with several threads.

The tokenizers' libraries work outside Python's lock, so threads are enough. No process needs a start, data and an end,
and the text is in memory once.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from titanlite.data import DataError
from titanlite.data.chat import encode_chat
from titanlite.data.sources import Record, iter_records
from titanlite.data.tokenizer import Tokenizer
from titanlite.utils import logger

#: Seconds between two lines about progress.
REPORT_EVERY = 5.0

#: Part of the fingerprint. Change it with anything that changes the token stream.
PACKING = "BOS + ids + EOS per document, split at seq_len, no document mask, order 2"

#: Bytes of text that a thread takes at once: a tenth of a second at most, so that an interrupted run ends quickly.
_CHUNK = 256 * 1024

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, end to end.

    `tokens`: [all tokens] uint16 (uint32 for vocabularies over 65,536), each document with BOS and EOS;
    `offsets`: [documents + 1] int64, document d is tokens[offsets[d] : offsets[d + 1]];
    `fingerprint`: hex sha256 of the texts in order, the tokenizer and the way of packing;
    `files`: of the texts, in order; empty for those that a function returned;
    `targets`: [all tokens] bool, false where the loss does not count a token (a prompt); None: all of them count.
    """

    tokens: NDArray[np.unsignedinteger]
    offsets: NDArray[np.int64]
    pad_id: int
    fingerprint: str
    files: tuple[Path, ...]
    targets: NDArray[np.bool_] | None = None


class _Chunk(NamedTuple):
    """Neighbouring records, and the error that reading ended with after them."""

    records: list[Record]
    error: DataError | None


def tokenize(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    vocab_size: int,
    workers: int = 0,
    records: Iterable[Record] | None = None,
) -> Corpus:
    """Read and tokenize whole files.

    records: the documents; None: those of `files` in the default format.
    workers: threads that tokenize, besides this one that reads; 0: this one does both. The result is the same.

    Raises DataError with file and line for the first record in file order that is damaged or has a token id of
    `vocab_size` (the model's) or more.
    """
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    digest = hashlib.sha256(f"{PACKING}\n{tokenizer.fingerprint}\n".encode())

    def encode(chunk: _Chunk) -> tuple[NDArray[np.unsignedinteger], list[int], NDArray[np.bool_] | None]:
        documents = [encode_record(record, tokenizer, vocab_size) for record in chunk.records]
        if chunk.error is not None:
            raise chunk.error
        targets = None
        if any(len(mask) for _, mask in documents):
            targets = np.concatenate([are_targets(mask, 0, len(ids)) for ids, mask in documents])
        return np.concatenate([ids for ids, _ in documents]).astype(dtype), [len(ids) for ids, _ in documents], targets

    parts: list[NDArray[np.unsignedinteger]] = []
    target_parts: list[NDArray[np.bool_] | None] = []
    lengths: list[int] = []
    chunks = _chunks(iter_records(files) if records is None else records, len(files), digest.update)
    for tokens, counts, targets in in_order(encode, chunks, workers):
        parts.append(tokens)
        target_parts.append(targets)
        lengths += counts
    targets = None
    if any(part is not None for part in target_parts):
        all_count = (np.ones(len(tokens), np.bool_) for tokens in parts)
        targets = np.concatenate(
            [t if t is not None else ones for t, ones in zip(target_parts, all_count, strict=True)]
        )
    return Corpus(
        tokens=np.concatenate(parts),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        pad_id=tokenizer.eos_id,
        fingerprint=digest.hexdigest(),
        files=tuple(files),
        targets=targets,
    )


def _chunks(source: Iterable[Record], files: int, update: Callable[[bytes], None]) -> Iterator[_Chunk]:
    """Iterate over records of so many files in chunks; `update` gets every prompt and text after its length.

    An error comes as part of the last chunk: a thread may find another one in the records before it.
    """
    records: list[Record] = []
    size = read = documents = 0
    reported = time.monotonic()
    seen: set[Path | str] = set()
    try:
        for record in source:
            seen.add(record.file)
            content = record.text.encode("utf-8", errors="surrogatepass")
            if record.prompt:
                prompt = record.prompt.encode("utf-8", errors="surrogatepass")
                update(b"prompt %d " % len(prompt) + prompt)
            update(b"%d " % len(content))
            update(content)
            records.append(record)
            size += len(content)
            read += len(content)
            documents += 1
            if time.monotonic() - reported > REPORT_EVERY:
                reported = time.monotonic()
                logger.info(
                    f"reading text: {documents:,} documents, {read / 1e6:,.0f} MB so far; now in {record.file}, "
                    f"file {len(seen)} of {files or 1}"
                )
            if size >= _CHUNK:
                yield _Chunk(records, None)
                records, size = [], 0
    except DataError as error:
        yield _Chunk(records, error)
    else:
        if records:
            yield _Chunk(records, None)


def in_order(function: Callable[[_In], _Out], items: Iterable[_In], workers: int) -> Iterator[_Out]:
    """Map over several threads, a few items at a time; results and errors come in the items' order."""
    if workers == 0:
        yield from map(function, items)
        return
    ahead: deque[Future[_Out]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="titanlite-tokenize")
    try:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encode_record(record: Record, tokenizer: Tokenizer, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the ids of a document [tokens], and whether each of its first tokens is a target; those after them are.

    A prompt is encoded by itself, so that its tokens do not depend on the text after it. It and BOS before it are no
    targets. A rendered conversation gets no BOS or EOS besides its own. Raises DataError for an id of `vocab_size` (the
    model's) or more.
    """
    if record.prompt is None:
        ids, mask = encode_chat(record.text, tokenizer)
    else:
        ids, mask = tokenizer.encode_document(record.text), np.zeros(0, dtype=bool)
    if record.prompt:
        before = tokenizer.encode_document(record.prompt)[:-1]
        ids, mask = np.concatenate([before, ids[1:]]), np.zeros(len(before), dtype=bool)
    if ids.max() >= vocab_size:
        raise _over_vocabulary(record, int(ids[ids >= vocab_size][0]), vocab_size, tokenizer)
    return ids, mask


def are_targets(mask: NDArray[np.bool_], begin: int, end: int) -> NDArray[np.bool_]:
    """Return whether tokens [begin, end) of a document are targets. mask: see `encode_record`."""
    found = np.ones(end - begin, dtype=bool)
    known = mask[begin:end]
    found[: len(known)] = known
    return found


def _over_vocabulary(record: Record, token_id: int, vocab_size: int, tokenizer: Tokenizer) -> DataError:
    return DataError(
        f"{record.file}, line {record.number}: token id {token_id} is outside the model's vocabulary of {vocab_size} "
        f"(the tokenizer has {tokenizer.vocab_size}); set model.vocab_size to at least {tokenizer.vocab_size}, "
        "or give the model's own tokenizer by model.tokenizer_path"
    )
