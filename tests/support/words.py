"""What titanlite says while a test looks on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from titanlite.utils import logger


@contextmanager
def listening(least: int = logging.INFO) -> Iterator[list[str]]:
    """The messages of at least this level that are logged within, in their order."""
    said: list[str] = []
    listener = logging.Handler(least)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
