"""logs/rank_N.log: the whole log of one rank, also lines that its console leaves out, and the
rank's end.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from titanlite import exit_codes
from titanlite.utils import escape, logger, not_a_link, say

FOLDER = "logs"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class RankLog(logging.FileHandler):
    """Appends the log of one rank to a file, without colours. Raises OSError.

    A later failed write loses lines, with one line on standard error.
    """

    _warned = False

    def _open(self) -> TextIOWrapper:
        return open(  # noqa: SIM115
            self.baseFilename, "a", encoding="utf-8", errors="backslashreplace", opener=not_a_link
        )

    def format(self, record: logging.LogRecord) -> str:
        return escape(_COLOR.sub("", super().format(record)))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - of logging
        if not self._warned:
            self._warned = True
            say(f"cannot write {self.baseFilename}: {sys.exc_info()[1]}; log lines are lost")


@contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[None]:
    """Log this rank into `folder` during the block, and the exception that leaves it.

    An unwritable folder costs the log, with a warning.
    """
    path = Path(folder) / FOLDER / f"rank_{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = RankLog(path)
    except OSError as error:
        logger.warning(
            f"cannot write {path.parent}: {error}. Training continues without logs per rank"
        )
        yield
        return
    file.setLevel(logging.INFO)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def log(level: int, text: str) -> None:
        file.handle(logging.LogRecord(logger.name, level, __file__, 0, text, None, None))

    logger.addHandler(file)
    log(logging.INFO, f"rank {rank} begins, process {os.getpid()}")
    try:
        yield
    except BaseException as error:
        if getattr(error, "exit_code", None) in exit_codes.STOPPED:
            log(logging.INFO, f"rank {rank} ends: {error}")
        else:
            log(logging.ERROR, f"rank {rank} ends:\n{traceback.format_exc().rstrip()}")
        raise
    else:
        log(logging.INFO, f"rank {rank} ends")
    finally:
        logger.removeHandler(file)
        # `handleError` has told of a full disk. That must not replace the run's own end.
        with suppress(OSError):
            file.close()
