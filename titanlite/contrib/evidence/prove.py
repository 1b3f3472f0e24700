"""`titanlite prove`: compares runs of a tiny copy of a config, or the records of a run."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from titanlite import exit_codes
from titanlite.cli import at_least
from titanlite.cli.argument_parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.config.errors import bad_flag, refuse
from titanlite.config.load import read
from titanlite.contrib.processes import stoppable, tell, training_environment
from titanlite.dist.count_gpus import count_gpus
from titanlite.utils import atomic_write

_ABOUT = (
    "Train a tiny copy of a config several times: the same features and degrees of parallelism, "
    "few layers and steps. Compare repeated, killed, resumed and differently divided runs, an "
    "evaluation and an export. Put faults into some runs, which the comparisons must find. Write "
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
    finished = arguments.finished
    if finished is not None:
        from titanlite.contrib.evidence import check_records
        from titanlite.contrib.evidence.page import report

        checks = check_records.checks(finished)
        return report(arguments.folder or finished, finished.absolute().name, checks)
    words = [*files_of(arguments), *arguments.flags]
    if not words:
        raise bad_flag("CONFIG", "no file is given", "`titanlite prove debug_model.toml`")
    config, problems = read(words)
    refuse(problems)
    from titanlite.contrib.evidence.checks import Proof
    from titanlite.contrib.evidence.child_runs import CONSOLE, Bench
    from titanlite.contrib.evidence.page import report
    from titanlite.contrib.evidence.tiny import RANKS, tiny_copy

    own = Path(config.value("job.dump_folder"))
    folder = (arguments.folder or own.with_name(f"{own.name}-proof")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    gpus = count_gpus()
    with stoppable():
        runs = Path(tempfile.mkdtemp(dir=folder, prefix="runs-"))
        tiny = tiny_copy(config, arguments.nproc or max(gpus, RANKS), str(runs), gpus)
        bench = Bench(runs, tiny.run.mesh.world_size, training_environment())
        if bench.ranks > gpus:
            bench.environment["CUDA_VISIBLE_DEVICES"] = ""
        atomic_write(bench.config, tiny.config.to_toml(defaults=False))
        tell(f"{bench.ranks} ranks; output of the runs: {runs}/*/{CONSOLE}")
        text, code = report(folder, own.name, Proof(bench, tiny.run).checks(), tiny)
        if code == exit_codes.DONE and not arguments.keep:
            shutil.rmtree(runs)
    return text, code
