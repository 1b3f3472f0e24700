"""The commands of `titanlite data` in this process."""

from __future__ import annotations

import pytest

from tests.support.commands import Command
from titanlite.cli import main as cli


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `titanlite data`; return its exit code and all that it prints."""

    def run(*words: object) -> tuple[int, str]:
        if words[0] == "prepare" and "--tokenizer" not in words:
            words = (*words, "--tokenizer", "bundled")
        code = cli.main(["data", *map(str, words)])
        out, error = capfd.readouterr()
        return code, out + error

    return run
