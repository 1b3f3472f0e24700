"""Tokenize text once, into a folder of token files that training maps
(`titanlite.data.prepared_tokens`).

Processes tokenize tasks: neighbouring files, or a range of a large one. Each writes its tokens as
parts, and a part counts once its record `part-*.json` lies beside it. After a crash finished parts
are kept, if their checksums and the stamps of their texts still fit. So the content is that of an
undisturbed run. It does not depend on the number of processes either. The index comes last and
replaces the records.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
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
from titanlite.cli.prepare_tasks import (
    Options,
    Task,
    divide,
    hash_of,
    list_source,
    records_of,
)
from titanlite.config.urls import public_name
from titanlite.data import DataError
from titanlite.data.connectivity import reach
from titanlite.data.corpus import Document, dtype_for, encode, packing_ratio, targets_of
from titanlite.data.prepared_tokens import (
    VERSION,
    checksum_of,
    fingerprint_of,
    hashes_of,
    read_index,
)
from titanlite.data.text_files import TextFiles
from titanlite.data.token_paths import INDEX, KIND, is_index
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.dist.signals import end_with_parent
from titanlite.runs.lock import LockedError, RunLock
from titanlite.utils import (
    atomic_write,
    counted,
    human_bytes,
    human_time,
    new_file,
    parse_json,
    progress_text,
    public_tree,
    say,
    sync,
)

PLAN = "prepare.json"
#: Bytes of text to a token, a high guess.
_HIGH = 6
_HASH = "xxh3"
#: Seconds for a remote source to come back, and between two lines of progress.
_PATIENCE = 300.0
_REPORT_SECONDS = 10.0


def prepare(
    source: str,
    folder: Path,
    options: Options,
    workers: int,
    subset: str | None = None,
    split: str | None = None,
) -> str:
    """Tokenize a source into a folder; return a summary.

    source: a file, folder, pattern, URL, bundled name, or name or id of the hub; of the last also
    `subset`.

    Raises DataError for text that cannot be read and for a disk that is too small. A folder that
    holds something else or is being written to raises it too.
    """
    began = time.monotonic()
    job = _job(source, folder, options, subset, split)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_others(folder, job.known, job.plan, job.stamp)
        with RunLock(folder, "out"):
            index = read_index(folder) if is_index(folder / INDEX) else None
            if index is not None:
                if all(_is_whole(folder, part) for part in index["parts"]):
                    return (
                        f"{folder} is complete already, and its checksums are "
                        f"right\n{summary(index, folder)}"
                    )
                _reopen(folder, index)
            index = _make_parts(job, source, folder, workers)
    except LockedError as error:
        raise DataError(f"{folder} is being prepared by another process: {error}") from None
    except OSError as error:
        problem = f"{error.filename or folder}: {error.strerror or error}"
        if (folder / PLAN).exists():
            problem += "; finished parts are kept: run the same command again"
        raise DataError(problem) from error
    text = summary(index, folder, time.monotonic() - began)
    listing = job.shards.listing
    return f"{listing.describe()}\n{text}" if listing else text


@dataclass(frozen=True)
class _Job:
    """What is to be tokenized."""

    shards: TextFiles
    tasks: list[Task]
    options: Options
    tokenizer: Tokenizer
    #: What must be the same when a folder is continued.
    plan: dict[str, Any]
    stamp: str
    #: The index or the plan that the folder has already; {}: none.
    known: dict[str, Any]
    #: The files of a data set of the hub, at their revision; None: it is no such data set.
    listed: dict[str, Any] | None


def _job(
    source: str, folder: Path, options: Options, subset: str | None, split: str | None
) -> _Job:
    """List the text and divide it. Raises DataError."""
    tokenizer = load_tokenizer(options.tokenizer_path)
    known: dict[str, Any] = {}
    if is_index(folder / INDEX):
        known = read_index(folder)
    elif any(folder.glob("part-*.json")):
        known = _read(folder / PLAN)
    # The files of the first attempt are read again.
    listed = known.get("listed")
    if listed:
        shards = TextFiles(
            tuple(listed["names"]), options.columns, listed["kind"], listed["revision"]
        )
        remedy = "run the same command again where there is a network"
        reach(shards.names[0], f"SOURCE: {source} cannot be read", remedy)
    else:
        shards = list_source(source, options, subset, split)
        if shards.revision:
            listed = {name: getattr(shards, name) for name in ("names", "kind", "revision")}
    shards = replace(shards, key="SOURCE")
    shards = replace(shards, patience=_PATIENCE)
    asked = {
        "source": " ".join(filter(None, (source, subset, split))),
        "options": options.to_json(),
        "tokenizer": tokenizer.fingerprint,
    }
    # It is equal with another signature of the same file, too.
    plan: dict[str, Any] = public_tree(asked)
    tasks = divide(shards, options, tokenizer)
    stamp = hash_of([task.stamp for task in tasks])
    return _Job(shards, tasks, options, tokenizer, plan, stamp, known, listed)


def _make_parts(job: _Job, source: str, folder: Path, workers: int) -> dict[str, Any]:
    """Write the parts that are missing, and publish the index; return it."""
    # Half-written files are of a process that was killed.
    for name in (PLAN, INDEX, "part-*"):
        for path in folder.glob(f".{name}.*"):
            path.unlink()
    _check_space(folder, job.tasks, job.tokenizer)
    plan = job.plan | {"listed": job.listed}
    atomic_write(folder / PLAN, json.dumps(plan))
    shards = replace(job.shards, names=(), listing=None)
    parts = _run(job.tasks, shards, folder, job.options, workers)
    if not any(part["tokens"] for part in parts):
        raise DataError(f"{public_name(source)} holds no records")
    return _publish(folder, parts, job.tokenizer, plan | {"stamp": job.stamp})


def _read(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} without one."""
    with contextlib.suppress(OSError, ValueError):
        return dict(parse_json(file.read_bytes()))
    return {}


# The folder


def _refuse_others(folder: Path, known: dict[str, Any], plan: dict[str, Any], stamp: str) -> None:
    """Raise DataError for a folder that holds anything but this text, finished or begun.

    known: its index or plan.
    """
    other = "name another folder, or remove this one"
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
    """Return whether the files of a part have their checksums."""
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


def _text_size(tasks: Sequence[Task]) -> float:
    """Return about how many bytes of text the tasks have."""
    pieces = [piece for task in tasks for piece in task.pieces]
    return sum(piece.size * packing_ratio(public_name(piece.name)) for piece in pieces)


def _check_space(folder: Path, tasks: Sequence[Task], tokenizer: Tokenizer) -> None:
    """Raise DataError if the tokens surely do not fit on the disk."""
    size = _text_size(tasks)
    written = sum(file.stat().st_size for file in folder.glob("part-*"))
    needed = size / _HIGH * dtype_for(tokenizer.vocab_size).itemsize - written
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{folder}: the tokens need {human_bytes(needed)} or more, and {human_bytes(free)} "
            "are free"
        )


def _publish(
    folder: Path, parts: list[dict[str, Any]], tokenizer: Tokenizer, plan: dict[str, Any]
) -> dict[str, Any]:
    """Write the index, and remove all that is not of it."""
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


def summary(index: dict[str, Any], folder: Path, seconds: float | None = None) -> str:
    """Return the figures of a prepared folder. seconds: that its making took."""
    text = index["text_bytes"]
    tokens = index["tokens"]
    size = sum(sum(part["bytes"].values()) for part in index["parts"])
    speed = ""
    if seconds:
        rate = text / 1e6 / max(seconds, 1e-9)
        speed = f", {human_time(seconds)}, {rate:,.1f} MB of text per second"
    return (
        f"{folder}: {counted(index['documents'], 'documents')}, {counted(tokens, 'tokens')}, "
        f"{human_bytes(text)} of text, {text / tokens:.2f} bytes per token\n"
        f"{counted(len(index['parts']), 'parts')}, {human_bytes(size)}{speed}\n"
        f'train on them with training.dataset_path = "{folder}"'
    )


# Tokenizing


@dataclass(frozen=True)
class _Worker:
    """What a process keeps between tasks."""

    shards: TextFiles
    folder: Path
    options: Options
    #: That tokenize beside the process itself.
    threads: int
    #: Documents, bytes of text and tokens of all processes.
    done: Any
    #: Set when the others have failed or were interrupted.
    stop: Any

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.options.tokenizer_path)

    def count(self, documents: int, text_bytes: int, tokens: int) -> None:
        with self.done:
            for n, value in enumerate((documents, text_bytes, tokens)):
                self.done[n] += value


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
    """Tokenize all tasks in processes; return the parts in order."""
    context = multiprocessing.get_context("spawn")
    processes = max(1, min(workers, len(tasks)))
    done = context.Array("q", 3)
    stop = context.Event()
    threads = workers // processes
    worker = _Worker(shards, folder, options, threads if threads > 1 else 0, done, stop)
    total = _text_size(tasks)
    began = reported = time.monotonic()
    with ProcessPoolExecutor(processes, context, _start, (worker,)) as pool:
        futures: list[Future[list[dict[str, Any]]]] = [
            pool.submit(_tokenize, task) for task in tasks
        ]
        try:
            finished: set[Future[list[dict[str, Any]]]] = set()
            while len(finished) < len(futures):
                finished = wait(futures, 0.2, FIRST_EXCEPTION).done
                for future in finished:
                    future.result()
                if time.monotonic() - reported > _REPORT_SECONDS:
                    reported = time.monotonic()
                    documents, text_bytes, tokens = done[:]
                    words = f"{counted(documents, 'documents')}, {tokens / 1e6:,.1f}M tokens"
                    speed = f"{text_bytes / 1e6 / (reported - began):,.1f} MB/s"
                    share = progress_text(text_bytes, total, reported - began)
                    groups = f"{len(finished)} of {counted(len(tasks), 'groups of files')}"
                    say(f"{groups}: {words}, {speed}{share and f', {share}'}")
            return [part for future in futures for part in future.result()]
        except BrokenProcessPool:
            raise DataError(
                f"{folder}: a process that tokenizes has died, perhaps for lack of memory. "
                "Finished parts are kept: run the same command again, with fewer --workers"
            ) from None
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _tokenize(task: Task) -> list[dict[str, Any]]:
    """Write the parts of a task that are not there yet; return all of them."""
    worker = _worker[0]
    parts: list[dict[str, Any]] = []
    while part := _finished(worker.folder, _name(task, parts), task):
        parts.append(part)
        worker.count(part["documents"], part["text_bytes"], part["tokens"])
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


def _finished(folder: Path, name: str, task: Task) -> dict[str, Any] | None:
    """Return the record of a part that was written from the same text and is whole."""
    part = _read(folder / f"{name}.json")
    is_ours = (part.get("name"), part.get("stamp")) == (name, task.stamp)
    return part if is_ours and _is_whole(folder, part) else None


def _documents(
    worker: _Worker, task: Task, piece: int, number: int
) -> Iterator[tuple[tuple[int, int], Document]]:
    """Iterate over the documents of a task after record `number` of a piece: ((piece, number),
    document).
    """
    tokenizer = worker.tokenizer
    for n in range(piece, len(task.pieces)):
        records = records_of(worker.shards, task.pieces[n], number if n == piece else 0)
        for documents in encode(records, tokenizer, tokenizer.vocab_size, worker.threads):
            if worker.stop.is_set():
                raise InterruptedError("stopped")
            worker.count(
                len(documents), sum(map(_size, documents)), sum(len(one.ids) for one in documents)
            )
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
        """Append a document. end: number of its piece, and its number there."""
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
        """Write the part's record, after all else is on the disk, and return it. last: of
        its task.
        """
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
