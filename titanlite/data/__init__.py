"""Text in, batches out.

- `dataset_builder` turns the keys about text into sequences: whole (`text_files` →
  `tokenize_files` → `sequences`), as a stream (`stream_files` → `stream`), or as token files
  (`token_files`).
- `rows` is their interface; `sequences` says what sequence i is, by the orders of `epoch_order`;
  `mixtures/` mixes several sources.
- `loader` cuts this rank's batches from the global order, `prefetch` prepares them ahead.
- `tokenizer/` has the tokenizers, `chat` the conversations, `foreign/` tokens of other programs.
- `phases` and `step_sizes` tell what changes in the course of a run; `state_checks` what a
  checkpoint holds of all this.
"""

from __future__ import annotations

from titanlite import exit_codes


class DataError(ValueError):
    """Bad text, tokenizer or settings. The message names the place and the remedy."""

    exit_code = exit_codes.CONFIG


class DamagedError(Exception):
    """A library's reader finds the content damaged or truncated."""


class EndOfData(Exception):  # noqa: N818 - an end, not an error, like StopIteration
    """All epochs of a finite data set are served."""
