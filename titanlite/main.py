"""The process of one rank, `train.py` as functions: command line → config → exit code.

Environment and config are checked before torch is imported, which takes seconds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from titanlite import exit_codes
from titanlite.assembly.supported import system_problem
from titanlite.config.errors import ConfigError
from titanlite.config.extensions import dotted_paths
from titanlite.config.sections import Checkpoint
from titanlite.dist import ParallelismError
from titanlite.dist.launch_env import read_launch_env
from titanlite.dist.signals import (
    SIGNALS,
    StopRequested,
    StopSignal,
    end_with_parent,
    exit_on_signals,
)
from titanlite.resolve.load import check_config
from titanlite.utils import MissingPackageError, escape, logger, require, say

if TYPE_CHECKING:
    from torch.distributed import Store

    from titanlite.assembly.build import TrainingComponents
    from titanlite.assembly.datasets import Datasets
    from titanlite.callbacks import Callback
    from titanlite.config.loaded import LoadedConfig
    from titanlite.dist.dist_env import DistEnv
    from titanlite.dist.launch_env import LaunchEnv
    from titanlite.run.config import RunConfig

T = TypeVar("T")

#: Time in which the rank that prints an error must do so, before other ranks leave. The first to
#: leave makes torchrun end all.
PRINT_SECONDS = 3.0


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Train as the command line says (None: that of the process), and end the process."""
    problem = system_problem()
    if problem:
        sys.exit(print_error(problem, exit_codes.CONFIG))
    run_rank(run, sys.argv[1:] if argv is None else argv)


def run_rank(work: Callable[..., int], *arguments: object) -> NoReturn:
    """Do the work of one rank, which returns its exit code, and end the process by that code."""
    exit_on_signals(*SIGNALS)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a torchrun that is killed tells its workers nothing
        end_with_parent(signal.SIGTERM)
    last_error = ""
    try:
        code = work(*arguments)
    except (StopRequested, KeyboardInterrupt) as error:  # it came while the work was ending
        code = exit_codes.code_of(error)
    except Exception as error:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)  # for torchrun's summary
        say(traceback.format_exc().removesuffix("\n"))
        code = exit_codes.ERROR
        last_error = f"{type(error).__name__}: {error}"
        if (
            os.environ.get("WORLD_SIZE", "1") != "1"
        ):  # the line that is read last should say where this is from
            last_error = f"rank {os.environ.get('RANK')} on {socket.gethostname()}: {last_error}"
            say(f"error: {last_error}")
        _tell_sagemaker(last_error, code)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a signal after the run does not change its code
    exit_now(code, last_error)


def run(argv: Sequence[str]) -> int:
    """Train as the command line says; return the exit code (see `titanlite.exit_codes`).

    Expected errors are printed without a traceback. Mistakes in config, tokenizer and text are
    found before any process group or model exists. A signal before the first step ends the run at
    once, a later one when a checkpoint is written. See `titanlite.dist.signals`.
    """
    try:
        environment = read_launch_env()
        asked, config = check_config(argv, environment.world_size)
        if config.memory_estimation.enabled:
            if environment.rank == 0:
                from titanlite.plan.text import print_plan

                print_plan(config, environment.local_world_size)
            return exit_codes.DONE
        require("torch")
    except (ConfigError, ParallelismError, MissingPackageError) as error:
        return print_error(str(error), error.exit_code)
    with _without_collector():
        import titanlite.assembly.build  # noqa: F401
        from titanlite.trainer import Trainer

    # Around everything: when the first worker has ended torchrun sends SIGTERM to the rest, which
    # must not die of it.
    with StopSignal(at_once=True) as stop:
        rank = _Rank(environment, asked, config, stop)
        try:
            with rank.components() as parts:
                if config.checkpoint.create_seed_checkpoint:
                    from titanlite.checkpoint.resume import save_seed

                    save_seed(parts)
                else:
                    Trainer(parts, stop).train()
            for callback in parts.callbacks:
                callback.on_exit(stop)
        except (StopRequested, KeyboardInterrupt) as error:
            return _stopped(error)
        except SystemExit as error:
            raise exit_codes.ExitCallError("code that the config names", error) from error
        except Exception as error:
            code = exit_codes.code_of(error)
            if code == exit_codes.ERROR:
                raise
            return print_error(rank.message(error, code), code)
    return exit_codes.DONE


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the garbage collector away from imports inside.

    Imports make half a million objects and no garbage: to look through them takes a sixth of their
    time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _import_compiler() -> None:
    """Import torch's compiler.

    FSDP and the optimizers of torch import it at their first call, also in a run that compiles
    nothing.
    """
    # A torch without it has nothing to import.
    with _without_collector(), contextlib.suppress(ImportError):
        import torch._dynamo  # noqa: F401


def _stopped(error: BaseException) -> int:
    """Return the code of a run that was asked to stop; say so where nothing has logged it."""
    together = getattr(error, "together", False)
    if not together and os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"stopped: {str(error) or 'second Ctrl-C'}")
    return exit_codes.code_of(error)


class _Rank:
    """The run of one rank, from its checked config to its end."""

    def __init__(
        self, environment: LaunchEnv, asked: LoadedConfig, config: RunConfig, stop: StopSignal
    ) -> None:
        from titanlite.metrics.watchdog import HangWatchdog

        self.environment = environment
        self.asked = asked
        self.config = config
        self.stop = stop
        self.folder = Path(config.job.dump_folder)
        self.watchdog = HangWatchdog()
        self.store: Store | None = None

    @contextlib.contextmanager
    def components(self) -> Iterator[TrainingComponents]:
        """Read the text, start the process group and build the run, and end them after the work.

        All ranks call it together. Raises what ends the run before its first step.
        """
        from titanlite.assembly.build import build
        from titanlite.dist.dist_env import connect_store
        from titanlite.dist.process import keep_freed_memory

        callbacks = self.load_code()
        # Before what takes longer on one rank than on another.
        self.store = connect_store()
        # After the code of the user, which may set variables for it.
        _import_compiler()
        with contextlib.ExitStack() as held:
            if self.store is not None:
                from titanlite.dist.rendezvous import report_failure

                rank, size = self.environment.rank, self.environment.world_size
                held.enter_context(report_failure(self.store, rank, size))
            datasets = self.prepare(held)
            with self.opened() as world:
                if world.device.type == "cpu":
                    keep_freed_memory()
                yield build(self.config, world, datasets, self.watchdog, callbacks)

    def share(self, name: str, make: Callable[[], T]) -> T:
        """Return on all ranks what `make` returns on rank 0. name: of the key in the store."""
        if self.store is None:
            return make()
        from titanlite.dist.rendezvous import share_from_rank_0

        rank, size = self.environment.rank, self.environment.world_size
        patience = self.config.comm.init_timeout_seconds
        return share_from_rank_0(self.store, rank, size, name, make, patience)

    def load_code(self) -> list[Callback]:
        """Set up the console and load the functions and callbacks that the config names."""
        from titanlite.assembly.own_callbacks import load_callbacks
        from titanlite.metrics.console import setup_console

        setup_console(self.environment.rank, self.config.metrics.enable_color_printing)
        if self.environment.rank == 0:
            _log_files(self.asked.files)
        if any(dotted_paths(self.asked)):
            from titanlite.config.own_functions import load_functions

            load_functions(self.asked)
        place = self.asked.place("job.callbacks")
        return load_callbacks(self.config.job.callbacks, place)

    def prepare(self, held: contextlib.ExitStack) -> Datasets:
        """Check machine and folders, read the text, and check the model; return the text.

        held: keeps the locks of the run's folders.
        """
        from titanlite.assembly.datasets import read_datasets
        from titanlite.assembly.folders import lock_folders, show_config
        from titanlite.assembly.preflight import check_machine, check_model

        config = self.config
        check_machine(config)
        written = (config.metrics.save_tb_folder, config.profiling.save_traces_folder)
        locked = lock_folders(
            self.folder,
            config.checkpoint,
            lambda: self.stop.requested,
            (*written, config.profiling.save_memory_snapshot_folder),
        )
        self.share("the run's folder", lambda: held.enter_context(locked))
        if self.environment.rank == 0:
            show_config(config.job, config.toml)
        datasets = read_datasets(config, self.share)
        check_model(config, datasets.tokenizer.vocab_size)
        return datasets

    @contextlib.contextmanager
    def opened(self) -> Iterator[DistEnv]:
        """Start the process group, this rank's log and the watchdog, and end them."""
        from titanlite.assembly.folders import TRACES
        from titanlite.dist.dist_env import DistEnv
        from titanlite.metrics.watchdog import HangWatchdog
        from titanlite.runs.logs import FOLDER as LOGS
        from titanlite.runs.logs import rank_log

        comm = self.config.comm
        traces = str(self.folder / TRACES)
        logs = str(self.folder / LOGS)
        self.watchdog = HangWatchdog(self.config.stall, comm, logs, traces, exit_now)
        world = DistEnv.open(
            store=self.store,
            init_timeout_seconds=comm.init_timeout_seconds,
            trace_buf_size=comm.trace_buf_size,
            trace_folder=traces,
        )
        with world as entered, rank_log(self.folder, self.environment.rank), self.watchdog:
            self.watchdog.near = entered.near
            yield entered

    def message(self, error: Exception, code: int) -> str:
        """Return what to print of an expected error."""
        if code == exit_codes.OUT_OF_MEMORY:
            return self.memory_message(error, code)
        if isinstance(error, ConfigError):
            # What is found on the machine or in the model has no place in the config yet.
            error = ConfigError(
                replace(found, where=found.where or self.asked.place(found.key.partition("[")[0]))
                for found in error.problems
            )
        return _explained(error, self.watchdog.verdict, self.config.checkpoint)

    def memory_message(self, error: Exception, code: int) -> str:
        """Return the report of a run out of memory, from one rank of each machine."""
        # torchrun's SIGTERM, when the first other rank ends, must not cut the report off.
        self.stop.at_once = False
        if exit_codes.report_code(code) and _first_here(self.store):
            # There may be no memory even for an import.
            with contextlib.suppress(Exception):
                import torch

                from titanlite.plan.runtime import memory_report

                device = "cuda" if torch.cuda.is_available() else "cpu"
                rank = self.environment.rank
                return memory_report(self.config, error, self.watchdog.where, rank, device)
            return str(error)
        return f"out of memory ({self.watchdog.where}): see the report of another rank here"


def _first_here(store: Store | None) -> bool:
    """Return whether no other rank of this machine asked before: True for all of them without the
    store.
    """
    with contextlib.suppress(Exception):
        return store is None or store.add(f"out of memory on {socket.gethostname()}", 1) == 1
    return True


def _explained(error: Exception, verdict: str, section: Checkpoint) -> str:
    """Return the message of an expected error, with advice. verdict: the watchdog's."""
    from titanlite.optim.bad_steps import BadStepError
    from titanlite.parallel.compile import CompileError

    if isinstance(error, CompileError):
        if os.environ.get("TORCHDYNAMO_VERBOSE", "0") != "0":
            say(traceback.format_exc().removesuffix("\n"))
        return (
            f"{error}\nTORCHDYNAMO_VERBOSE=1 shows torch's own report, training.compile = false "
            "trains without"
        )
    if isinstance(error, BadStepError):
        kept = "checkpoints are off"
        if section.enable_checkpoint:
            kept = f"checkpoints are in {section.folder}"
        return f"stopped: {error}; {kept}"
    if exit_codes.is_of_collectives(error):
        unknown = (
            "Another rank has ended, hangs or cannot be reached: see who in the logs of the ranks"
        )
        return f"a collective failed: {error}\n{verdict or unknown}"
    return str(error)


def print_error(message: str, code: int) -> int:
    """Print why the run ends, once per node: its ranks all have the same to say. Return `code`.

    The first worker to leave makes torchrun end the others. So ranks that do not print wait for the
    one that does.
    """
    message = escape(message)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _tell_sagemaker(message, code)
        say(f"error: {message}")
    else:
        time.sleep(PRINT_SECONDS)
        # A rank that ended by this code has told why. That of memory is noted before.
        if code == exit_codes.OUT_OF_MEMORY or exit_codes.report_code(code):
            rank = os.environ.get("RANK")
            say(f"error: [rank {rank}] {message}")
    return code


def _tell_sagemaker(message: str, code: int) -> None:
    """Write why the run ends where SageMaker reads a job's failure reason, if this is such a job.

    The first cause in the last attempt of torchrun stays; that another rank was lost is no cause. A
    toolkit in the container sets the variable. The text is cut to 1,024 characters there.
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


def exit_now(code: int, last_error: str = "") -> NoReturn:
    """End this process here and now. last_error: the last line of an unforeseen error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader may be gone
            stream.flush()
    exit_codes.end_process(code, last_error)


def _log_files(files: Sequence[str]) -> None:
    """Log the config files; warn if there is none, since a run with defaults alone is rarely
    intended.
    """
    if files:
        logger.info(f"config: {', '.join(files)}")
    else:
        logger.warning(
            "no --job.config_file is given: this run has the defaults and your flags; "
            "train_configs/ has configs to start from"
        )


if __name__ == "__main__":
    main()
