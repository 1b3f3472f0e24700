"""Look at the text of a run before its launch: its figures, and rows as the model sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from titanlite.assembly.datasets import read_held_out, read_training_text
from titanlite.data import DataError
from titanlite.data.documents import Document, documents_of
from titanlite.data.rows import IGNORE, Row, Rows
from titanlite.data.text_report import file_lines, file_warnings
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.run.config import RunConfig
from titanlite.runs.text_tables import Style
from titanlite.utils import counted, escape, human_bytes, json_lines


def peek(run: RunConfig, validation: bool, first: int, count: int, style: Style) -> str:
    """Return the figures of a run's text, and `count` sequences from number `first` on.

    validation: the held-out text. Raises DataError.
    """
    tokenizer = load_tokenizer(run.model.tokenizer_path, run.model.name)
    name = run.training.dataset_path or run.training.dataset
    if validation:
        name, rows = next(iter(read_held_out(run, tokenizer).items()))
    else:
        rows = read_training_text(run, tokenizer)
    total = rows.total_sequences
    if total is not None and first >= total:
        raise DataError(f"--first {first}: the text has {counted(total, 'sequences')}, from 0")
    shown = ["\n".join(_figures(rows, name, run.course.size(1).rows))]
    if not style.color:
        shown.append("[[ ]]: the loss does not count these tokens")
    for number in range(first, min(first + count, total or first + count)):
        row = rows.sequence(number)
        tokens = counted(len(row.tokens), "tokens")
        targets = counted(int((row.labels != IGNORE).sum()), "targets")
        title = style.bold(f"sequence {number}: {tokens}, {targets}")
        text = shown_row(row, documents_of(rows, number, ""), tokenizer, style)
        shown.append(f"{title}\n{text}")
    return "\n\n".join(shown)


def peek_bad_step(run: RunConfig, step: int, texts: int) -> str:
    """Return the documents of a bad step by loss."""
    from titanlite.metrics.bad_step_log import FILE

    path = Path(run.job.dump_folder) / FILE
    try:
        rows = [row for _, row, _ in json_lines(path) if row and row.get("step") == step]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. The guard writes it at a bad step") from None
    found = [row for row in rows if row.get("losses")]
    if not found:
        raise DataError(f"{path} has no losses of step {step}")
    row = found[-1]
    shown = [row["message"]]
    for one in row["losses"][:texts]:
        name = _name(Document(*[one[key] for key in Document._fields]))
        figures = f"loss {one['loss']}, the others {one['others']}, {one['tokens']} targets"
        shown.append(f"── document {name} ──\n{figures}\n{one['text']} …")
    steps = json.dumps([int(text) if text.isdigit() else text for text in [row["data_steps"]]])
    shown.append(f"To pass over the data of this step:\n[data]\nskip_steps = {steps}")
    return escape("\n\n".join(shown))


# Figures


def _figures(rows: Rows, name: str, per_step: int) -> Iterator[str]:
    # name: of a single text. per_step: sequences of a step.
    yield from file_lines(rows)
    for warning in file_warnings(rows, name):
        yield f"warning: {warning}"
    for source, text in rows.texts().items():
        share = f"{rows.shares[source]:.2%} of the tokens, " if rows.shares else ""
        title = f"{source}: {share}" if source else ""
        yield f"{title}{_size(text)}"
    yield rows.describe()
    if rows.sequences_per_epoch is not None:
        sequences = counted(rows.sequences_per_epoch, "sequences")
        steps = rows.sequences_per_epoch / per_step
        yield f"{sequences} of {rows.seq_len:,} tokens per epoch, {steps:,.4g} steps of {per_step}"


def _size(rows: Rows) -> str:
    corpus = rows.corpus
    if corpus is None:
        return "a stream, whose documents and characters are not known before they are read"
    lengths = np.diff(corpus.offsets)
    text = f"{counted(corpus.documents, 'documents')} of {lengths.mean():,.1f} tokens"
    text += f" ({lengths.max():,} at most)"
    if corpus.characters is not None:
        return f"{text}, {counted(corpus.characters, 'characters')}"
    if corpus.text_bytes is not None:
        return f"{text}, {human_bytes(corpus.text_bytes)} of text"
    return text


# Rows


def shown_row(row: Row, documents: Sequence[Document], tokenizer: Tokenizer, style: Style) -> str:
    """Return a row as text, with names of special tokens and a line before each document.

    Marks show where the loss counts none: a token counts if the one before it predicts it. The
    first one belongs to the row before.
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
        lines.append(style.dim(f"──{title}──"))
        lines.append(_marked(tokens[begin:end], masked[begin:end], tokenizer, style))
        begin = end
    return "\n".join(lines)


def _marked(
    tokens: Sequence[int], masked: Sequence[bool], tokenizer: Tokenizer, style: Style
) -> str:
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
    name = f"{document.source}: {document.name}" if document.source else document.name
    if document.file is None or name.endswith(f"{document.file}:{document.record}"):
        return name
    return f"{name} = {document.file}, record {document.record}"
