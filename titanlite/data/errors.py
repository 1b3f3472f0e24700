"""What the data room raises when text, tokenizer or settings are not what they should be."""

from __future__ import annotations

from titanlite import exit_codes


class DataError(ValueError):
    """Bad data: the message names the file (and record or line) and says what to do."""

    exit_code = exit_codes.CONFIG


class EndOfData(Exception):  # noqa: N818 - an end, not an error, like StopIteration
    """All epochs of a finite data set have been served."""
