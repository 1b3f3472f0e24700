"""The process of one rank: `train.py`. What is wrong is told before torch is imported, which takes seconds."""
"""The process of one rank. A wrong config is told before the import of torch, which takes seconds."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from titanlite import exit_codes
from titanlite.config.errors import ConfigError
from titanlite.parallel.environment import WorldError, read_environment
from titanlite.parent import stop_with_torchrun
from titanlite.prepare import checked_plans

SECONDS_TO_SPEAK = 3.0
#: Names the file in which `titanlite.torchrun` wants the workers' exit codes.
EXIT_CODES_VARIABLE = "TITANLITE_EXIT_CODES"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Train as the command line says (None: that of the process); ends the process."""
    argv = sys.argv[1:] if argv is None else argv
    stop_with_torchrun()
    if (code := refused(argv)) is not None:
        leave(code)
    from titanlite import app

    app.main(argv)


def refused(argv: Sequence[str]) -> int | None:
    """Tell what is wrong with the environment or the config and return the exit code; None where nothing is."""
    try:
        checked_plans(argv, read_environment().size, training=True)
    except (ConfigError, WorldError) as error:
        return end(str(error), exit_codes.CONFIG)
    return None


def end(message: str, code: int) -> int:
    """Print why the run ends, once per node: its ranks all have the same to say.

    The first worker to leave makes torchrun end the others, so those that do not print give the one that does time.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_TO_SPEAK)
        # Still here: the one that prints had nothing to say, so this went wrong on this rank alone.
        print(f"error: [rank {os.environ.get('RANK')}] {message}", file=sys.stderr, flush=True)
    return code


def leave(code: int, words: str = "") -> NoReturn:
    """End this process here and now. words: of an error that nobody foresaw."""
    _report_code(code, words)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads sometimes abort a finished process at interpreter exit; everything of ours is closed by now, or
    # cannot be closed.
    os._exit(code)


def _report_code(code: int, words: str) -> None:
    """Leave this worker's exit code where the launcher looks for it: torchrun does not pass it on."""
    path = os.environ.get(EXIT_CODES_VARIABLE)
    if path:
        with contextlib.suppress(OSError), open(path, "a") as file:
            told = f" {json.dumps(words)}" if words else ""
            file.write(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {code}{told}\n")
