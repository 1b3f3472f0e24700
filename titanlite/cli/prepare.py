"""Tokenize text once, into a folder of token files that training maps
(`titanlite.data.prepared_tokens`).

Processes tokenize tasks: neighbouring files, or a range of a large one. A part of the tokens counts
once its record `part-*.json` exists. After a crash, parts whose checksums and texts still fit are
kept. The content does not depend on crashes or on the number of processes. The index comes last.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.checkpoint.manifest import digest_of, new_hash
from titanlite.cli.prepare_work_units import (
    Options,
    Task,
    divide,
    hash_of,
    records_of,
)
from titanlite.config.urls import public_name
from titanlite.data import DataError
from titanlite.data.prepared_tokens import (
    VERSION,
    checksum_of,
    fingerprint_of,
    hashes_of,
    read_index,
)
from titanlite.data.text_files import TextFiles
from titanlite.data.token_paths import INDEX, KIND, is_index
from titanlite.data.tokenize_files import Document, dtype_for, encode, targets_of
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.dist.parent_death import end_with_parent
from titanlite.runs.lock import LockedError, RunLock
from titanlite.utils import (
    atomic_write,
    counted,
    human_bytes,
    new_file,
    parse_json,
    progress_text,
    public_tree,
    say,
    sync,
)

PLAN = "prepare.json"
_HASH = "xxh3"
#: Seconds for a remote source to come back, and between two lines of progress.
_PATIENCE = 300.0
_REPORT_SECONDS = 10.0


def prepare(
    source: str,
    shards: TextFiles,
    folder: Path,
    options: Options,
    tokenizer: Tokenizer,
    workers: int,
) -> str:
    """Tokenize files into a folder; return a summary. source: their name, for the folder's plan.

    Raises DataError for text that cannot be read, and for a folder that holds something else or is
    being written to.
    """
    tasks = divide(shards, options, tokenizer)
    asked = {
        "source": source,
        "options": options.to_json(),
        "tokenizer": tokenizer.fingerprint,
    }
    # It is equal with another signature of the same file, too.
    plan: dict[str, Any] = public_tree(asked)
    stamp = hash_of([task.stamp for task in tasks])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_others(folder, plan, stamp)
        with RunLock(folder, "out"):
            if is_index(folder / INDEX):
                index = read_index(folder)
                if all(_is_whole(folder, part) for part in index["parts"]):
                    return (
                        f"{folder} is complete already, and its checksums are "
                        f"right\n{summary(index, folder)}"
                    )
                _reopen(folder, index)
            # Half-written files are of a process that was killed.
            for name in (PLAN, INDEX, "part-*"):
                for path in folder.glob(f".{name}.*"):
                    path.unlink()
            atomic_write(folder / PLAN, json.dumps(plan))
            files = replace(shards, names=(), listing=None, patience=_PATIENCE)
            parts = _run(tasks, files, folder, options, workers)
            if not any(part["tokens"] for part in parts):
                raise DataError(f"{public_name(source)} holds no records")
            index = _publish(folder, parts, tokenizer, plan | {"stamp": stamp})
    except LockedError as error:
        raise DataError(f"{folder} is being prepared by another process: {error}") from None
    except OSError as error:
        problem = f"{error.filename or folder}: {error.strerror or error}"
        if (folder / PLAN).exists():
            problem += "; finished parts are kept: run the same command again"
        raise DataError(problem) from error
    text = summary(index, folder)
    return f"{shards.listing.describe()}\n{text}" if shards.listing else text


def _read(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(parse_json(file.read_bytes()))
    return {}


# The folder


def _refuse_others(folder: Path, plan: dict[str, Any], stamp: str) -> None:
    """Raise DataError for a folder that holds anything but this text."""
    other = "name another folder, or remove this one"
    known: dict[str, Any] = {}
    if is_index(folder / INDEX):
        known = read_index(folder)
    elif any(folder.glob("part-*.json")):
        known = _read(folder / PLAN)
    changed = [name for name in plan if known.get(name) != plan[name]]
    if not changed and known.get("stamp", stamp) != stamp:
        changed = ["text"]
    if known and changed:
        raise DataError(
            f"{folder} holds tokens of {known.get('source')} with another "
            f"{' and '.join(changed)}; give the same arguments to finish or check it, or {other}"
        )
    # A plan without a finished part is of an attempt that left nothing to keep.
    if known or (folder / PLAN).exists():
        return
    locks = (".run.lock", "run.lock")
    found = sorted(name for name in os.listdir(folder) if not name.startswith(locks))
    if found:
        raise DataError(f"{folder} holds other files ({found[0]}, …); {other}")


def _is_whole(folder: Path, part: dict[str, Any]) -> bool:
    try:
        hashes_of(folder, part).compare()
    except (DataError, OSError):
        return False
    return True


def _reopen(folder: Path, index: dict[str, Any]) -> None:
    """Turn a finished folder, of which a part is damaged, into an unfinished one."""
    for part in index["parts"]:
        sources = [[index["files"][file], *rest] for file, *rest in part["sources"]]
        content = json.dumps({**part, "sources": sources})
        atomic_write(folder / f"{part['name']}.json", content)
    (folder / INDEX).unlink()


def _publish(
    folder: Path, parts: list[dict[str, Any]], tokenizer: Tokenizer, plan: dict[str, Any]
) -> dict[str, Any]:
    files = list(dict.fromkeys(file for part in parts for file, _, _ in part["sources"]))
    numbers = {file: n for n, file in enumerate(files)}
    for part in parts:
        part["sources"] = [[numbers[file], *rest] for file, *rest in part["sources"]]
    index: dict[str, Any] = {
        "format": KIND,
        "version": VERSION,
        "dtype": dtype_for(tokenizer.vocab_size).str,
        "tokens": sum(part["tokens"] for part in parts),
        "documents": sum(part["documents"] for part in parts),
        "text_bytes": sum(part["text_bytes"] for part in parts),
        "max_id": max(part["max_id"] for part in parts),
        **plan,
        "tokenizer_path": plan["options"]["tokenizer_path"],
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "files": files,
        "parts": parts,
    }
    index["fingerprint"] = fingerprint_of(index)
    index["checksum"] = checksum_of(index)
    ours = {f"{part['name']}.{suffix}" for part in parts for suffix in part["bytes"]}
    for path in folder.glob("part-*"):
        # Other parts are of a text that has become shorter since.
        if path.name not in ours and path.suffix != ".json":
            path.unlink()
    atomic_write(folder / INDEX, json.dumps(index))
    for path in (*folder.glob("part-*.json"), folder / PLAN):
        path.unlink(missing_ok=True)
    return index


def summary(index: dict[str, Any], folder: Path) -> str:
    """Return the figures of a prepared folder."""
    text = index["text_bytes"]
    tokens = index["tokens"]
    size = sum(sum(part["bytes"].values()) for part in index["parts"])
    return (
        f"{folder}: {counted(index['documents'], 'documents')}, {counted(tokens, 'tokens')}, "
        f"{human_bytes(text)} of text, {text / tokens:.2f} bytes per token\n"
        f"{counted(len(index['parts']), 'parts')}, {human_bytes(size)}\n"
        f'train on them with training.dataset_path = "{folder}"'
    )


# Tokenizing


@dataclass(frozen=True)
class _Worker:
    """State that a process keeps between tasks."""

    shards: TextFiles
    folder: Path
    options: Options
    #: That tokenize beside the process itself.
    threads: int
    #: Tokens of all processes.
    done: Any
    #: Set when the others have failed or were interrupted.
    stop: Any

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.options.tokenizer_path)

    def count(self, tokens: int) -> None:
        with self.done:
            self.done.value += tokens


_worker: list[_Worker] = []


def _start(worker: _Worker) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    parent = multiprocessing.parent_process()
    # A writer without a parent would disturb the next attempt.
    end_with_parent(signal.SIGKILL, parent.pid if parent else None)
    _worker.append(worker)


def _run(
    tasks: list[Task], shards: TextFiles, folder: Path, options: Options, workers: int
) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    processes = max(1, min(workers, len(tasks)))
    done = context.Value("q", 0)
    stop = context.Event()
    threads = workers // processes
    worker = _Worker(shards, folder, options, threads if threads > 1 else 0, done, stop)
    began = time.monotonic()
    with ProcessPoolExecutor(processes, context, _start, (worker,)) as pool:
        futures: list[Future[list[dict[str, Any]]]] = [
            pool.submit(_tokenize, task) for task in tasks
        ]
        try:
            while True:
                finished, left = wait(futures, _REPORT_SECONDS, FIRST_EXCEPTION)
                for future in finished:
                    future.result()
                if not left:
                    return [part for future in futures for part in future.result()]
                share = progress_text(len(finished), len(tasks), time.monotonic() - began)
                groups = f"{len(finished)} of {counted(len(tasks), 'groups of files')}"
                tokens = f"{done.value / 1e6:,.1f}M tokens"
                say(f"{groups}: {tokens}{share and f', {share}'}")
        except BrokenProcessPool:
            raise DataError(
                f"{folder}: a process that tokenizes has died, perhaps for lack of memory. "
                "Finished parts are kept: run the same command again, with fewer --workers"
            ) from None
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _tokenize(task: Task) -> list[dict[str, Any]]:
    """Write the parts that are not there yet; return all of them."""
    worker = _worker[0]
    parts: list[dict[str, Any]] = []
    while True:
        name = _name(task, parts)
        part = _read(worker.folder / f"{name}.json")
        is_ours = (part.get("name"), part.get("stamp")) == (name, task.stamp)
        if not (is_ours and _is_whole(worker.folder, part)):
            break
        parts.append(part)
        worker.count(part["tokens"])
        if part["last"]:
            return parts
    writer = _PartWriter(worker, _name(task, parts), task)
    piece, number = parts[-1]["end"] if parts else (0, 0)
    for end, document in _documents(worker, task, piece, number):
        if writer.tokens >= worker.options.part_tokens:
            parts.append(writer.close(last=False))
            writer = _PartWriter(worker, _name(task, parts), task)
        writer.add(document, end)
    parts.append(writer.close(last=True))
    return parts


def _name(task: Task, parts: Sequence[Any]) -> str:
    return f"part-{task.number:05}-{len(parts):04}"


def _documents(
    worker: _Worker, task: Task, piece: int, number: int
) -> Iterator[tuple[tuple[int, int], Document]]:
    """Iterate after record `number` of a piece: ((piece, number), document)."""
    tokenizer = worker.tokenizer
    for n in range(piece, len(task.pieces)):
        records = records_of(worker.shards, task.pieces[n], number if n == piece else 0)
        for documents in encode(records, tokenizer, tokenizer.vocab_size, worker.threads):
            if worker.stop.is_set():
                raise InterruptedError("stopped")
            worker.count(sum(len(one.ids) for one in documents))
            for document in documents:
                yield (n, document.record.number), document


def _size(document: Document) -> int:
    record = document.record
    return sum(
        len(text.encode(errors="surrogatepass")) for text in (record.text, record.prompt) if text
    )


class _PartWriter:
    """Writes one part; `close` makes it count."""

    def __init__(self, worker: _Worker, name: str, task: Task) -> None:
        self.path = worker.folder / name
        self.task = task
        self._dtype = dtype_for(worker.tokenizer.vocab_size)
        self._has_targets = worker.options.columns.has_masks
        self._at("json").unlink(missing_ok=True)
        self._file = new_file(self._at("tokens"))
        self._hash = new_hash(_HASH)
        self._offsets = [0]
        self._masks = list[NDArray[np.bool_]]()
        self._sources: list[tuple[str, int, int]] = []
        self._text_bytes = self._max_id = 0
        self._end = (-1, 0)

    def _at(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{suffix}")

    @property
    def tokens(self) -> int:
        return self._offsets[-1]

    def add(self, document: Document, end: tuple[int, int]) -> None:
        """end: number of the document's piece, and its number there."""
        record, ids, mask = document
        if end != (self._end[0], self._end[1] + 1):  # another piece, or after empty lines
            self._sources.append((str(record.file), len(self._masks), record.number - 1))
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._hash.update(content)
        self._offsets.append(self.tokens + len(ids))
        self._masks.append(mask)
        self._text_bytes += _size(document)
        self._max_id = max(self._max_id, int(ids.max()))
        self._end = end

    def close(self, last: bool) -> dict[str, Any]:
        """Write the record after all else is on the disk. last: of its task."""
        with self._file as file:
            sync(file)
        checksums = {"tokens": f"{_HASH}:{self._hash.hexdigest()}"}
        others = {"offsets": np.array(self._offsets, dtype="<i8").tobytes()}
        if self._has_targets:
            others["targets"] = np.packbits(
                targets_of(self._offsets, self._masks), bitorder="little"
            ).tobytes()
        for suffix, content in others.items():
            atomic_write(self._at(suffix), content)
            checksums[suffix] = digest_of(content, _HASH)
        part = json.dumps(
            {
                "name": self.path.name,
                "stamp": self.task.stamp,
                "last": last,
                "end": self._end,
                "tokens": self.tokens,
                "documents": len(self._masks),
                "text_bytes": self._text_bytes,
                "max_id": self._max_id,
                "bytes": {suffix: self._at(suffix).stat().st_size for suffix in checksums},
                "checksums": checksums,
                "sources": self._sources,
            }
        )
        atomic_write(self._at("json"), part)
        return dict(json.loads(part))
