"""The folders that a run writes to: locked against other runs, and the config written there."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.checkpoint.errors import CheckpointError
from titanlite.config.errors import ConfigError, unfit
from titanlite.config.run_sections import Job
from titanlite.config.sections import Checkpoint
from titanlite.runs.symlink_checks import refuse_links
from titanlite.utils import LinkError, atomic_write, logger

if TYPE_CHECKING:
    from titanlite.checkpoint.store_paths import AnyPath

#: Names of files that a run writes into its folder.
_OWN_FILE = re.compile(r".*\.jsonl|config.*\.toml|git.*\.diff|run\.(json|lock)|.*-run-id")
_NO_LINKS = "or name its target by the key of the folder, such as checkpoint.folder"


@contextlib.contextmanager
def lock_folders(
    run_folder: Path,
    section: Checkpoint,
    ending: Callable[[], bool] = lambda: False,
    others: Sequence[str] = (),
) -> Iterator[None]:
    """Lock the run's folder and the real path of its checkpoint folder against other runs.

    `ending` tells whether this run was asked to stop; `others` are written to besides. Raises
    LockedError, ConfigError for a link or a run's folder that is not writable, and CheckpointError
    for checkpoints or a store.
    """
    with contextlib.ExitStack() as stack:
        _refuse_links(run_folder, section.folder, others)
        checkpoints: AnyPath | None = None
        if section.enable_checkpoint:
            checkpoints = _checkpoint_folder(run_folder, section)
        _lock(stack, "job.dump_folder", run_folder, ending)
        if checkpoints is not None:
            _lock(stack, "checkpoint.folder", checkpoints, ending)
        yield


def _refuse_links(run_folder: Path, checkpoints: str, others: Sequence[str]) -> None:
    """Raise ConfigError for a link below the run's folder: it may come from somebody else."""
    from titanlite.runs import HUB, TRACES
    from titanlite.runs.rank_logs import FOLDER as LOGS

    try:
        for path in run_folder.glob("*") if run_folder.is_dir() else ():
            if path.is_symlink() and _OWN_FILE.fullmatch(path.name):
                raise LinkError(path)
        ours = (run_folder / name for name in (LOGS, TRACES, HUB))
        for folder in (*ours, *map(Path, filter(None, others))):
            refuse_links(run_folder, folder, inside=True)
        # wandb makes links; a step that is one is read only.
        for folder in (run_folder / "wandb", Path(checkpoints)):
            refuse_links(run_folder, folder)
    except LinkError as error:
        raise unfit("job.dump_folder", str(error), _NO_LINKS) from None


def _checkpoint_folder(run_folder: Path, section: Checkpoint) -> AnyPath | None:
    """Return the checkpoints' folder unless it is the run's own.

    It also asks the store of `checkpoint.initial_load_path`.
    """
    from titanlite.checkpoint.store_paths import to_path

    source = to_path(section.initial_load_path or "")
    folder = to_path(section.folder)
    if isinstance(folder, Path):
        # Two paths may lead to one folder.
        folder = Path(os.path.realpath(folder))
    if not isinstance(source, Path):
        with _store_errors("checkpoint.initial_load_path"):
            source.is_dir()
    return None if folder == Path(os.path.realpath(run_folder)) else folder


def _lock(
    stack: contextlib.ExitStack, key: str, folder: AnyPath, ending: Callable[[], bool]
) -> None:
    from titanlite.runs.lock import RunLock

    try:
        with contextlib.nullcontext() if isinstance(folder, Path) else _store_errors(key):
            if not isinstance(folder, Path):
                # It fails for a missing bucket, wrong keys or a wrong address.
                folder.is_dir()
            stack.enter_context(RunLock(folder, key, ending))
    except OSError as error:
        problem = _not_writable(key, folder, error)
        if key == "checkpoint.folder":
            raise CheckpointError(str(problem)) from None
        raise problem from None


@contextlib.contextmanager
def _store_errors(key: str) -> Iterator[None]:
    from titanlite.checkpoint.store_paths import StoreError

    try:
        yield
    except StoreError as error:
        raise CheckpointError(f"{key}: {error}") from None


def _not_writable(key: str, folder: AnyPath, error: OSError) -> ConfigError:
    why = "it is a file" if os.path.isfile(str(folder)) else error.strerror
    reason = f"cannot write to {str(folder)!r}: {why}"
    return unfit(key, reason, "name a folder that you may write to")


def show_config(job: Job, toml: str) -> None:
    """Print and save the whole config as TOML, as `job` asks. Raises ConfigError."""
    from titanlite.runs.provenance import public_config

    if job.print_config:
        print(public_config(toml), flush=True)
    if job.save_config_file is not None:
        path = Path(job.save_config_file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, public_config(toml))
        except OSError as error:
            raise _not_writable("job.save_config_file", path, error) from None
        logger.info(f"config written to {path}")
