"""How a rank ends when something goes wrong: what it prints, and its exit code.

Importing this module needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite import exit_codes
from titanlite.config.errors import ConfigError
from titanlite.utils import escape, say

if TYPE_CHECKING:
    from torch.distributed import Store

    from titanlite.config.loaded import LoadedConfig
    from titanlite.run.config import RunConfig

#: Time in which the rank that prints an error must do so, before other ranks leave. The first to
#: leave makes torchrun end all.
PRINT_SECONDS = 3.0


def explain(error: Exception, run: RunConfig, asked: LoadedConfig, verdict: str) -> str:
    """Return the message of an expected error, with advice and the hang watchdog's verdict."""
    from titanlite.optim.bad_step_errors import BadStepError
    from titanlite.parallel.compile import CompileError

    if isinstance(error, ConfigError):
        # A problem of the machine or of the model has no place in the config yet.
        problems = []
        for found in error.problems:
            where = found.where or asked.place(found.key.partition("[")[0])
            problems.append(replace(found, where=where))
        return str(ConfigError(problems))
    if isinstance(error, CompileError):
        if os.environ.get("TORCHDYNAMO_VERBOSE", "0") != "0":
            say(traceback.format_exc().removesuffix("\n"))
        return (
            f"{error}\nTORCHDYNAMO_VERBOSE=1 shows torch's own report, training.compile = false "
            "trains without"
        )
    if isinstance(error, BadStepError):
        kept = "checkpoints are off"
        if run.checkpoint.enable_checkpoint:
            kept = f"checkpoints are in {run.checkpoint.folder}"
        return f"stopped: {error}; {kept}"
    if exit_codes.is_of_collectives(error):
        unknown = (
            "Another rank has ended, hangs or cannot be reached: see who in the logs of the ranks"
        )
        return f"a collective failed: {error}\n{verdict or unknown}"
    return str(error)


def explain_memory(
    error: Exception, run: RunConfig, rank: int, phase: str, store: Store | None
) -> str:
    """Return the report of a rank out of memory; one rank of each machine makes it."""
    if not exit_codes.report_code(exit_codes.OUT_OF_MEMORY) or not first_here(store):
        return f"out of memory ({phase}): see the report of another rank here"
    # There may be no memory even for an import.
    with contextlib.suppress(Exception):
        import torch

        from titanlite.plan.out_of_memory import memory_report

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return memory_report(run, error, phase, rank, device)
    return str(error)


def first_here(store: Store | None) -> bool:
    """Return whether no other rank of this machine asked before; True without the store."""
    with contextlib.suppress(Exception):
        return store is None or store.add(f"out of memory on {socket.gethostname()}", 1) == 1
    return True


def print_error(message: str, code: int) -> int:
    """Print why the run ends, once per node, and return `code`.

    The first worker to leave makes torchrun end the others, so ranks that do not print wait for the
    one that does.
    """
    message = escape(message)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tell_sagemaker(message, code)
        say(f"error: {message}")
    else:
        time.sleep(PRINT_SECONDS)
        # Another rank that ended by this code has said why. An end for lack of memory was
        # reported before.
        if code == exit_codes.OUT_OF_MEMORY or exit_codes.report_code(code):
            rank = os.environ.get("RANK")
            say(f"error: [rank {rank}] {message}")
    return code


def print_stop(error: BaseException) -> int:
    """Return the code of a run that was asked to stop; say so where nothing has logged it."""
    together = getattr(error, "together", False)
    if not together and os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"stopped: {str(error) or 'second Ctrl-C'}")
    return exit_codes.code_of(error)


def print_unforeseen(error: Exception) -> str:
    """Print an unforeseen error with its traceback; return its last line."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)  # for torchrun's summary
    say(traceback.format_exc().removesuffix("\n"))
    line = f"{type(error).__name__}: {error}"
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # The line that is read last should say where this is from.
        line = f"rank {os.environ.get('RANK')} on {socket.gethostname()}: {line}"
        say(f"error: {line}")
    tell_sagemaker(line, exit_codes.ERROR)
    return line


def tell_sagemaker(message: str, code: int) -> None:
    """Write why the run ends where SageMaker reads a job's failure reason, up to 1,024 characters.

    The first cause in torchrun's last attempt stays; a lost rank is no cause. A toolkit in the
    container sets the variable.
    """
    folder = os.environ.get("SM_OUTPUT_DIR")
    if folder:
        known = Path(folder, f".failure-{exit_codes.attempt()}")
        with contextlib.suppress(OSError):
            if code != exit_codes.LOST_PEER:
                known.open("x").close()
            elif known.exists():
                return
            Path(folder, "failure").write_text(f"{message}\n", encoding="utf-8")
