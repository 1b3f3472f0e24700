"""torch's flight recorder: the last collectives of each rank, for `torchfrtrace` to compare.

NCCL's watchdog writes the records when a collective fails or times out. gloo writes none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

#: Environment variables of one meaning; torch takes the first that is set.
_ENTRIES: tuple[str, ...] = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PREFIX: tuple[str, ...] = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT: tuple[str, ...] = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)


@contextlib.contextmanager
def recording(folder: str, buffer_size: int) -> Iterator[None]:
    """Record the last `buffer_size` collectives of NCCL (0: none), and write them to `folder`; ""
    is torch's own place.

    Enter it before process groups, which read the environment. Variables that the user has set
    stay.
    """
    wanted = {_ENTRIES: str(buffer_size)}
    if buffer_size > 0 and folder:
        wanted |= {_PREFIX: str(Path(folder).absolute() / "rank_"), _ON_TIMEOUT: "1"}
        # A folder that cannot be written to ends the run by other means; NCCL makes none.
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
    ours = {}
    for names, value in wanted.items():
        if not any(name in os.environ for name in names):
            ours[names[0]] = value
    os.environ.update(ours)
    yield
    # After an error they stay: NCCL may be about to read them.
    for name in ours:
        os.environ.pop(name, None)
