"""Look at the text of a run: its rows as the model sees them, the documents of a step, and figures of all of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.checkpoint.manifest import CheckpointError, parse_manifest, root_of, step_folder, step_of, steps_in
from titanlite.checkpoint.paths import to_path
from titanlite.config.errors import ConfigError
from titanlite.config.not_implemented import refused
from titanlite.data import DataError, skip_ranges
from titanlite.data.corpus import Corpus
from titanlite.data.packing import PackedDataset
from titanlite.data.rows import IGNORE, Row, Rows
from titanlite.data.skip_ranges import Range, ranges_of_steps
from titanlite.data.sources import columns_of, iter_records
from titanlite.data.token_files import TokenFiles
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.derive import RunConfig
from titanlite.fit import check_config, fitted
from titanlite.run_text import read_held_out, read_training_text
from titanlite.runs.record import read_attempts
from titanlite.tools.cli import no_flags
from titanlite.tools.config import side, world_size_of
from titanlite.utils import Style, counted, human_count

#: Tokens and characters of a document's start that are shown.
_TOKENS, _CHARACTERS = 48, 72
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


@dataclass(frozen=True)
class Run:
    """A run's config and text."""

    config: RunConfig
    tokenizer: Tokenizer
    rows: Rows
    #: Of its checkpoints, by step; empty for a config.
    states: Sequence[State] = ()


def open_run(file: str | None, flags: Sequence[str], world_size: int | None, validation: bool = False) -> Run:
    """Read the text of a config, or of the folder of a run or its checkpoints.

    Raises ConfigError and DataError as training does, and for a run whose text is another one by now.
    """
    states: list[State] = []
    expected: Mapping[str, str] = {}
    if file is not None and os.path.isdir(file):
        no_flags(flags)
        asked = side(file).config
        if problems := refused(asked):
            raise ConfigError(problems)
        states, expected, ranks = _history(Path(file))
        config = fitted(asked, world_size or ranks)
    else:
        argv = [*([f"--job.config_file={file}"] if file else []), *flags]
        _, config = check_config(argv, world_size_of(world_size)[0])
    tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.name)
    if validation:
        return Run(config, tokenizer, next(iter(read_held_out(config, tokenizer).values())))
    rows = read_training_text(config, tokenizer)
    if (then := expected.get("data")) not in (None, rows.fingerprint[:16]):
        raise DataError(
            f"{file}: the text has changed since: its fingerprint was {then}, and is {rows.fingerprint[:16]}"
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
        if "next_sequence" in data and "global_batch" in manifest.train:
            skipped = skip_ranges.merged(data.get("left_out", ()))
            rows = data.get("rows", {})
            states.append(State(step, data["next_sequence"], skipped, manifest.train["global_batch"], rows))
        fingerprints, ranks = manifest.fingerprints, manifest.world_size
    attempts = [] if ranks else read_attempts(folder)
    return states, fingerprints, ranks or (attempts[-1].get("world_size", 1) if attempts else 1)


def sequences_of(run: Run, step: int) -> list[int]:
    """Return the sequences of a step, from 1. Raises DataError where the checkpoints do not tell."""
    if step < 1:
        raise DataError(f"step {step}: steps count from 1")
    size = run.config.batch.global_batch_size
    skip = ranges_of_steps(run.config.data.skip_steps, size)
    before = max((state for state in run.states if state.step < step), default=State(0, 0, (), size))
    after = min((state for state in run.states if state.step >= step), default=None)
    # A stream need not begin at its start, and shares of a mixture may have changed. Lanes stay those of the start.
    known = after.rows if after else {}
    rows = before.rows or {name: known[name] for name in ("lanes", "revision") if name in known}
    if rows:
        run.rows.load_state_dict(dict(rows), before.position)
    if after is not None:
        size, skip = after.global_batch, after.skipped
        if skip_ranges.advance(before.position, (after.step - before.step) * size, skip) != after.position:
            raise DataError(
                f"step {step}: between steps {before.step} and {after.step} the run changed its global batch or its "
                "place in the text, and no checkpoint is left from then"
            )
    start = skip_ranges.advance(before.position, (step - 1 - before.step) * size, skip)
    total = run.rows.total_sequences
    found = [n for n in skip_ranges.take(start, size, skip) if total is None or n < total]
    if not found:
        raise DataError(f"step {step}: the text ends before it, after {counted(total or 0, 'sequences')}")
    return found


# Documents


class Document(NamedTuple):
    """`file` and `record`: where it is from, counted from 1, where that is known. `text`: its beginning."""

    name: str
    file: str | None = None
    record: int | None = None
    text: str | None = None


def describe(run: Run, names: Sequence[Any]) -> dict[Any, Document]:
    """Return what is known of documents that `Rows.documents_in` names."""
    rows, tokenizer = run.rows, run.tokenizer
    if isinstance(rows, PackedDataset):
        corpus = rows.corpus
        files = corpus if isinstance(corpus, TokenFiles) else None
        places = {name: files.place_of(name) for name in names} if files else _places(run, set(names))
        ends = {name: np.minimum(corpus.offsets[name : name + 2], corpus.offsets[name] + _TOKENS) for name in names}
        return {n: Document(str(n), *places[n], _beginning(corpus.read(*ends[n]), tokenizer)) for n in names}
    return {name: Document(str(name)) for name in names}


def _beginning(ids: NDArray[Any], tokenizer: Tokenizer) -> str:
    special = set(tokenizer.special_tokens.values())
    text = tokenizer.decode(int(one) for one in ids if one not in special)
    return " ".join(text.split())[:_CHARACTERS]


def _places(run: Run, numbers: set[int]) -> dict[int, tuple[str, int]]:
    """Read the text up to the last of these documents; return their places."""
    assert isinstance(run.rows, PackedDataset) and isinstance(run.rows.corpus, Corpus)
    data, files = run.config.data, run.rows.corpus.files
    if not files:
        return {number: (run.config.training.dataset, number + 1) for number in numbers}
    columns = columns_of(data, run.config.training.dataset, run.config.training.dataset_path)
    found: dict[int, tuple[str, int]] = {}
    for number, record in enumerate(iter_records(files, columns)):
        if number in numbers:
            found[number] = str(record.file), record.number
        if len(found) == len(numbers):
            break
    return found


def at_step(run: Run, step: int, as_json: bool) -> str:
    """Return the documents of the batch of a step, a line each."""
    sequences = {sequence: run.rows.documents_in(sequence) for sequence in sequences_of(run, step)}
    documents = describe(run, list(dict.fromkeys(name for names in sequences.values() for name in names)))
    if as_json:
        listed = {str(n): [documents[name]._asdict() for name in names] for n, names in sequences.items()}
        return json.dumps({"step": step, "sequences": listed}, indent=1)
    lines = [f"step {step}: {counted(len(sequences), 'sequences')} of {run.rows.seq_len} tokens"]
    for sequence, names in sequences.items():
        lines.append(f"sequence {sequence}: {counted(len(names), 'documents')}")
        lines += [f"  {_line(documents[name])}" for name in names]
    return "\n".join(lines)


def _line(document: Document) -> str:
    place = f" = {document.file}, record {document.record}" if document.file else ""
    return f"document {document.name}{place}" + (f": {document.text}" if document.text is not None else "")


# Rows


def peek(run: Run, count: int, step: int, rank: int | None, ids: bool, style: Style) -> str:
    """Return the text of the first `count` sequences from `step` on, of one data-parallel rank or of all."""
    ranks, total = run.config.mesh.dp_degree, run.rows.total_sequences
    if rank is not None and not 0 <= rank < ranks:
        raise DataError(
            f"--rank {rank}: data-parallel ranks run from 0 to {ranks - 1}; --world-size gives their number"
        )
    shown: list[str] = []
    while len(shown) < count:
        for sequence in sequences_of(run, step):
            if rank in (None, sequence % ranks) and len(shown) < count:
                row, names = run.rows.sequence(sequence), run.rows.documents_in(sequence)
                targets = int((row.labels != IGNORE).sum())
                about = f"step {step}, sequence {sequence}, rank {sequence % ranks}: "
                about += f"{counted(len(row.tokens), 'tokens')}, {counted(targets, 'targets')}"
                shown.append(f"{style.bold(about)}\n{shown_row(row, names, run.tokenizer, ids, style)}")
        step += 1
        if total is not None and sequence == total - 1:
            break
    legend = "" if style.color else "[[ ]]: the loss does not count these tokens\n\n"
    return legend + "\n\n".join(shown)


class _Look(NamedTuple):
    """Tokens that are shown alike. special: the id of a special token."""

    part: int
    masked: bool
    special: int | None


def shown_row(row: Row, names: Sequence[Any], tokenizer: Tokenizer, ids: bool, style: Style) -> str:
    """Return a row as text: special tokens by name, a line before each document, and marks where the loss counts none.

    A token counts if the one before it predicts it, and the first one of a row belongs to the row before.
    """
    special = set(tokenizer.special_tokens.values())
    begins = row.tokens == tokenizer.bos_id if row.documents is None else np.diff(row.documents, prepend=-1) != 0
    begins[0] = True
    parts = np.cumsum(begins) - 1
    masked = np.concatenate([[row.labels[0] == IGNORE], row.labels[:-1] == IGNORE])
    looks = [
        _Look(int(part), bool(mask), int(token) if token in special else None)
        for part, mask, token in zip(parts, masked, row.tokens, strict=True)
    ]
    lines: list[str] = []
    before, at = -1, 0
    for look, group in groupby(looks):
        tokens = row.tokens[at : at + len(list(group))]
        if look.part != before:
            name = f" document {names[look.part]} " if look.part < len(names) else " "
            end = np.searchsorted(parts, look.part, side="right")
            lines.append(style.dim(f"──{name}──" + (f" {row.tokens[at:end].tolist()}" if ids else "")))
            lines.append("")
            before = look.part
        text = tokenizer.decode(tokens.tolist())
        if look.masked:
            text = style.dim(text) if style.color else f"[[{text}]]"
        elif look.special is not None:
            text = style.warn(text)
        lines[-1] += text
        at += len(tokens)
    return "\n".join(lines)


# Figures


def stats(run: Run, as_json: bool) -> str:
    """Return figures of the training text, as text or JSON."""
    rows, batch = run.rows, run.config.batch
    known = rows if isinstance(rows, PackedDataset) else None
    found: dict[str, Any] = {
        "text": run.config.training.dataset_path or run.config.training.dataset,
        "documents": known and known.documents,
        "tokens": known and known.tokens_per_epoch,
        "bytes_per_token": round(bytes_per_token(run), 3),
        "seq_len": rows.seq_len,
        "sequences_per_epoch": known and known.sequences_per_epoch,
        "global_batch": batch.global_batch_size,
        "steps_per_epoch": None if known is None else round(known.sequences_per_epoch / batch.global_batch_size, 3),
        "fingerprint": rows.fingerprint,
        "document_tokens": _lengths(rows),
    }
    if as_json:
        return json.dumps(found, indent=1)
    lengths = found.pop("document_tokens")
    lines = [f"{name.replace('_', ' '):<20} {_shown(value)}" for name, value in found.items()]
    if lengths:
        lines.append(f"{'tokens per document':<20} mean {lengths['mean']:,.1f}, longest {lengths['longest']:,}")
        most = max(lengths["histogram"].values())
        for low, number in lengths["histogram"].items():
            bar = "█" * max(round(_BAR * number / most), number > 0)
            lines.append(f"  {human_count(int(low)):>8} … {human_count(2 * int(low) - 1):<8} {number:>12,} {bar}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "not known" if value is None else f"{value:,.10g}" if isinstance(value, (int, float)) else str(value)


def bytes_per_token(run: Run) -> float:
    """Return bytes of text to a token; where they were not counted, those of some sequences, decoded."""
    rows = run.rows
    if isinstance(rows, PackedDataset) and isinstance(rows.corpus, TokenFiles) and rows.corpus.index:
        return float(rows.corpus.index["text_bytes"] / rows.corpus.size)
    total = rows.total_sequences or int(getattr(rows, "sequences_per_epoch", _SAMPLE))
    special = set(run.tokenizer.special_tokens.values())
    size = tokens = 0
    for sequence in np.unique(np.linspace(0, total - 1, _SAMPLE).astype(np.int64)).tolist():
        ids = [one for one in rows.sequence(sequence).tokens.tolist()]
        size += len(run.tokenizer.decode(one for one in ids if one not in special).encode())
        tokens += len(ids)
    return size / tokens


def _lengths(rows: Rows) -> dict[str, Any] | None:
    """Return mean, longest and histogram (lowest length → documents) of documents; None where they are not known."""
    if not isinstance(rows, PackedDataset):
        return None
    lengths = np.diff(rows.corpus.offsets)
    bins = np.bincount(np.log2(np.maximum(lengths, 1)).astype(np.int64))
    used = np.flatnonzero(bins)
    histogram = {str(1 << n): int(bins[n]) for n in range(int(used[0]), int(used[-1]) + 1)}
    return {"mean": float(lengths.mean()), "longest": int(lengths.max()), "histogram": histogram}
