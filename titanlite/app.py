"""`train.py` as a function: command line → plans → text → world → trainer, and foreseen errors → exit codes."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from titanlite import exit_codes
from titanlite.build import check_tensor_parallel, check_units, read_text
from titanlite.checkpoint import CheckpointError
from titanlite.checkpoint.place import StorePath, place
from titanlite.checkpoint.store_lock import StoreLock, check_reachable
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.job import JobConfig
from titanlite.config.plans import Plans
from titanlite.data.errors import DataError
from titanlite.entry import end, leave, stop_with_torchrun
from titanlite.exit_codes import is_of_collectives
from titanlite.guard import BadStepError
from titanlite.models.shapes import ShapeError
from titanlite.observe.console import setup_console
from titanlite.observe.stalls import StallWatch
from titanlite.parallel.compile import CompileError, prepare_compile
from titanlite.parallel.environment import read_environment
from titanlite.parallel.float8 import check_float8
from titanlite.parallel.host_memory import keep_freed_memory
from titanlite.parallel.meeting import MeetingError, after_rank_0, leaving_word
from titanlite.parallel.world import World, WorldError, join_store
from titanlite.preempt import GracefulStop, Preempted
from titanlite.prepare import checked_plans, resolve_plans
from titanlite.runs.lock import LockedError, RunLock
from titanlite.runs.logs import FOLDER as LOGS
from titanlite.runs.logs import rank_log
from titanlite.trainer import Trainer
from titanlite.utils import counted, escape, logger


def run(argv: Sequence[str]) -> int:
    """Train as the command line says; returns the exit code (see `titanlite.exit_codes`).

    Errors that say what to change are printed without a traceback. What can be wrong with config, tokenizer and text is
    found before any process group or model exists. A signal before the first step ends the run at once, a later one
    when a checkpoint is written; see `titanlite.preempt`.
    """
    # Around everything: when the first worker has ended torchrun sends SIGTERM to the rest, which must not die of it.
    with GracefulStop(at_once=True) as stop:
        return _run(argv, stop)


def _run(argv: Sequence[str], stop: GracefulStop) -> int:
    stalls = StallWatch()
    try:
        ranks = read_environment()
        size, rank = ranks.size, ranks.rank
        config, plans = checked_plans(argv, size, training=True)
        setup_console(rank, plans.observe.color)
        if rank == 0:
            _name_config(config, plans)
        store = join_store()  # before what takes longer on one rank than on another
        with leaving_word(store, rank, size), contextlib.ExitStack() as held:
            prepare_compile(plans.compile)
            check_float8(plans.float8)
            if rank == 0:
                held.enter_context(_lock(plans))
            if store is not None:
                after_rank_0(store, rank, size, plans.comm.init_timeout_seconds, plans.comm.meeting_seconds)
            text = read_text(plans)
            check_units(plans, text)
            check_tensor_parallel(plans, text)
            if plans.train.steps is None:
                plans = resolve_plans(config, size, text.train.total_sequences)
            _make_folders(plans)
            folder = Path(plans.observe.dump_folder)
            stalls = StallWatch(plans.stall, logs=str(folder / LOGS), traces=plans.comm.trace_folder, end=leave)
            with World.open(plans.comm, store=store) as world, rank_log(folder, world.rank), stalls:
                if world.device.type == "cpu":
                    keep_freed_memory()
                if world.rank == 0:
                    _show_config(plans)
                Trainer(plans, world, text, stop, stalls).train()
    except (ConfigError, DataError, ShapeError, WorldError) as error:
        return end(str(error), exit_codes.CONFIG)
    except MeetingError as error:
        return end(str(error), exit_codes.LOST_PEER)
    except (CheckpointError, LockedError) as error:
        return end(str(error), exit_codes.CHECKPOINT)
    except (Preempted, KeyboardInterrupt) as error:
        if not getattr(error, "together", False) and os.environ.get("LOCAL_RANK", "0") == "0":  # else it is logged
            print(f"stopped: {str(error) or 'second Ctrl-C'}", file=sys.stderr, flush=True)
        return exit_codes.code_of(error)
    except CompileError as error:
        if os.environ.get("TORCHDYNAMO_VERBOSE", "0") != "0":
            traceback.print_exc()
        advice = "TORCHDYNAMO_VERBOSE=1 shows torch's own report, training.compile = false trains without"
        return end(f"{error}\n{advice}", exit_codes.CONFIG)
    except BadStepError as error:
        kept = f"checkpoints are in {plans.checkpoint.folder}" if plans.checkpoint.enable else "checkpoints are off"
        return end(f"stopped: {error}; {kept}", exit_codes.GUARD)
    except RuntimeError as error:
        if not is_of_collectives(error):
            raise
        logs = Path(plans.observe.dump_folder) / LOGS
        unknown = f"Another rank has ended, hangs or cannot be reached: see who in {logs}"
        return end(f"a collective failed: {error}\n{stalls.verdict or unknown}", exit_codes.LOST_PEER)
    return exit_codes.DONE


def _name_config(config: JobConfig, plans: Plans) -> None:
    """Log the config files; warn if there is none, since a run with defaults alone is rarely intended."""
    if config.files:
        logger.info(f"config: {', '.join(config.files)}")
        return
    steps = plans.train.steps
    length = counted(plans.data.epochs or 0, "epochs") if steps is None else counted(steps, "steps")
    logger.warning(
        f"no --job.config_file is given: this run has the defaults and your flags ({plans.model.name} "
        f"{plans.model.flavor}, {length}, folder {plans.observe.dump_folder}); train_configs/ has configs to start from"
    )


@contextlib.contextmanager
def _lock(plans: Plans) -> Iterator[None]:
    """Lock the run's folder and the real path of its checkpoint folder against other runs.

    Raises LockedError; ConfigError where the run's folder cannot be written to or holds the checkpoints among its logs,
    CheckpointError where that of the checkpoints, or a store, cannot be used.
    """
    run, checkpoints = Path(plans.observe.dump_folder), place(plans.checkpoint.folder)
    folders = {"job.dump_folder": run}
    if plans.checkpoint.enable and isinstance(checkpoints, Path):
        real = Path(os.path.realpath(checkpoints))  # two paths may lead to one folder
        if real.is_relative_to(os.path.realpath(run / LOGS)):
            reason = f"{str(checkpoints)!r} lies in {str(run / LOGS)!r}, where the logs of this run are"
            raise ConfigError([Problem("", "checkpoint.folder", reason, "name another folder")])
        if real != Path(os.path.realpath(run)):
            folders["checkpoint.folder"] = real
    with contextlib.ExitStack() as stack:
        for key, folder in folders.items():
            try:
                stack.enter_context(RunLock(folder, key))
            except OSError as error:
                problem = _not_writable(key, folder, error)
                raise CheckpointError(str(problem)) if key == "checkpoint.folder" else problem from None
        if plans.checkpoint.enable and plans.checkpoint.initial_load_path is not None:
            check_reachable("checkpoint.initial_load_path", place(plans.checkpoint.initial_load_path))
        if plans.checkpoint.enable and isinstance(checkpoints, StorePath):
            stack.enter_context(StoreLock(checkpoints))
        yield


def _not_writable(key: str, folder: Path, error: OSError) -> ConfigError:
    why = "it is a file" if os.path.isfile(folder) else error.strerror
    reason = f"cannot write to {str(folder)!r}: {why}"
    return ConfigError([Problem("", key, reason, "name a folder that you may write to")])


def _make_folders(plans: Plans) -> None:
    """Make sure that the run can write where it is told to. Raises ConfigError."""
    folders = {"job.dump_folder": Path(plans.observe.dump_folder)}
    if plans.observe.save_config_file is not None:
        folders["job.save_config_file"] = Path(plans.observe.save_config_file).parent
    for key, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise _not_writable(key, folder, error) from None


def _show_config(plans: Plans) -> None:
    """`job.print_config` and `job.save_config_file`: the whole config as one TOML file."""
    if plans.observe.print_config:
        print(plans.config_toml, flush=True)
    if plans.observe.save_config_file is not None:
        path = Path(plans.observe.save_config_file)
        path.write_text(plans.config_toml, encoding="utf-8")
        logger.info(f"config written to {path}")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The whole process of one rank, its config already checked by `titanlite.entry`. argv: None is the process's."""
    words = ""
    gc.freeze()  # what is imported is never garbage, and half a million objects take a while to look through
    with GracefulStop(at_once=True) as stop:  # to the very end: a signal after the run does not change its code
        try:
            code = record(_run)(sys.argv[1:] if argv is None else argv, stop) or 0
        except (Preempted, KeyboardInterrupt) as error:  # it came before `_run` looked, or while that was ending
            code = exit_codes.code_of(error)
        except Exception as error:
            traceback.print_exc()
            code = exit_codes.ERROR
            words = f"{type(error).__name__}: {error}"
            if os.environ.get("WORLD_SIZE", "1") != "1":  # what is read last should say where this is from
                words = f"rank {os.environ.get('RANK')} on {socket.gethostname()}: {words}"
                print(escape(f"error: {words}"), file=sys.stderr)
        stop.at_once = False
        leave(code, words)


if __name__ == "__main__":
    stop_with_torchrun()
    main()
