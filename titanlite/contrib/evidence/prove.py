"""`titanlite prove`: runs of a tiny copy of a config are compared bit for bit, and faults are put
into some, which must be found. With --run: the records of a finished run are compared.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite import exit_codes
from titanlite.checkpoint.manifest import digest_of
from titanlite.cli import at_least
from titanlite.cli.argument_parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.config.errors import bad_flag, refuse
from titanlite.config.load import read
from titanlite.contrib.processes import stoppable, tell, training_environment
from titanlite.dist.count_gpus import count_gpus
from titanlite.runs import provenance
from titanlite.runs.lock import RunLock
from titanlite.runs.text_tables import Table, render
from titanlite.utils import atomic_write, human_time, timestamp

if TYPE_CHECKING:
    from titanlite.contrib.evidence.checks import Check

_ABOUT = (
    "Train a tiny copy of a config several times: the same features and degrees of parallelism, "
    "few layers and steps. Compare repeated, killed, resumed and differently divided runs, an "
    "evaluation and an export. Put faults into checkpoints, which the comparisons must find. Write "
    "proof.html and proof.json. With --run: compare the records of a finished run."
)
_EXITS = (
    f"{FLAGS} Exit status: 0 when every check holds and every fault is found, 1 if not, or if a "
    "feature of the config does not run here; 2 for a wrong config."
)


def add_command(commands: Commands) -> None:
    """Add `titanlite prove` to argparse."""
    help = "prove that runs of a config are exact: repeated, resumed, killed, divided, exported"
    parser = new_command(commands, _run, "prove", help, _ABOUT, _EXITS)
    add_files(parser)
    finished = "folder of a finished run, whose records are compared"
    parser.add("--run", finished, "FOLDER", type=Path, dest="finished")
    folder = "folder of the page (default: job.dump_folder with -proof behind it, or that of --run)"
    parser.add("--folder", folder, "FOLDER", type=Path)
    ranks = "most ranks (default: the GPUs of this machine, at least 4)"
    parser.add("--nproc", ranks, "N", type=at_least(1))
    parser.add("--keep", "keep the runs, which are deleted when every check holds")


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    if arguments.finished is not None:
        return _records(arguments.finished, arguments.folder or arguments.finished)
    words = [*files_of(arguments), *arguments.flags]
    if not words:
        raise bad_flag("CONFIG", "no file is given", "`titanlite prove debug_model.toml`")
    config, problems = read(words)
    refuse(problems)
    from titanlite.contrib.evidence.tiny import RANKS, tiny_copy

    own = Path(config.value("job.dump_folder"))
    folder = (arguments.folder or own.with_name(f"{own.name}-proof")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    gpus = count_gpus()
    began = time.perf_counter()
    with stoppable(), RunLock(folder, "folder"):
        runs = Path(tempfile.mkdtemp(dir=folder, prefix="runs-"))
        tiny = tiny_copy(config, arguments.nproc or max(gpus, RANKS), str(runs), gpus)
        from titanlite.contrib.evidence.bench import Bench
        from titanlite.contrib.evidence.checks import Proof

        copy = tiny.config.to_toml(defaults=False)
        atomic_write(runs / "config.toml", copy)
        ranks = tiny.run.mesh.world_size
        device = "cuda" if ranks <= gpus else "cpu"
        tell(f"{ranks} ranks on {device}; output of the runs: {runs}/*/console.log")
        environment = training_environment(device)
        bench = Bench(runs, runs / "config.toml", ranks, environment)
        proof = Proof(bench, tiny.run)
        checks = told(proof.checks())
        about = {
            "subject": own.name,
            "ranks": f"{ranks} on {device}",
            "config": digest_of(config.to_toml().encode()),
            "copy": digest_of(copy.encode()),
            **proof.fingerprints(),
            "seconds": time.perf_counter() - began,
        }
        text, code = report(folder, checks, about, tiny.left_out, tiny.changes)
        if code == exit_codes.DONE and not arguments.keep:
            shutil.rmtree(runs)
    return text, code


def _records(run: Path, folder: Path) -> tuple[str, int]:
    from titanlite.contrib.evidence.records import Records

    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    checks = told(Records(run).checks())
    about = {"subject": run.absolute().name, "seconds": time.perf_counter() - began}
    return report(folder, checks, about, {}, {})


def told(checks: Iterable[Check]) -> list[Check]:
    """Return checks, and tell of each when it is done."""
    found = []
    for check in checks:
        tell(f"{check.name}: {check.state} ({human_time(check.seconds)})")
        found.append(check)
    return found


def report(
    folder: Path,
    checks: list[Check],
    about: Mapping[str, Any],
    left_out: Mapping[str, str],
    changes: Mapping[str, str],
) -> tuple[str, int]:
    """Write the page; return a table of the checks, and the exit code."""
    from titanlite.contrib.evidence.page import PROVED, verdict, write

    found = verdict(checks, left_out)
    page = write(
        folder,
        {
            "verdict": found,
            "time": timestamp(),
            "host": socket.gethostname(),
            "about": about,
            "checks": [asdict(check) for check in checks],
            "left_out": left_out,
            "changes": changes,
            **provenance.origin(),
        },
    )
    rows = [(check.name, check.state, check.left, check.right, check.note) for check in checks]
    rows += [(key, "not run", "", "", reason) for key, reason in left_out.items()]
    table = render(Table(("check", "state", "", "", ""), rows, left=(0, 1, 2, 3, 4)))
    lines = [table, "", f"{found}; written: {page}"]
    return "\n".join(lines), exit_codes.DONE if found == PROVED else exit_codes.ERROR
