"""torchrun that ends with the exit code of its workers: python -m titanlite.torchrun [torchrun's
arguments]

torchrun itself ends with 1 for any failure. The workers write their codes to a file
(`exit_codes.report_code`).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from titanlite import exit_codes
from titanlite.dist.open_files import raise_file_limit
from titanlite.dist.signals import exit_on_signals
from titanlite.utils import escape, say

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLOSED = (
    "error: the machines met at the rendezvous of an earlier start, which is about to end. Start "
    "again\n"
)
_LEFT = (
    "error: the ranks are not started again: another machine has ended, and its output has the "
    "reason\n"
)


def command(ranks: int, words: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the command line that runs `titanlite WORDS` on `ranks` ranks of this machine.

    options: further ones of torchrun; by default the machine is alone.
    """
    torchrun = [sys.executable, "-m", "titanlite.torchrun", "--nproc_per_node", str(ranks)]
    if "--nnodes" not in options:
        torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    return [*torchrun, *options, "-m", "titanlite", *words]


def worst_code(text: str, failed: Iterable[int] = ()) -> int | None:
    """Return the exit code that says most about the end of all workers.

    None: all are done, or none is recorded.

    text: lines of "restart code", each perhaps followed by an error message as a JSON string. The
    last restart counts. failed: exit codes of the workers that failed first, as torchrun saw them.

    OUT_OF_MEMORY counts first, LOST_PEER and ERROR only if no worker has another reason. torchrun
    stops the other workers by SIGTERM when one fails, so that they were stopped does not count.
    """
    codes = {code for code, _ in _last_restart(text)} - {exit_codes.DONE, exit_codes.BEGUN}
    if any(code < 0 or code in (exit_codes.ERROR, exit_codes.LOST_PEER) for code in failed):
        codes -= set(exit_codes.STOPPED)
    if exit_codes.OUT_OF_MEMORY in codes:
        return exit_codes.OUT_OF_MEMORY
    return min(codes - {exit_codes.LOST_PEER, exit_codes.ERROR} or codes, default=None)


def code_after_signal(text: str | None) -> int:
    """Return the exit code after torchrun was asked to stop.

    text: as for `worst_code`; None: no worker had begun.
    """
    if text is None:
        return exit_codes.PREEMPTED
    is_done = (exit_codes.DONE, "") in _last_restart(text)
    return worst_code(text) or (exit_codes.DONE if is_done else exit_codes.ERROR)


def code_for_scheduler(code: int, failed: Sequence[int]) -> int:
    """Return the exit code of torchrun. Schedulers start a run again after some codes.

    failed: exit codes of the workers that failed first, negative for signals. If signals ended all
    of them, and none told another reason, the code is that of a shell: 128 plus the number of the
    signal. TITANLITE_RESTART_CODE, if it is set, replaces the codes after which the same command
    may continue.
    """
    killed = code == exit_codes.ERROR and bool(failed) and all(number < 0 for number in failed)
    may_go_on = killed or code in exit_codes.RESTARTABLE
    wanted = os.environ.get(exit_codes.RESTART_VARIABLE)
    if wanted and may_go_on:
        return int(wanted)
    return exit_codes.after_signal(-failed[0]) if killed else code


def last_error(text: str) -> str:
    """Return the message of an unexpected error of a worker, or an empty string.

    text: as for `worst_code`.
    """
    for code, message in _last_restart(text):
        if code == exit_codes.ERROR and message:
            return message
    return ""


def _last_restart(text: str) -> list[tuple[int, str]]:
    lines = [line.split(maxsplit=2) for line in text.splitlines()]
    last = max((line[0] for line in lines), key=int, default="")
    found = []
    for number, code, *words in lines:
        if number == last:
            found.append((int(code), "".join(map(json.loads, words))))
    return found


def _count_failures() -> None:
    """Let torchrun count no rank as failed that has ended because another failed."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    context: Any = SubprocessContext
    poll = context._poll
    close = context.close

    def close_after_note(self: Any, *arguments: Any, **options: Any) -> None:
        if not hasattr(self, "failed_first"):
            self.failed_first = set(self._failures)
        close(self, *arguments, **options)

    def poll_and_judge(self: Any) -> Any:
        result = poll(self)
        if result is not None:
            for rank in set(result.failures) - self.failed_first:
                code = result.failures[rank].exitcode
                if code < 0 or code in (*exit_codes.STOPPED, exit_codes.LOST_PEER):
                    del result.failures[rank]
        return result

    context.close = close_after_note
    context._poll = poll_and_judge


def _keep_to_codes() -> None:
    """Let torchrun start no rank again after a stop request, or an end that would come again."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousError

    agent: Any = LocalElasticAgent
    monitor = agent._monitor_workers

    def monitor_and_judge(self: Any, group: Any) -> Any:
        result = monitor(self, group)
        codes = {failure.exitcode for failure in result.failures.values()}
        final = codes.intersection(exit_codes.FINAL)
        if not final:
            return result
        # If machines wait to join, another torchrun may have stopped all ranks.
        others_wait = False
        if not final - set(exit_codes.STOPPED):
            # The machine of the store may have left.
            with suppress(RendezvousError):
                others_wait = group.spec.rdzv_handler.num_nodes_waiting() > 0
        if not others_wait:
            self._remaining_restarts = 0
        return result

    agent._monitor_workers = monitor_and_judge


@dataclass
class _End:
    """How torchrun ended."""

    code: int = exit_codes.DONE
    #: For standard error, if nothing else explains the end.
    failure: str = ""
    #: It was asked to stop.
    stopped: bool = False
    #: Exit codes of the workers that failed first, negative for signals.
    failed: list[int] = field(default_factory=list)


def main() -> NoReturn:
    """Run torchrun in this process. Never returns."""
    # Time for the workers' last checkpoint after SIGTERM; torchrun's own 30 seconds are short for
    # that.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    # Every rank of the run connects to the store, which the first torchrun serves.
    raise_file_limit(2**16)
    # Until torchrun has its own handlers; SIGUSR1 stays ignored if it is.
    exit_on_signals(*_SIGNALS)
    # As in `titanlite.main.run`.
    gc.disable()
    from torch.distributed.run import main as torchrun

    from titanlite.dist.rendezvous_end import Farewell

    farewell = Farewell()
    gc.freeze()
    gc.enable()
    _keep_to_codes()
    with tempfile.TemporaryDirectory(prefix="titanlite-codes-") as folder:
        record = Path(folder) / "codes"
        os.environ[exit_codes.VARIABLE] = str(record)
        _count_failures()
        end = _run(torchrun)
        # The workers have ended, and their code counts.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # If machines are replaced one by one, a new one must not meet the store of a failed
        # start.
        if end.code == exit_codes.DONE or exit_codes.RESTART_VARIABLE not in os.environ:
            farewell.leave(good=end.code == exit_codes.DONE)
        text = record.read_text() if record.exists() else None
    if farewell.was_closed and end.code in (exit_codes.ERROR, exit_codes.LOST_PEER):
        end.code = exit_codes.LOST_PEER
        end.failure = _LEFT if farewell.has_met else _CLOSED
    elif end.stopped:
        end.code = code_after_signal(text)
    elif end.code and text is not None:
        end.code = worst_code(text, end.failed) or end.code
    _explain(end, text)
    code = code_for_scheduler(end.code, end.failed)
    for stream in (sys.stdout, sys.stderr):
        # Its reader may be gone.
        with suppress(OSError, ValueError):
            stream.flush()
    # A thread may still talk to the store. Python ends such a thread at its own end, and torch
    # aborts the process then.
    os._exit(code)


def _run(torchrun: Callable[[], None]) -> _End:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun()
    except SystemExit as end:
        return _End(end.code if isinstance(end.code, int) else exit_codes.ERROR * bool(end.code))
    except BaseException as error:
        # torchrun has several kinds for failed workers and for signals.
        found = _End(exit_codes.code_of(error), traceback.format_exc())
        found.stopped = isinstance(error, SignalException | KeyboardInterrupt)
        if isinstance(error, ChildFailedError):
            found.failed = [one.exitcode for one in error.failures.values()]
            # A traceback of torchrun would push the ranks' own reports off the screen.
            found.failure = f"{error}\n"
        return found
    return _End()


def _explain(end: _End, text: str | None) -> None:
    """Print what the workers have not told. text: as for `code_after_signal`."""
    # If the workers have explained the end, torchrun's summary adds nothing; a killed worker
    # explains nothing.
    is_unexplained = end.code == exit_codes.CONFIG and text is None
    if is_unexplained or end.code in (exit_codes.ERROR, exit_codes.LOST_PEER):
        print(escape(end.failure), file=sys.stderr, end="")
    # The last line is read first.
    message = last_error(text or "")
    if end.code == exit_codes.ERROR and message:
        say(f"error: {message}")


if __name__ == "__main__":
    main()
