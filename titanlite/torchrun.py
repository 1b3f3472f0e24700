"""torchrun that ends with its workers' exit code: python -m titanlite.torchrun [torchrun's arguments]

torchrun itself ends with 1 whatever the workers returned. They write their codes to a file (`exit_codes.report_code`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from titanlite import exit_codes
from titanlite.signals import exit_on_signals
from titanlite.utils import escape

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def after_signal(text: str | None) -> int:
    """The exit code when torchrun was asked to stop. text: as `worst` takes it; None: no worker had begun."""
    if text is None:
        return exit_codes.PREEMPTED
    return worst(text) or (exit_codes.DONE if text else exit_codes.ERROR)


def worst(text: str, failed: Iterable[int] = ()) -> int | None:
    """One code of many. None where nothing is told, or all workers are done.

    text: lines of "restart code", with what there is to say of it as a JSON string behind. The last restart counts.
    A rank that lost its peers tells less than one that has a reason of its own. failed: exit codes of the workers that
    failed first, as torchrun saw them. torchrun stops the others by SIGTERM, so their code 5 is no reason.
    """
    codes = {code for code, _ in _last_restart(text)} - {exit_codes.DONE}
    if any(code < 0 or code in (exit_codes.ERROR, exit_codes.LOST_PEER) for code in failed):
        codes.discard(exit_codes.PREEMPTED)
    reasons = codes - {exit_codes.LOST_PEER, exit_codes.ERROR}
    return min(reasons or codes, default=None)


def last_error(text: str) -> str:
    """What was told of an error that nobody foresaw."""
    return next((words for code, words in _last_restart(text) if code == exit_codes.ERROR and words), "")


def _last_restart(text: str) -> list[tuple[int, str]]:
    lines = [line.split(maxsplit=2) for line in text.splitlines()]
    last = max((int(line[0]) for line in lines), default=0)
    return [(int(code), "".join(map(json.loads, words))) for restart, code, *words in lines if int(restart) == last]


def main() -> NoReturn:
    """Run torchrun in this process. Never returns."""
    # How long workers have for their last checkpoint after SIGTERM; torchrun's own 30 seconds are short for that.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    exit_on_signals(*_SIGNALS)  # until torchrun listens; SIGUSR1 it must go on to ignore where it does
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    with tempfile.TemporaryDirectory(prefix="titanlite-codes-") as folder:
        told = Path(folder) / "codes"
        os.environ[exit_codes.VARIABLE] = str(told)
        failure: str | None = None
        code = exit_codes.DONE
        stopped = False
        failed: list[int] = []
        try:
            torchrun()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else exit_codes.ERROR * bool(end.code)
        except BaseException as error:  # its own for failed workers and for signals are of several kinds
            code, failure = exit_codes.ERROR, traceback.format_exc()
            stopped = isinstance(error, (SignalException, KeyboardInterrupt))
            if isinstance(error, ChildFailedError):
                failed = [failure.exitcode for failure in error.failures.values()]
        for number in _SIGNALS:  # the workers have ended, and their code stands
            signal.signal(number, signal.SIG_IGN)
        text = told.read_text() if told.exists() else None
        words = ""
        if stopped:
            code = after_signal(text)
        elif code and text is not None:
            code = worst(text, failed) or code
        if code:
            words = last_error(text or "")
    # What the workers have explained needs no summary of the launcher's; a killed one explains nothing.
    if failure is not None and code in (exit_codes.ERROR, exit_codes.LOST_PEER):
        print(failure, file=sys.stderr, end="")
    if words and code == exit_codes.ERROR:  # below the summary, where it is read
        print(escape(f"error: {words}"), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
