"""Errors of checkpoints, apart from the files that raise them: a run without checkpoints catches
them too.
"""

from __future__ import annotations

from titanlite import exit_codes


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded, or is another run's; the message says what to do."""

    exit_code = exit_codes.CHECKPOINT


class NewerFormatError(CheckpointError):
    """A later titanlite wrote the checkpoint: it is never passed over or replaced."""
