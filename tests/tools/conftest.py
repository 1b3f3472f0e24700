"""The commands of `titanlite data` in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from titanlite.tools import cli

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `titanlite data`; return its exit code and all that it prints."""

    def run(*words: object) -> tuple[int, str]:
        code = cli.main(["data", *map(str, words)])
        out, error = capfd.readouterr()
        return code, out + error

    return run
