"""How often the runs of a ladder, and the run that they predict, read the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from titanlite import exit_codes
from titanlite.assembly.datasets import read_training_text
from titanlite.contrib.lab.ladder.law import Point
from titanlite.data.tokenizer import load_tokenizer
from titanlite.run.config import RunConfig
from titanlite.utils import human_count


def tokens_of_text(run: RunConfig) -> int | None:
    """Return the tokens of one pass over the training text, as the runs of a ladder have read it.

    None: it is a stream, or a mixture, or cannot be read any more.
    """
    try:
        tokenizer = load_tokenizer(run.model.tokenizer_path, run.model.name)
        return read_training_text(run, tokenizer).tokens_per_epoch
    except Exception as error:
        # Its runs are made: what this note lacks must not end a ladder.
        if exit_codes.own_code(error) is None and not isinstance(error, OSError):
            raise
        return None


def with_passes(points: Sequence[Point], text: int | None) -> list[Point]:
    """Return the points with their passes over a text. text: its tokens; None: unknown."""
    if not text:
        return list(points)
    return [replace(point, passes=point.tokens / text) for point in points]


def passes_note(points: Sequence[Point], tokens: float, text: int | None) -> str | None:
    """Return which runs read the text more than once; None: none does.

    points: with their passes. tokens: of the run that is predicted.
    """
    if not text:
        return None
    again = [point for point in points if (point.passes or 0) > 1]
    told = []
    if again:
        most = max(again, key=lambda point: point.passes or 0)
        told.append(f"{len(again)} of {len(points)} runs, at most {most.passes:.3g} times")
    if tokens > text:
        told.append(f"this file, {tokens / text:.3g} times")
    if not told:
        return None
    return (
        f"the text has {human_count(text)} tokens, and it is read more than once by "
        f"{' and '.join(told)}: the law is of new tokens, and its interval does not tell"
    )
