"""The process of one rank: `train.py`. It checks environment and config before the import of torch: seconds saved."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from titanlite import exit_codes

SECONDS_TO_SPEAK = 3.0
#: Names the file in which `titanlite.torchrun` wants the workers' exit codes.
EXIT_CODES_VARIABLE = "TITANLITE_EXIT_CODES"
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Train as the command line says (None: that of the process); ends the process."""
    argv = sys.argv[1:] if argv is None else argv
    leave_on_signals(signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    stop_with_torchrun()
    if (code := refused(argv)) is not None:
        leave(code)
    from titanlite import app

    app.main(argv)


def leave_on_signals(*numbers: signal.Signals) -> None:
    """These signals end the process at once with exit code 5, while it only imports: nothing is lost yet.

    What listens later (`GracefulStop`, torchrun) replaces it.
    """
    with contextlib.suppress(OSError), open(os.environ.get(EXIT_CODES_VARIABLE, os.devnull), "a"):
        pass  # the launcher sees by the file that this worker will tell how it ends
    for number in numbers:
        if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # as `GracefulStop` does
            signal.signal(number, _leave_now)


def _leave_now(number: int, frame: FrameType | None) -> None:
    report_code(exit_codes.PREEMPTED)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, f"stopped: {signal.Signals(number).name} before the first step\n".encode())
    os._exit(exit_codes.PREEMPTED)


def refused(argv: Sequence[str]) -> int | None:
    """Tell what is wrong with the environment or the config and return the exit code; None where nothing is."""
    from titanlite.config.errors import ConfigError
    from titanlite.parallel.environment import WorldError, read_environment
    from titanlite.prepare import checked_plans

    try:
        checked_plans(argv, read_environment().size, training=True)
    except (ConfigError, WorldError) as error:
        return end(str(error), exit_codes.CONFIG)
    return None


def end(message: str, code: int) -> int:
    """Print why the run ends, once per node: its ranks all have the same to say.

    The first worker to leave makes torchrun end the others, so those that do not print give the one that does time.
    """
    from titanlite.utils import escape

    message = escape(message)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_TO_SPEAK)
        # Still here: the one that prints had nothing to say, so this went wrong on this rank alone.
        print(f"error: [rank {os.environ.get('RANK')}] {message}", file=sys.stderr, flush=True)
    return code


def leave(code: int, words: str = "") -> NoReturn:
    """End this process here and now. words: of an error that nobody foresaw."""
    report_code(code, words)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads sometimes abort a finished process at interpreter exit; everything of ours is closed by now, or
    # cannot be closed.
    os._exit(code)


def report_code(code: int, words: str = "") -> None:
    """Leave this worker's exit code where the launcher looks for it: torchrun does not pass it on."""
    path = os.environ.get(EXIT_CODES_VARIABLE)
    if path:
        with contextlib.suppress(OSError), open(path, "a") as file:
            told = f" {json.dumps(words)}" if words else ""
            file.write(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {code}{told}\n")


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent has ended, for whatever reason.

    Linux only; elsewhere nothing happens. The parent is the thread that started this process.
    """
    import ctypes

    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), number)


def stop_with_torchrun() -> None:
    """Let a worker save a checkpoint and stop when its torchrun is killed. Without torchrun nothing happens."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)
