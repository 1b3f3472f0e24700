"""Look at the text of a run: rows as the model sees them, documents of a step, and figures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from titanlite.assembly.datasets import phases_of, read_held_out, read_training_text
from titanlite.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    parse_manifest,
    root_of,
    step_folder,
    step_of,
    steps_in,
)
from titanlite.checkpoint.paths import AnyPath, to_path
from titanlite.cli.config import side, world_size_of
from titanlite.cli.parser import no_flags
from titanlite.config.sections import Training
from titanlite.data import DataError, skip_ranges
from titanlite.data.corpus import Tokens
from titanlite.data.course import Course, Progress
from titanlite.data.documents import Document, documents_of
from titanlite.data.rows import IGNORE, Row, Rows
from titanlite.data.skip_ranges import Range, ranges_of_steps
from titanlite.data.state import Positive, StateError, check_loader, checked
from titanlite.data.text import TextReader
from titanlite.data.text_files import iter_records
from titanlite.data.text_keys import training_texts
from titanlite.data.text_report import file_lines, file_warnings
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.resolve.load import check_config, resolve
from titanlite.run.config import RunConfig
from titanlite.runs.attempts import read_attempts
from titanlite.utils import Style, counted, human_bytes, human_count

#: Tokens and characters of a document's start that are shown.
_TOKENS = 48
_CHARACTERS = 72
#: Sequences that are decoded to measure bytes per token.
_SAMPLE = 32
_BAR = 40


class State(NamedTuple):
    """How far a run had read when it saved a checkpoint."""

    step: int
    #: Sequences below it were served or skipped.
    position: int
    skipped: tuple[Range, ...]
    #: Sequences per step before it.
    global_batch: int
    #: State of the rows.
    rows: Mapping[str, Any] = {}
    #: Of all steps so far, over all ranks.
    tokens: int = 0


@dataclass(frozen=True)
class Run:
    """A run's config and text."""

    config: RunConfig
    tokenizer: Tokenizer
    rows: Rows
    #: Of its checkpoints, by step; empty for a config.
    states: Sequence[State] = ()


#: Removes from a kept config what a look at its text does not use, so that it need not be trusted.
_NO_TRAINING = (
    "--job.callbacks=[]",
    "--optimizer.name=AdamW",
    "--training.loss=cross_entropy",
    "--compile.cache_dir=none",
)


def open_run(
    file: str | None,
    flags: Sequence[str],
    world_size: int | None,
    validation: bool = False,
    trust_code: bool = False,
) -> Run:
    """Read the text of a config, or of the folder of a run or its checkpoints.

    trust_code: let the folder's config name code and variables (`titanlite.config.trust`).

    Raises ConfigError and DataError as training does, and for a run whose text is another one by
    now.
    """
    states: list[State] = []
    expected: Mapping[str, str] = {}
    if file is not None and os.path.isdir(file):
        no_flags(flags)
        asked = side(file, _NO_TRAINING, trust_code).config
        states, expected, ranks = _history(Path(file))
        config = resolve(asked, world_size or ranks)[1]
    else:
        files = [f"--job.config_file={file}"] if file else []
        _, config = check_config([*files, *flags], world_size_of(world_size)[0])
    tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.name)
    if validation:
        # The steps to skip are of the training text.
        config = replace(config, data=replace(config.data, skip_steps=[]))
        held_out = read_held_out(config, tokenizer)
        return Run(config, tokenizer, next(iter(held_out.values())))
    rows = read_training_text(config, tokenizer)
    then = expected.get("data")
    now = rows.fingerprint[:16]
    if then not in (None, now):
        raise DataError(
            f"{file}: the text has changed since: its fingerprint was {then}, and is {now}"
        )
    return Run(config, tokenizer, rows, states)


def _history(folder: Path) -> tuple[list[State], Mapping[str, str], int]:
    """Return the states of a run's checkpoints, their fingerprints, and its ranks."""
    path = to_path(str(folder.absolute()))
    root = path.parent if step_of(path) is not None else root_of(path)
    states: list[State] = []
    fingerprints: Mapping[str, str] = {}
    ranks = 0
    for step in steps_in(root):
        try:
            manifest = parse_manifest(step_folder(root, step))
        except CheckpointError:
            continue
        data = manifest.train.get("data", {})
        if data and "global_batch" in manifest.train:
            _check_position(manifest, step_folder(root, step))
            state = State(
                step=step,
                position=data["next_sequence"],
                skipped=skip_ranges.merged(data.get("left_out", ())),
                global_batch=manifest.train["global_batch"],
                rows=data.get("rows", {}),
                tokens=manifest.train.get("tokens_seen", 0),
            )
            states.append(state)
        fingerprints = manifest.fingerprints
        ranks = manifest.world_size
    return states, fingerprints, ranks or _last_ranks(folder)


def _last_ranks(folder: Path) -> int:
    """Return the ranks of a run's last attempt; 1 if there was none."""
    attempts = read_attempts(folder)
    if not attempts:
        return 1
    ranks: int = attempts[-1].get("ranks", 1)
    return ranks


def _check_position(manifest: Manifest, folder: AnyPath) -> None:
    """Raise StateError, naming the checkpoint, where it does not say what its steps trained on."""
    try:
        check_loader(manifest.train["data"])
        checked(manifest.train["global_batch"], Positive, "global_batch")
    except StateError as error:
        raise StateError(f"{folder}: {error}") from None


def sequences_of(run: Run, step: int) -> list[int]:
    """Return the sequences of a step, from 1. Raises DataError where the checkpoints do not
    tell.
    """
    if step < 1:
        raise DataError(f"step {step}: steps count from 1")
    skip = ranges_of_steps(run.config.data.skip_steps, run.config.course)
    earlier = [state for state in run.states if state.step < step]
    later = [state for state in run.states if state.step >= step]
    before = max(earlier, default=State(0, 0, (), run.config.course.size(1).sequences))
    after = min(later, default=None)
    _set_rows(run, before, after)
    course = _course(run, before, after)
    if after is not None:
        skip = after.skipped
        served = course.position_after(after.step) - before.position
        if skip_ranges.advance(before.position, served, skip) != after.position:
            raise DataError(
                f"step {step}: between steps {before.step} and {after.step} the run changed its "
                "global batch or its place in the text, and no checkpoint is left from then"
            )
    served = course.position_after(step - 1) - before.position
    start = skip_ranges.advance(before.position, served, skip)
    total = run.rows.total_sequences
    taken = skip_ranges.take(start, course.size(step).rows, skip)
    found = [n for n in taken if total is None or n < total]
    if not found:
        raise DataError(
            f"step {step}: the text ends before it, after {counted(total or 0, 'sequences')}"
        )
    return found


def _course(run: Run, before: State, after: State | None) -> Course:
    """Return the sizes of the steps after a state, as if no sequence were skipped."""
    done = Progress(before.step, before.tokens, before.position)
    if len(run.config.course.legs) > 1:
        phases = phases_of(run.config)
        assert phases is not None
        return replace_fields(phases, skip=()).course(done)
    size = run.config.course.size(step=1)
    if after is not None:
        size = size._replace(sequences=after.global_batch, rows=after.global_batch)
    return Course.steady(size, done)


def _set_rows(run: Run, before: State, after: State | None) -> None:
    """Set the rows to a place. A stream need not begin at its start, and shares of a mixture may
    have changed. Lanes stay those of the start.
    """
    rows = before.rows
    if not rows and after is not None:
        rows = {name: after.rows[name] for name in ("lanes", "revision") if name in after.rows}
    if not rows:
        return
    phases = phases_of(run.config)
    done = Progress(before.step, before.tokens, before.position)
    shares = None if phases is None else phases.shares(done)
    run.rows.load_state_dict(dict(rows), before.position, shares)


# Documents


def at_step(run: Run, step: int, as_json: bool) -> str:
    """Return the documents of the batch of a step, a line each."""
    training = run.config.training
    text = training.dataset_path or training.dataset
    numbers = sequences_of(run, step)
    found = {number: documents_of(run.rows, number, "") for number in numbers}
    places = _places(run, [document for documents in found.values() for document in documents])
    listed: dict[str, list[dict[str, Any]]] = {}
    lines = [f"step {step}: {counted(len(found), 'sequences')} of {run.rows.seq_len} tokens"]
    for number, documents in found.items():
        tokens = run.rows.sequence(number).tokens
        begin = 0
        listed[str(number)] = []
        lines.append(f"sequence {number}: {counted(len(documents), 'documents')}")
        for document in documents:
            file, record = places.get(document[:2], document[2:4])
            ids = tokens[begin : begin + document.tokens].tolist()
            begin += document.tokens
            start = _start_of(ids, run.tokenizer)
            about = {**document._asdict(), "file": file, "record": record, "text": start}
            about["source"] = document.source or text
            listed[str(number)].append(about)
            name = _name(document)
            place = f" = {file}, record {record}" if file else ""
            lines.append(f"  document {name}{place}, {counted(document.tokens, 'tokens')}: {start}")
    if as_json:
        return json.dumps({"step": step, "sequences": listed}, indent=1)
    return "\n".join(lines)


def _start_of(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the start of a document's text, on one line."""
    special = set(tokenizer.special_tokens.values())
    text = tokenizer.decode(one for one in ids[:_TOKENS] if one not in special)
    return " ".join(text.split())[:_CHARACTERS]


def _places(run: Run, documents: Sequence[Document]) -> dict[tuple[str, ...], tuple[str, int]]:
    """Read whole text up to the last of these documents; return file and record by source
    and name.
    """
    data = run.config.data
    found: dict[tuple[str, ...], tuple[str, int]] = {}
    reader = TextReader(data, run.tokenizer, run.tokenizer.vocab_size)
    sources = training_texts(run.config.training, data).items()
    for (section, source), (name, rows) in zip(sources, run.rows.texts().items(), strict=True):
        if rows.corpus is None or not rows.corpus.files:
            continue
        wanted = {document.name for document in documents if document.source == name}
        files = reader.files_of(source, section)
        for number, record in enumerate(iter_records(rows.corpus.files, files.columns, files.kind)):
            if str(number) in wanted:
                found[name, str(number)] = str(record.file), record.number
                wanted.remove(str(number))
            if not wanted:
                break
    return found


# Rows


def peek(run: Run, count: int, step: int, rank: int | None, ids: bool, style: Style) -> str:
    """Return the text of the first `count` sequences from `step` on, of one data-parallel rank or
    of all.
    """
    ranks = run.config.mesh.dp_degree
    total = run.rows.total_sequences
    if rank is not None and not 0 <= rank < ranks:
        raise DataError(
            f"--rank {rank}: data-parallel ranks run from 0 to {ranks - 1}; --world-size gives "
            "their number"
        )
    shown: list[str] = []
    while len(shown) < count:
        for sequence in sequences_of(run, step):
            if rank in (None, sequence % ranks) and len(shown) < count:
                row = run.rows.sequence(sequence)
                documents = documents_of(run.rows, sequence, "")
                tokens = counted(len(row.tokens), "tokens")
                targets = counted(int((row.labels != IGNORE).sum()), "targets")
                place = f"step {step}, sequence {sequence}, rank {sequence % ranks}"
                title = style.bold(f"{place}: {tokens}, {targets}")
                text = shown_row(row, documents, run.tokenizer, ids, style)
                shown.append(f"{title}\n{text}")
        step += 1
        if total is not None and sequence == total - 1:
            break
    if not style.color:
        shown.insert(0, "[[ ]]: the loss does not count these tokens")
    head = _found(run.rows, run.config.training)
    if head:
        shown.insert(0, head)
    return "\n\n".join(shown)


def _found(rows: Rows, training: Training) -> str:
    """Return the files of the text, those passed over, the documents and the characters; "" for
    text without files.
    """
    name = training.dataset_path or training.dataset
    lines = list(file_lines(rows))
    lines += [f"warning: {warning}" for warning in file_warnings(rows, name)]
    if not lines:
        return ""
    sizes = [_size(name, one) for name, one in rows.texts().items()]
    return "\n".join([*lines, *sizes, rows.describe()])


def _size(name: str, rows: Rows) -> str:
    """Return documents and characters of a source."""
    title = f"{name}: " if name else ""
    corpus = rows.corpus
    if corpus is None:
        return f"{title}a stream, whose documents and characters are not known before they are read"
    text = f"{title}{counted(corpus.documents, 'documents')}"
    if corpus.characters is not None:
        return f"{text}, {counted(corpus.characters, 'characters')}"
    if corpus.text_bytes is not None:
        return f"{text}, {human_bytes(corpus.text_bytes)} of text"
    return f"{text}, whose characters were not counted"


def shown_row(
    row: Row, documents: Sequence[Document], tokenizer: Tokenizer, ids: bool, style: Style
) -> str:
    """Return a row as text.

    Special tokens have names, each document has a line before it, and marks show where the loss
    counts none.

    A token counts if the one before it predicts it. The first one of a row belongs to the row
    before.
    """
    tokens = row.tokens.tolist()
    masked = np.concatenate([[row.labels[0] == IGNORE], row.labels[:-1] == IGNORE]).tolist()
    parts = [(f" document {_name(one)} ", one.tokens) for one in documents if one.tokens]
    # Padding comes last.
    parts.append(("", len(tokens)))
    lines: list[str] = []
    begin = 0
    for title, count in parts:
        end = min(begin + count, len(tokens))
        if begin == end:
            break
        numbers = f" {tokens[begin:end]}" if ids else ""
        lines.append(style.dim(f"──{title}──{numbers}"))
        lines.append(_marked(tokens[begin:end], masked[begin:end], tokenizer, style))
        begin = end
    return "\n".join(lines)


def _marked(
    tokens: Sequence[int], masked: Sequence[bool], tokenizer: Tokenizer, style: Style
) -> str:
    """Return the text of tokens, with marks around those that the loss does not count."""
    special = set(tokenizer.special_tokens.values())
    kinds = [(is_masked, token in special) for token, is_masked in zip(tokens, masked, strict=True)]
    text = ""
    for (is_masked, is_special), group in groupby(range(len(tokens)), kinds.__getitem__):
        part = tokenizer.decode(tokens[number] for number in group)
        if is_masked and style.color:
            part = style.dim(part)
        elif is_masked:
            part = f"[[{part}]]"
        elif is_special:
            part = style.warn(part)
        text += part
    return text


def _name(document: Document) -> str:
    return f"{document.source}: {document.name}" if document.source else document.name


# Figures


def stats(run: Run, as_json: bool) -> str:
    """Return figures of the training text and of each source of a mixture, as text or JSON."""
    training = run.config.training
    name = training.dataset_path or training.dataset
    texts = run.rows.texts(name)
    shares = run.rows.shares
    found: dict[str, Any] = {"text": ", ".join(texts)}
    if not shares:
        found |= _figures(run.rows, run)
    else:
        sources = {}
        for source, rows in texts.items():
            sources[source] = {"share": round(shares[source], 6), **_figures(rows, run)}
        found |= {
            "seq_len": run.rows.seq_len,
            "global_batch": run.config.batch.global_batch_size,
            "sources": sources,
        }
    return json.dumps(found, indent=1) if as_json else "\n".join(_shown(found))


def _figures(rows: Rows, run: Run) -> dict[str, Any]:
    """Return the figures of one text; None for those of a stream that are not known."""
    global_batch = run.config.batch.global_batch_size
    rows_per_step = run.config.course.size(1).rows
    corpus = rows.corpus
    sequences = rows.sequences_per_epoch
    files = None
    passed_over = None
    if rows.listing is not None:
        files = dict(rows.listing.kinds)
        passed_over = {reason: [*names] for reason, names in rows.listing.passed_over.items()}
    return {
        "documents": None if corpus is None else corpus.documents,
        "tokens": rows.tokens_per_epoch,
        "bytes_per_token": round(bytes_per_token(rows, run.tokenizer), 3),
        "seq_len": rows.seq_len,
        "sequences_per_epoch": sequences,
        "global_batch": global_batch,
        "steps_per_epoch": None if sequences is None else round(sequences / rows_per_step, 3),
        "fingerprint": rows.fingerprint,
        "files": files,
        "passed_over": passed_over,
        "document_tokens": None if corpus is None else _lengths(corpus),
    }


def _shown(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each figure, and bars for the lengths of documents."""
    for name, value in figures.items():
        if name == "sources":
            for source, own in value.items():
                yield from ("", f"{'source':<20} {source}", *_shown(own))
        elif name in ("files", "passed_over"):
            yield from _shown_files(name, value)
        elif name != "document_tokens":
            yield f"{name.replace('_', ' '):<20} {_shown_value(value)}"
        elif value:
            yield from _shown_lengths(value)


def _shown_value(value: Any) -> str:
    if value is None:
        return "not known"
    return f"{value:,.10g}" if isinstance(value, (int, float)) else str(value)


def _shown_lengths(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield mean and longest of the documents' lengths, and a bar for each class of lengths."""
    title = "tokens per document"
    yield f"{title:<20} mean {found['mean']:,.1f}, longest {found['longest']:,}"
    most = max(found["histogram"].values())
    for low, number in found["histogram"].items():
        bar = "█" * max(round(_BAR * number / most), number > 0)
        high = human_count(2 * int(low) - 1)
        yield f"  {human_count(int(low)):>8} … {high:<8} {number:>12,} {bar}"


def _shown_files(name: str, found: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a line for each kind of file (kind → number), or each reason for passing over (reason →
    names).
    """
    title = name.replace("_", " ")
    for entry, value in (found or {}).items():
        about = f"{value:,} of {entry}" if name == "files" else f"{', '.join(value)} ({entry})"
        yield f"{title:<20} {about}"


def bytes_per_token(rows: Rows, tokenizer: Tokenizer) -> float:
    """Return bytes of text to a token; where they were not counted, those of some sequences,
    decoded.
    """
    if rows.corpus is not None and rows.corpus.text_bytes is not None:
        return rows.corpus.text_bytes / rows.corpus.size
    total = rows.total_sequences or rows.sequences_per_epoch or _SAMPLE
    samples = np.unique(np.linspace(0, total - 1, _SAMPLE).astype(np.int64)).tolist()
    special = set(tokenizer.special_tokens.values())
    size = 0
    tokens = 0
    for number in samples:
        ids = rows.sequence(number).tokens.tolist()
        size += len(tokenizer.decode(one for one in ids if one not in special).encode())
        tokens += sum(document.tokens for document in documents_of(rows, number, ""))
    return size / tokens


def _lengths(corpus: Tokens) -> dict[str, Any]:
    """Return mean, longest and histogram (lowest length → documents) of documents."""
    lengths = np.diff(corpus.offsets)
    bins = np.bincount(np.log2(np.maximum(lengths, 1)).astype(np.int64))
    used = np.flatnonzero(bins)
    histogram = {str(1 << n): int(bins[n]) for n in range(int(used[0]), int(used[-1]) + 1)}
    return {"mean": float(lengths.mean()), "longest": int(lengths.max()), "histogram": histogram}
