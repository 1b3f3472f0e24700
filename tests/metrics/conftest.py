"""A terminal for the tests of the live view."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.metrics.terminal import Terminal
from titanlite.metrics.console import console_handler
from titanlite.utils import logger


@pytest.fixture
def clean_console(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A terminal's environment; the logger and its view are put back afterwards."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "CI", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    if (handler := console_handler()) and handler.view:
        handler.view.close()
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def terminal(clean_console: None) -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()
