"""Tokenize text once, into a folder of token files that training maps (`titanlite.data.token_files`).

Processes tokenize groups of files, a group each at a time. Each writes its tokens as parts, and a part counts once its
record `part-*.json` lies beside it. So after a crash finished parts are kept, if their checksums and the stamps of
their texts still fit, and the content is that of an undisturbed run. The index comes last and replaces the records.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.checkpoint.manifest import file_digest, new_hash
from titanlite.config.sections import Data
from titanlite.data import DataError
from titanlite.data.chat import ChatTemplate
from titanlite.data.corpus import are_targets, encode_record, in_order
from titanlite.data.formats import Columns, Record, iter_rows
from titanlite.data.sources import BUNDLED, columns_of, list_files
from titanlite.data.token_files import INDEX, KIND, VERSION, fingerprint_of, is_index, read_index
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.runs.lock import LockedError, RunLock
from titanlite.signals import end_with_parent
from titanlite.tools.prepare_progress import NOTHING, Progress, reporter
from titanlite.utils import atomic_write, counted, human_bytes, human_time

PLAN = "prepare.json"
#: Tokens of a part: some 250 MB, which a process writes in half a minute to some minutes.
PART_TOKENS = 1 << 27
#: Bytes of text to a token, a low and a high guess, and of text to a byte of a packed file.
_LOW, _HIGH, _PACKED = 3, 6, 2.5
#: Bytes of text that a thread tokenizes at once.
_CHUNK = 256 * 1024
_HASH = "xxh3"


@dataclass(frozen=True)
class Options:
    """What decides the tokens, besides the text."""

    tokenizer_path: str | None = None
    text_key: str | None = "text"
    prompt_key: str | None = None
    completion_key: str | None = None
    part_tokens: int = PART_TOKENS
    messages_key: str | None = None
    chat: ChatTemplate | None = None

    @classmethod
    def of(cls, source: str, tokenizer: str | None, keys: Data, part_tokens: int) -> Options:
        """Return options for a source, with its own fields where it is bundled. keys: the fields that were asked for"""
        columns = columns_of(keys, source, None if _is_bundled(source) else source, None, load_tokenizer(tokenizer))
        if columns.chat is not None:
            return cls(tokenizer, None, None, None, part_tokens, columns.text, columns.chat)
        if columns.prompt is None:
            return cls(tokenizer, columns.text, part_tokens=part_tokens)
        return cls(tokenizer, None, columns.prompt, columns.text, part_tokens)

    @property
    def columns(self) -> Columns:
        text = self.messages_key or self.completion_key or self.text_key or "text"
        return Columns(text, self.prompt_key, chat=self.chat)

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON has them. Of folders without conversations they are as they always were."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found if self.chat else {name: found[name] for name in found if name not in ("messages_key", "chat")}


class Task(NamedTuple):
    """Neighbouring files, which one process tokenizes. `stamp`: hash of all that decides their tokens."""

    number: int
    files: tuple[str, ...]
    stamp: str


def prepare(source: str, folder: Path, options: Options, workers: int) -> str:
    """Tokenize a source into a folder; return a summary.

    Raises DataError for text that cannot be read, a folder that holds something else or is being written to, and a disk
    that is too small.
    """
    tokenizer = load_tokenizer(options.tokenizer_path)
    files = source_of(source)
    tasks = divide(files, options, tokenizer)
    stamp = _hash([task.stamp for task in tasks])
    began = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_others(folder, stamp, options, tokenizer, source)
        with RunLock(folder, "out"):
            index = read_index(folder) if is_index(folder / INDEX) else None
            if index is not None:
                if all(_is_whole(folder, part) for part in index["parts"]):
                    return f"{folder} is complete already, and its checksums are right\n{summary(index, folder)}"
                _reopen(folder, index)
            for name in (PLAN, INDEX, "part-*"):  # half-written files of a process that was killed
                for path in folder.glob(f".{name}.*"):
                    path.unlink()
            _check_space(folder, files, tokenizer)
            plan = {"source": source, "options": options.to_json(), "tokenizer": tokenizer.fingerprint}
            atomic_write(folder / PLAN, json.dumps(plan))
            parts = _run(tasks, folder, options, tokenizer, workers, files)
            if not any(part["tokens"] for part in parts):
                raise DataError(f"{source} holds no records")
            index = _publish(folder, parts, source, options, tokenizer, stamp)
    except LockedError as error:
        raise DataError(f"{folder} is being prepared by another process: {error}") from None
    except OSError as error:
        kept = "; finished parts are kept: run the same command again" if (folder / PLAN).exists() else ""
        raise DataError(f"{error.filename or folder}: {error.strerror or error}{kept}") from error
    return summary(index, folder, time.monotonic() - began)


def source_of(source: str) -> list[Path]:
    """Return the files of a source, in order: a local file, folder or pattern, else a bundled name."""
    if _is_bundled(source):
        return list_files(BUNDLED[source])
    return list_files(Path(source), "SOURCE")


def _is_bundled(source: str) -> bool:
    return source in BUNDLED and not Path(source).exists()


def divide(files: Sequence[Path], options: Options, tokenizer: Tokenizer) -> list[Task]:
    """Group neighbouring files, so that each group makes about one part. A large file is one group."""
    groups: list[list[str]] = []
    stats: list[list[Any]] = []
    size = 0
    for file in files:
        stat = file.stat()
        if not groups or size + stat.st_size > options.part_tokens * _LOW:
            groups.append([])
            stats.append([])
            size = 0
        groups[-1].append(str(file))
        stats[-1].append([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
        size += stat.st_size
    decisive = [VERSION, options.to_json() | {"tokenizer_path": None}, tokenizer.fingerprint]
    return [
        Task(n, tuple(group), _hash([*decisive, about]))
        for n, (group, about) in enumerate(zip(groups, stats, strict=True))
    ]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# The folder


def _refuse_others(folder: Path, stamp: str, options: Options, tokenizer: Tokenizer, source: str) -> None:
    """Raise DataError for a folder that holds anything but this text, finished or begun."""
    other = "name another folder, or remove this one"
    if is_index(folder / INDEX):
        index = read_index(folder)
        if index["stamp"] != stamp:
            raise DataError(
                f"{folder} holds other tokens: {index['source']} with the tokenizer {index['tokenizer'][:16]}, or the "
                f"text or the options have changed since; {other}"
            )
    elif (folder / PLAN).is_file():
        plan = json.loads((folder / PLAN).read_bytes())
        now = {"source": source, "options": options.to_json(), "tokenizer": tokenizer.fingerprint}
        if changed := [name for name in now if plan.get(name) != now[name]]:
            raise DataError(
                f"{folder} was begun with another {' and '.join(changed)} ({plan.get('source')}); give the same "
                f"arguments to finish it, or {other}"
            )
    elif found := [name for name in os.listdir(folder) if not name.startswith((".run.lock", "run.lock"))]:
        raise DataError(f"{folder} holds other files ({sorted(found)[0]}, …); {other}")


def _is_whole(folder: Path, part: dict[str, Any]) -> bool:
    """Return whether the files of a part have their checksums."""
    with contextlib.suppress(OSError):
        paths = {suffix: folder / f"{part['name']}.{suffix}" for suffix in part["bytes"]}
        if all(path.stat().st_size == part["bytes"][suffix] for suffix, path in paths.items()):
            return all(file_digest(path, _HASH) == part["checksums"][suffix] for suffix, path in paths.items())
    return False


def _reopen(folder: Path, index: dict[str, Any]) -> None:
    """Turn a finished folder, of which a part is damaged, into an unfinished one."""
    for part in index["parts"]:
        sources = [[index["files"][file], *rest] for file, *rest in part["sources"]]
        atomic_write(folder / f"{part['name']}.json", json.dumps({**part, "sources": sources}))
    (folder / INDEX).unlink()


def _check_space(folder: Path, files: Sequence[Path], tokenizer: Tokenizer) -> None:
    """Raise DataError if the tokens surely do not fit on the disk."""
    size = sum(file.stat().st_size * (_PACKED if file.suffix in (".gz", ".zst") else 1) for file in files)
    written = sum(file.stat().st_size for file in folder.glob("part-*"))
    needed = size / _HIGH * _dtype(tokenizer).itemsize - written
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(f"{folder}: the tokens need {human_bytes(needed)} or more, and {human_bytes(free)} are free")


def _dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _publish(
    folder: Path, parts: list[dict[str, Any]], source: str, options: Options, tokenizer: Tokenizer, stamp: str
) -> dict[str, Any]:
    """Write the index, and remove all that is not of it."""
    files = list(dict.fromkeys(file for part in parts for file, _, _ in part["sources"]))
    numbers = {file: n for n, file in enumerate(files)}
    for part in parts:
        part["sources"] = [[numbers[file], *rest] for file, *rest in part["sources"]]
    index: dict[str, Any] = {
        "format": KIND,
        "version": VERSION,
        "dtype": _dtype(tokenizer).str,
        **{name: sum(part[name] for part in parts) for name in ("tokens", "documents", "text_bytes")},
        "max_id": max(part["max_id"] for part in parts),
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_path": options.tokenizer_path,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "source": source,
        "options": options.to_json(),
        "stamp": stamp,
        "files": files,
        "parts": parts,
    }
    index["fingerprint"] = fingerprint_of(index)
    ours = {f"{part['name']}.{suffix}" for part in parts for suffix in part["bytes"]}
    for path in folder.glob("part-*"):
        if path.name not in ours and path.suffix != ".json":  # of a text that has become shorter since
            path.unlink()
    atomic_write(folder / INDEX, json.dumps(index))
    for path in (*folder.glob("part-*.json"), folder / PLAN):
        path.unlink(missing_ok=True)
    return index


def summary(index: dict[str, Any], folder: Path, seconds: float | None = None) -> str:
    """Return the figures of a prepared folder. seconds: that its making took."""
    text, tokens = index["text_bytes"], index["tokens"]
    size = sum(sum(part["bytes"].values()) for part in index["parts"])
    speed = f", {human_time(seconds)}, {text / 1e6 / max(seconds, 1e-9):,.1f} MB of text per second" if seconds else ""
    return (
        f"{folder}: {counted(index['documents'], 'documents')}, {counted(tokens, 'tokens')}, {human_bytes(text)} of "
        f"text, {text / tokens:.2f} bytes per token\n"
        f"{counted(len(index['parts']), 'parts')}, {human_bytes(size)}{speed}\n"
        f'train on them with training.dataset_path = "{folder}"'
    )


# Tokenizing


class _Worker(NamedTuple):
    """What a process keeps between tasks."""

    folder: Path
    options: Options
    tokenizer: Tokenizer
    threads: int
    #: Takes `Progress`.
    queue: Any
    #: Set when the others have failed or were interrupted.
    stop: Any


_worker: list[_Worker] = []


def _start(folder: Path, options: Options, threads: int, queue: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    parent = multiprocessing.parent_process()
    # A writer without a parent would disturb the next attempt.
    end_with_parent(signal.SIGKILL, parent.pid if parent else None)
    queue.cancel_join_thread()  # nobody may be reading any more
    _worker.append(_Worker(folder, options, load_tokenizer(options.tokenizer_path), threads, queue, stop))


def _run(
    tasks: list[Task], folder: Path, options: Options, tokenizer: Tokenizer, workers: int, files: Sequence[Path]
) -> list[dict[str, Any]]:
    """Tokenize all tasks in processes; return the parts in order."""
    context = multiprocessing.get_context("spawn")
    processes = max(1, min(workers, len(tasks)))
    queue, stop = context.Queue(), context.Event()
    arguments = folder, options, max(1, workers // processes), queue, stop
    total = sum(file.stat().st_size for file in files)
    with (
        ProcessPoolExecutor(processes, context, _start, arguments) as pool,
        reporter(total, len(tasks)) as report,
    ):
        futures: list[Future[list[dict[str, Any]]]] = [pool.submit(_tokenize, task) for task in tasks]
        try:
            done = NOTHING
            while any(not future.done() for future in futures):
                finished = wait(futures, 0.2, FIRST_EXCEPTION).done
                while not queue.empty():
                    done = done.plus(queue.get())
                report(done, len(finished))
                for future in finished:
                    future.result()
            return [part for future in futures for part in future.result()]
        except BrokenProcessPool:
            raise DataError(
                f"{folder}: a process that tokenizes has died, perhaps for lack of memory; finished parts are kept: "
                "run the same command again, with fewer --workers"
            ) from None
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _tokenize(task: Task) -> list[dict[str, Any]]:
    """Write the parts of a task that are not there yet; return all of them."""
    worker = _worker[0]
    folder, tokenizer, options = worker.folder, worker.tokenizer, worker.options
    parts: list[dict[str, Any]] = []
    while True:
        name = f"part-{task.number:05}-{len(parts):04}"
        part = _finished(folder, name, task)
        if part is None:
            break
        parts.append(part)
        worker.queue.put(Progress(part["documents"], part["text_bytes"], part["tokens"], 0))
        if part["last"]:
            return parts
    file, number = parts[-1]["end"] if parts else (0, 0)
    writer = _PartWriter(folder, name, task, options, tokenizer)
    for record, ids, mask, end in _documents(worker, task, file, number):
        if writer.tokens >= options.part_tokens:
            parts.append(writer.close(last=False))
            writer = _PartWriter(folder, f"part-{task.number:05}-{len(parts):04}", task, options, tokenizer)
        writer.add(record, ids, mask, end)
    parts.append(writer.close(last=True))
    return parts


def _finished(folder: Path, name: str, task: Task) -> dict[str, Any] | None:
    """Return the record of a part that was written from the same text and is whole."""
    try:
        part: dict[str, Any] = json.loads((folder / f"{name}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return part if part["stamp"] == task.stamp and _is_whole(folder, part) else None


#: A record, its ids, whether the first of them are targets, and (file of the task, number) of the record.
_Document = tuple[Record, NDArray[np.int64], NDArray[np.bool_], tuple[int, int]]


def _documents(worker: _Worker, task: Task, file: int, number: int) -> Iterator[_Document]:
    """Iterate over the documents of a task after record `number` of file `file`."""
    tokenizer = worker.tokenizer

    def encode(chunk: list[tuple[Record, tuple[int, int]]]) -> list[_Document]:
        return [(record, *encode_record(record, tokenizer, tokenizer.vocab_size), end) for record, end in chunk]

    for documents in in_order(encode, _chunks(worker, task, file, number), worker.threads):
        if worker.stop.is_set():
            raise InterruptedError("stopped")
        worker.queue.put(Progress(len(documents), sum(map(_size, documents)), sum(len(one[1]) for one in documents), 0))
        yield from documents


def _size(document: _Document) -> int:
    record = document[0]
    return sum(len(text.encode(errors="surrogatepass")) for text in (record.text, record.prompt) if text)


def _chunks(worker: _Worker, task: Task, file: int, number: int) -> Iterator[list[tuple[Record, tuple[int, int]]]]:
    chunk: list[tuple[Record, tuple[int, int]]] = []
    size = 0
    for place in range(file, len(task.files)):
        before = os.stat(task.files[place])
        with open(task.files[place], "rb") as content:
            position = 0
            start = number if place == file else 0
            for record in iter_rows(content, task.files[place], "auto", worker.options.columns, start):
                chunk.append((record, (place, record.number)))
                size += len(record.text)
                if size >= _CHUNK:
                    yield chunk
                    chunk, size = [], 0
                    with contextlib.suppress(ValueError):
                        worker.queue.put(NOTHING._replace(read=content.tell() - position))
                        position = content.tell()
        now = os.stat(task.files[place])
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise DataError(f"{task.files[place]} has changed while it was read; run the same command again")
        worker.queue.put(NOTHING._replace(read=now.st_size - position))
    if chunk:
        yield chunk


class _PartWriter:
    """Writes one part; `close` makes it count."""

    def __init__(self, folder: Path, name: str, task: Task, options: Options, tokenizer: Tokenizer) -> None:
        self.path, self.task, self.dtype = folder / name, task, _dtype(tokenizer)
        self._has_targets = options.prompt_key is not None or options.chat is not None
        self.path.with_name(f"{name}.json").unlink(missing_ok=True)
        self._file = open(self._at("tokens"), "wb", buffering=1 << 20)  # noqa: SIM115
        self._hash = new_hash(_HASH)
        self._offsets, self._masks = [0], list[NDArray[np.bool_]]()
        self._sources: list[tuple[str, int, int]] = []
        self._text_bytes = self._max_id = 0
        self._end = (0, 0)

    def _at(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{suffix}")

    @property
    def tokens(self) -> int:
        return self._offsets[-1]

    def add(self, record: Record, ids: NDArray[np.int64], mask: NDArray[np.bool_], end: tuple[int, int]) -> None:
        """Append a document. mask: see `encode_record`."""
        if not self._sources or self._end[0] != end[0]:
            self._sources.append((str(record.file), len(self._offsets) - 1, record.number - 1))
        content = ids.astype(self.dtype).tobytes()
        self._file.write(content)
        self._hash.update(content)
        self._offsets.append(self.tokens + len(ids))
        self._masks.append(are_targets(mask, 0, len(ids)))
        self._text_bytes += _size((record, ids, mask, end))
        self._max_id = max(self._max_id, int(ids.max()))
        self._end = end

    def close(self, last: bool) -> dict[str, Any]:
        """Write the part's record, after all else is on the disk, and return it. last: of its task."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        checksums = {"tokens": f"{_HASH}:{self._hash.hexdigest()}"}
        others = {"offsets": np.array(self._offsets, dtype="<i8").tobytes()}
        if self._has_targets:
            others["targets"] = np.packbits(np.concatenate(self._masks), bitorder="little").tobytes()
        for suffix, content in others.items():
            atomic_write(self._at(suffix), content)
            digest = new_hash(_HASH)
            digest.update(content)
            checksums[suffix] = f"{_HASH}:{digest.hexdigest()}"
        part = {
            "name": self.path.name,
            "stamp": self.task.stamp,
            "last": last,
            "end": self._end,
            "tokens": self.tokens,
            "documents": len(self._offsets) - 1,
            "text_bytes": self._text_bytes,
            "max_id": self._max_id,
            "bytes": {suffix: self._at(suffix).stat().st_size for suffix in checksums},
            "checksums": checksums,
            "sources": self._sources,
        }
        atomic_write(self._at("json"), json.dumps(part))
        return json.loads(json.dumps(part))
