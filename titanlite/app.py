"""`train.py` as a function: command line → plans → text → world → trainer, and foreseen errors → exit codes."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from titanlite import exit_codes
from titanlite.build import check_tensor_parallel, check_units, read_text
from titanlite.checkpoint import CheckpointError
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.plans import Plans
from titanlite.data.errors import DataError
from titanlite.guard import NonFiniteError
from titanlite.models.shapes import ShapeError
from titanlite.observe.console import logger, setup_console
from titanlite.parallel.compile import prepare_compile
from titanlite.parallel.host_memory import keep_freed_memory
from titanlite.parallel.world import World, WorldError, env_int
from titanlite.prepare import checked_plans, resolve_plans
from titanlite.runs.logs import rank_log
from titanlite.trainer import Trainer

_SECONDS_TO_SPEAK = 3.0


def run(argv: Sequence[str]) -> int:
    """Train as the command line says; returns the exit code (see `titanlite.exit_codes`).

    Errors that say what to change are printed without a traceback. What can be wrong with config, tokenizer and text is
    found before any process group or model exists.
    """
    try:
        size = env_int("WORLD_SIZE", 1)
        config, plans = checked_plans(argv, size, training=True)
        setup_console(env_int("RANK", 0), plans.observe.color)
        prepare_compile(plans.compile)
        text = read_text(plans)
        check_units(plans, text)
        check_tensor_parallel(plans, text)
        if plans.train.steps is None:
            plans = resolve_plans(config, size, text.train.total_sequences)
        _make_folders(plans)
        with World.open(plans.comm) as world, rank_log(Path(plans.observe.dump_folder), world.rank):
            if world.device.type == "cpu":
                keep_freed_memory()
            if world.rank == 0:
                _show_config(plans)
            Trainer(plans, world, text).train()
    except (ConfigError, DataError, ShapeError, WorldError) as error:
        return _end(str(error), exit_codes.CONFIG)
    except CheckpointError as error:
        return _end(str(error), exit_codes.CHECKPOINT)
    except NonFiniteError as error:
        kept = f"checkpoints are in {plans.checkpoint.folder}" if plans.checkpoint.enable else "checkpoints are off"
        return _end(f"stopped: {error}; {kept}", exit_codes.GUARD)
    return exit_codes.DONE


def _end(message: str, code: int) -> int:
    """Print why the run ends, once per node: its ranks all have the same to say.

    The first worker to leave makes torchrun end the others, so those that do not print give the one that does time.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(_SECONDS_TO_SPEAK)
        # Still here: the one that prints had nothing to say, so this went wrong on this rank alone.
        print(f"error: [rank {os.environ.get('RANK')}] {message}", file=sys.stderr, flush=True)
    return code


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
            reason = f"cannot write to {str(folder)!r}: {error.strerror}"
            raise ConfigError([Problem("", key, reason, "name a folder that you may write to")]) from None


def _show_config(plans: Plans) -> None:
    """`job.print_config` and `job.save_config_file`: the whole config as one TOML file."""
    if plans.observe.print_config:
        print(plans.config_toml, flush=True)
    if plans.observe.save_config_file is not None:
        path = Path(plans.observe.save_config_file)
        path.write_text(plans.config_toml, encoding="utf-8")
        logger.info(f"config written to {path}")
