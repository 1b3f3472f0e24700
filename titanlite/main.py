"""The process of one rank, `train.py` as functions: command line → config → exit code.

Environment and config are checked before torch is imported, which takes seconds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from titanlite import exit_codes
from titanlite.assembly.tested_machines import system_problem
from titanlite.config.errors import ConfigError
from titanlite.config.import_path_keys import dotted_paths
from titanlite.dist import ParallelismError
from titanlite.dist.launch_env import read_launch_env
from titanlite.dist.signals import (
    SIGNALS,
    StopRequested,
    StopSignal,
    exit_on_signals,
)
from titanlite.resolve.load import check_config
from titanlite.utils import MissingPackageError, logger, require

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


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Train as the command line says (None: that of the process), and end the process."""
    problem = system_problem()
    if problem:
        sys.exit(_print_error(problem, exit_codes.CONFIG))
    run_rank(run, sys.argv[1:] if argv is None else argv)


def run_rank(work: Callable[..., int], *arguments: object) -> NoReturn:
    """Do the work of one rank, which returns its exit code, and end the process by that code."""
    exit_on_signals(*SIGNALS)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a torchrun that is killed tells its workers nothing
        from titanlite.dist.parent_death import end_with_parent

        end_with_parent(signal.SIGTERM)
    last_error = ""
    try:
        code = work(*arguments)
    except (StopRequested, KeyboardInterrupt) as error:  # it came while the work was ending
        code = exit_codes.code_of(error)
    except Exception as error:
        from titanlite.assembly.error_exit import print_unforeseen

        code = exit_codes.ERROR
        last_error = print_unforeseen(error)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a signal after the run does not change its code
    exit_codes.exit_now(code, last_error)


def run(argv: Sequence[str]) -> int:
    """Train as the command line says; return the exit code (see `titanlite.exit_codes`).

    Expected errors are printed without a traceback. Mistakes in config, tokenizer and text are
    found before any process group or model exists. A signal before the first step ends the run at
    once, a later one when a checkpoint is written. See `titanlite.dist.signals`.
    """
    try:
        environment = read_launch_env()
        asked, config = check_config(argv, environment.world_size)
        require("torch")
    except (ConfigError, ParallelismError, MissingPackageError) as error:
        return _print_error(str(error), error.exit_code)
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
            from titanlite.assembly.error_exit import print_stop

            return print_stop(error)
        except SystemExit as error:
            raise exit_codes.ExitCallError("code that the config names", error) from error
        except Exception as error:
            code = exit_codes.code_of(error)
            if code == exit_codes.ERROR:
                raise
            return _print_error(rank.message(error, code), code)
    return exit_codes.DONE


def _print_error(message: str, code: int) -> int:
    from titanlite.assembly.error_exit import print_error

    return print_error(message, code)


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


class _Rank:
    """The run of one rank, from its checked config to its end."""

    def __init__(
        self, environment: LaunchEnv, asked: LoadedConfig, config: RunConfig, stop: StopSignal
    ) -> None:
        from titanlite.metrics.phase_tracker import Position

        self.environment = environment
        self.asked = asked
        self.config = config
        self.stop = stop
        self.folder = Path(config.job.dump_folder)
        self.watchdog = Position(2 * config.comm.init_timeout_seconds)
        self.store: Store | None = None

    @contextlib.contextmanager
    def components(self) -> Iterator[TrainingComponents]:
        """Read the text, start the process group and build the run, and end them after the work.

        All ranks call it together. Raises what ends the run before its first step.
        """
        from titanlite.assembly.build import build
        from titanlite.dist.dist_env import connect_store
        from titanlite.dist.process_settings import keep_freed_memory

        callbacks = self.load_code()
        # Before what takes longer on one rank than on another.
        self.store = connect_store()
        # FSDP and optimizers import torch's compiler at their first call. After the code of the
        # user, which may set variables for it.
        with _without_collector(), contextlib.suppress(ImportError):
            import torch._dynamo  # noqa: F401
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
        from titanlite.metrics.console import setup_console

        setup_console(self.environment.rank, self.config.metrics.enable_color_printing)
        if self.environment.rank == 0:
            if self.asked.files:
                logger.info(f"config: {', '.join(self.asked.files)}")
            else:
                logger.warning(
                    "no --job.config_file is given: this run has the defaults and your flags; "
                    "train_configs/ has configs to start from"
                )
        if any(dotted_paths(self.asked)):
            from titanlite.config.own_functions import load_functions

            load_functions(self.asked)
        callbacks, trackers = self.config.job.callbacks, self.config.metrics.tracker_names
        if not callbacks and not trackers:
            return []
        from titanlite.assembly.own_callbacks import check_trackers, load_callbacks

        check_trackers(trackers, self.asked.place("metrics.trackers"))
        return load_callbacks(callbacks, self.asked.place("job.callbacks"))

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
        from titanlite.dist.dist_env import DistEnv
        from titanlite.runs import TRACES
        from titanlite.runs.rank_logs import rank_log

        stall, comm = self.config.stall, self.config.comm
        world = DistEnv.open(
            store=self.store,
            init_timeout_seconds=comm.init_timeout_seconds,
            trace_buf_size=comm.trace_buf_size,
            trace_folder=str(self.folder / TRACES),
        )
        with world as entered, rank_log(self.folder, self.environment.rank):
            if entered.size > 1:
                from titanlite.metrics.watchdog import HangWatchdog

                self.watchdog = HangWatchdog(stall, comm, self.folder, exit_codes.exit_now)
            with self.watchdog:
                yield entered

    def message(self, error: Exception, code: int) -> str:
        """Return what to print of an expected error."""
        from titanlite.assembly import error_exit

        if code != exit_codes.OUT_OF_MEMORY:
            return error_exit.explain(error, self.config, self.asked, self.watchdog.verdict)
        # torchrun's SIGTERM, when the first other rank ends, must not cut the report off.
        self.stop.at_once = False
        rank, phase = self.environment.rank, self.watchdog.where
        return error_exit.explain_memory(error, self.config, rank, phase, self.store)


if __name__ == "__main__":
    main()
