"""What the exit codes of `train.py` and `titanlite` mean.

torchrun masks a worker's code: it ends with 1 for every failure of a worker. `run_llama_train.sh`
ends with the code that says most. The last line of the run's attempts.jsonl has the code of rank 0:
LOST_PEER where another rank failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import NoReturn

#: Names the file in which `titanlite.torchrun` expects the workers' exit codes.
VARIABLE = "TITANLITE_EXIT_CODES"

#: Stands in that file alone: a worker has begun, and will report its code.
BEGUN = -1

#: Everything that was asked for is done.
DONE = 0
#: An unforeseen error; its traceback is in the output.
ERROR = 1
#: The configuration, a file it names or the launcher's variables are wrong, or the port of rank 0
#: is taken. Or the ranks differ or compute wrong results at the start, or the model cannot be
#: compiled. Nothing was trained.
CONFIG = 2
#: The guard stopped the run: a loss, a gradient or the weights were not finite, or a loss jumped.
#: No bad update was applied but where the weights are named.
GUARD = 3
#: A folder or checkpoint cannot be used: another run is alive in it or it belongs to one, or none
#: in it is valid.
CHECKPOINT = 4
#: Asked to stop by a signal, and nothing is lost: all that was trained is in a checkpoint. The same
#: command continues.
PREEMPTED = 5
#: Asked to stop by a signal, but the last steps are not in a checkpoint. Checkpoints are off, or
#: the save failed.
PREEMPTED_UNSAVED = 6
#: Another rank raised, or a collective failed on this one: another has ended, hangs or cannot be
#: reached. The cause is there.
LOST_PEER = 7
#: A rank ran out of the memory of its device or its host, where the same command would again. Also
#: for a run that is only planned, and would.
OUT_OF_MEMORY = 8
#: A step that was computed twice gave other bits, or a replica has others: a device is broken, or
#: its kernels are not deterministic.
CORRUPTION = 9
#: Ended at once by a second Ctrl-C.
INTERRUPTED = 130
#: A run was asked to stop.
STOPPED = (PREEMPTED, PREEMPTED_UNSAVED)
#: torchrun starts no rank again after these: they would end so again, or somebody asked for the
#: end.
FINAL = (*STOPPED, CONFIG, GUARD, CHECKPOINT, OUT_OF_MEMORY, CORRUPTION, INTERRUPTED)
#: The same command may continue after these.
RESTARTABLE = (PREEMPTED, LOST_PEER)
#: The exit code of torchrun in place of these, for schedulers that restart by codes. Also when a
#: signal ended its ranks.
RESTART_VARIABLE = "TITANLITE_RESTART_CODE"
#: Names the round of the rendezvous of titanlite's torchrun, the same on all machines.
ROUND = "TITANLITE_ROUND"
_PACKAGE = __name__.partition(".")[0]


def after_signal(number: int) -> int:
    """Return the exit code of a process that a signal ended, as shells have it.

    137: killed, often for its memory.
    """
    return 128 + number


#: gloo's errors are plain RuntimeErrors, as are those of wrong shapes: only the text tells them
#: apart.
_OF_COLLECTIVES = re.compile(r"gloo|time[d-]?[ -]?out|connection|collective", re.IGNORECASE)
#: torch's own errors where it cannot serve a store.
_PORT_TAKEN = re.compile(r"EADDRINUSE|failed to listen", re.IGNORECASE)
#: Errors of a host without memory, of a GPU's driver and libraries, and of NCCL. That of torch's
#: allocator has a class.
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't|not enough)|CUDA error: out of memory|"
    r"Cuda failure .*out of memory|"
    r"CU(BLAS|DNN)_STATUS_\w*ALLOC"
)
#: Errors that say only where another one was raised, which has the reason.
_WRAPPERS = {"CallbackError", "CompileError", "BackendCompilerFailed", "InductorError"}


def memory_error_of(error: BaseException | None) -> BaseException | None:
    """Return the failed allocation that `error` is, or that ended a callback or the compiler; None
    without one.
    """
    while error is not None:
        by_torch = type(error) is RuntimeError or type(error).__module__.startswith("torch")
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & {"MemoryError", "OutOfMemoryError"}:
            return error
        if by_torch and _NO_MEMORY.search(str(error)):
            return error
        inner = error.__cause__ or getattr(error, "inner_exception", None)
        error = inner if kinds & _WRAPPERS else None
    return None


def is_of_collectives(error: BaseException) -> bool:
    """Whether a collective failed: another rank has ended, hangs or cannot be reached."""
    if memory_error_of(error):
        return False
    # torch.distributed's own errors, by name: this module must not import torch.
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("torch.")}
    if names & {"DistError", "RendezvousError"}:
        return True
    return type(error) is RuntimeError and _OF_COLLECTIVES.search(str(error)) is not None


def code_of(error: BaseException) -> int:
    """Return the exit code of a run that ends by `error`; titanlite's own errors carry it as
    `exit_code`.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    code = OUT_OF_MEMORY if memory_error_of(error) else own_code(error)
    if code is None:
        if type(error).__module__.startswith("torch.") and _PORT_TAKEN.search(str(error)):
            return CONFIG
        return LOST_PEER if is_of_collectives(error) else ERROR
    return code


def own_code(error: BaseException) -> int | None:
    """Return the exit code of an error of titanlite, or of a class derived from one; else None.

    Schedulers act on these codes. So an attribute of the same name in a class from elsewhere has no
    effect.
    """
    for kind in type(error).__mro__:
        if kind.__module__.partition(".")[0] != _PACKAGE:
            continue
        code = vars(kind).get("exit_code")
        if isinstance(code, property):
            code = code.fget and code.fget(error)
        if code is not None:
            return int(code)
    return None


class ExitCallError(RuntimeError):
    """Code that the run called has called `sys.exit`. Its number is none of the codes here."""

    def __init__(self, where: str, error: SystemExit) -> None:
        called = "sys.exit()" if error.code is None else f"sys.exit({error.code!r})"
        super().__init__(
            f"{where} called {called}. That ends no run: raise an exception, or call "
            'trainer.stop.request("why") in a callback, which saves and ends all ranks'
        )


@contextlib.contextmanager
def no_exit(where: str) -> Iterator[None]:
    """Turn `sys.exit` in this block, which would end a run by a code of its choice, into an
    ExitCallError.
    """
    try:
        yield
    except SystemExit as error:
        raise ExitCallError(where, error) from error


def attempt(environment: Mapping[str, str] = os.environ) -> str:
    """Return the number of a start of the ranks by torchrun. environment: of such a rank."""
    # A machine that follows the restart of another one counts none.
    return environment.get(ROUND) or environment.get("TORCHELASTIC_RESTART_COUNT", "0")


def report_code(code: int, error: str = "") -> bool:
    """Write this worker's exit code where the launcher looks for it: torchrun does not pass it on.

    error: the last line of an unforeseen error. Return whether no other worker of this machine
    wrote that before: True for one of them, or for all where no launcher looks.
    """
    line = f"{attempt()} {code}"
    if error:
        line += f" {json.dumps(error)}"
    line += "\n"
    with (
        contextlib.suppress(OSError),
        open(os.environ.get(VARIABLE) or os.devnull, "ab+", buffering=0) as file,
    ):
        file.write(line.encode())
        # This line ends here, wherever others write.
        end = file.tell()
        file.seek(0)
        return line not in file.read(end - len(line)).decode().splitlines(keepends=True)
    return True


def exit_now(code: int, last_error: str = "") -> NoReturn:
    """End this process here and now, when all that it has printed is written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader may be gone
            stream.flush()
    end_process(code, last_error)


def end_process(code: int, error: str = "") -> NoReturn:
    """End this process here and now. error: as for `report_code`."""
    report_code(code, error)
    # gloo's threads sometimes abort a finished process at interpreter exit. Everything of ours is
    # closed by now, or cannot be closed.
    os._exit(code)
