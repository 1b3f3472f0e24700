"""torchrun that ends with the exit code of its workers: python -m titanlite.torchrun [torchrun's arguments]

torchrun itself ends with 1 for any failure. The workers write their codes to a file (`exit_codes.report_code`).
Ranks of `titanlite train` start as copies of this process, so torch is imported once and not by each of them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from titanlite import exit_codes
from titanlite.signals import exit_on_signals
from titanlite.utils import escape

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: What torchrun starts for the ranks of `command`, after Python itself.
_TRAIN = ["-u", "-m", "titanlite", "train"]


def command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command line that trains on `ranks` ranks of this machine. arguments: of `train.py`."""
    torchrun = [sys.executable, "-m", "titanlite.torchrun", "--nproc_per_node", str(ranks)]
    torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    return [*torchrun, "-m", "titanlite", "train", *arguments]


def worst_code(text: str, failed: Iterable[int] = ()) -> int | None:
    """Return the exit code that says most about the end of all workers; None if all are done or none is recorded.

    text: lines of "restart code", each perhaps followed by an error message as a JSON string. The last restart counts.
    failed: exit codes of the workers that failed first, as torchrun saw them.

    OUT_OF_MEMORY counts first, LOST_PEER and ERROR only if no worker has another reason. torchrun stops the other
    workers by SIGTERM when one fails, so their PREEMPTED does not count then.
    """
    codes = {code for code, _ in _last_restart(text)} - {exit_codes.DONE}
    if any(code < 0 or code in (exit_codes.ERROR, exit_codes.LOST_PEER) for code in failed):
        codes.discard(exit_codes.PREEMPTED)
    if exit_codes.OUT_OF_MEMORY in codes:  # torchrun stops the other workers, which may save then
        return exit_codes.OUT_OF_MEMORY
    return min(codes - {exit_codes.LOST_PEER, exit_codes.ERROR} or codes, default=None)


def code_after_signal(text: str | None) -> int:
    """Return the exit code after torchrun was asked to stop. text: as for `worst_code`; None: no worker had begun."""
    if text is None:
        return exit_codes.PREEMPTED
    return worst_code(text) or (exit_codes.DONE if text else exit_codes.ERROR)


def code_for_scheduler(code: int, failed: Sequence[int]) -> int:
    """Return TITANLITE_RESTART_CODE, if it is set, for an end after which the same command may go on.

    failed: exit codes of the workers that failed first; all killed is such an end, too.
    """
    killed = code == exit_codes.ERROR and bool(failed) and all(number < 0 for number in failed)
    wanted = os.environ.get(exit_codes.RESTART_VARIABLE)
    return int(wanted) if wanted and (killed or code in exit_codes.RESTARTABLE) else code


def last_error(text: str) -> str:
    """Return the message of an unexpected error of a worker, or an empty string. text: as for `worst_code`."""
    return next((message for code, message in _last_restart(text) if code == exit_codes.ERROR and message), "")


def _last_restart(text: str) -> list[tuple[int, str]]:
    lines = [line.split(maxsplit=2) for line in text.splitlines()]
    last = max((int(line[0]) for line in lines), default=0)
    return [(int(code), "".join(map(json.loads, words))) for restart, code, *words in lines if int(restart) == last]


class _Copy(subprocess.Popen[bytes]):
    """A rank that is a copy of this process instead of a new Python. GPUs and threads of torch are not in use here."""

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        env, out, err = given[5], given[11], given[13]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes write what is in its buffer
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of threads, which only talk to other torchruns
            self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            _become_rank(list(args), env, out, err)


def _become_rank(args: list[str], environment: Mapping[str, str], out: int, err: int) -> NoReturn:
    """Do what the command `args` does, with these file descriptors as output (-1: unchanged). Never returns."""
    code = exit_codes.ERROR
    try:
        os.setsid()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for source, target in ((out, 1), (err, 2)):
            if source != -1:
                os.dup2(source, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        import torch

        if (threads := environment.get("OMP_NUM_THREADS", "")).isdecimal():  # it may be set since torch was imported
            torch.set_num_threads(int(threads))
        from titanlite.tools import cli

        sys.argv = [str(Path(__file__).with_name("__main__.py")), *args[args.index("train") :]]
        code = cli.main() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else exit_codes.ERROR * bool(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


def _copy_ranks() -> None:
    """Let torchrun start ranks of `titanlite train` as copies of this process, which imports what they need."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    import titanlite.build
    import titanlite.main
    import titanlite.tools.cli
    import titanlite.trainer  # noqa: F401

    gc.freeze()
    start = SubprocessHandler._popen

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[Any]:
        if list(args[:5]) != [sys.executable, *_TRAIN]:  # wrapped in numactl
            return start(handler, args, env)
        return _Copy(args, env=env, stdout=handler._stdout, stderr=handler._stderr)

    SubprocessHandler._popen = popen  # type: ignore[assignment,method-assign]


def main() -> NoReturn:
    """Run torchrun in this process. Never returns."""
    # Time for the workers' last checkpoint after SIGTERM; torchrun's own 30 seconds are short for that.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    exit_on_signals(*_SIGNALS)  # until torchrun has its own handlers; SIGUSR1 stays ignored if it is
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if " ".join(_TRAIN[1:]) in " ".join(sys.argv):
        _copy_ranks()
    with tempfile.TemporaryDirectory(prefix="titanlite-codes-") as folder:
        record = Path(folder) / "codes"
        os.environ[exit_codes.VARIABLE] = str(record)
        code, failure, stopped, failed = exit_codes.DONE, "", False, list[int]()
        try:
            torchrun()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else exit_codes.ERROR * bool(end.code)
        except BaseException as error:  # torchrun has several kinds for failed workers and for signals
            code, failure = exit_codes.code_of(error), traceback.format_exc()
            stopped = isinstance(error, SignalException | KeyboardInterrupt)
            if isinstance(error, ChildFailedError):
                failed = [one.exitcode for one in error.failures.values()]
        for number in _SIGNALS:  # the workers have ended, and their code counts
            signal.signal(number, signal.SIG_IGN)
        text = record.read_text() if record.exists() else None
    if stopped:
        code = code_after_signal(text)
    elif code and text is not None:
        code = worst_code(text, failed) or code
    # If the workers have explained the end, torchrun's summary adds nothing; a killed worker explains nothing.
    if code in (exit_codes.ERROR, exit_codes.LOST_PEER) or (code == exit_codes.CONFIG and text is None):
        print(failure, file=sys.stderr, end="")
    if code == exit_codes.ERROR and (message := last_error(text or "")):  # the last line is read first
        print(escape(f"error: {message}"), file=sys.stderr)
    sys.exit(code_for_scheduler(code, failed))


if __name__ == "__main__":
    main()
