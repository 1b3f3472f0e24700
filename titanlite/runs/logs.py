"""logs/rank_N.log: everything titanlite says on one rank, also what its console leaves out, and how the rank ended."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titanlite.signals import StopRequested
from titanlite.utils import escape, logger

FOLDER = "logs"
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class RankLog(logging.FileHandler):
    """Appends the log of one rank to `<folder>/logs/rank_N.log`, without colours. Raises OSError.

    What cannot be written later (disk full) is lost with one line on standard error.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        path = Path(folder) / FOLDER / f"rank_{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setLevel(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._warned = False

    def format(self, record: logging.LogRecord) -> str:
        return escape(_ESCAPE.sub("", super().format(record)))

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._warned:
            self._warned = True
            print(f"cannot write {self.baseFilename}: {sys.exc_info()[1]}; log lines are lost", file=sys.stderr)


@contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[None]:
    """Log this rank into `folder` while the block runs; an exception that leaves it is written too, with traceback.

    A folder that cannot be written to costs the log, with a warning.
    """
    try:
        handler = RankLog(folder, rank)
    except OSError as error:
        logger.warning(f"cannot write {Path(folder) / FOLDER}: {error}. Training goes on without logs per rank")
        yield
        return
    logger.addHandler(handler)
    handler.handle(_line(logging.INFO, f"rank {rank} begins, process {os.getpid()}"))
    try:
        yield
    except StopRequested as end:
        handler.handle(_line(logging.INFO, f"rank {rank} ends: {end}"))
        raise
    except BaseException:
        handler.handle(_line(logging.ERROR, f"rank {rank} ends:\n{traceback.format_exc().rstrip()}"))
        raise
    else:
        handler.handle(_line(logging.INFO, f"rank {rank} ends"))
    finally:
        logger.removeHandler(handler)
        handler.close()


def _line(level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord(logger.name, level, __file__, 0, text, None, None)
