"""`titanlite train`: check a config, then train it on all GPUs of this machine."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import NoReturn

from titanlite import exit_codes
from titanlite.cli.argument_parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.config.errors import bad_flag
from titanlite.config.load import read
from titanlite.dist.count_gpus import count_gpus
from titanlite.dist.process_settings import TUNABLES, chose_malloc
from titanlite.dist.signals import SIGNALS, exit_on_signals
from titanlite.resolve.load import check_alone, resolve
from titanlite.utils import REMOVED, require

#: Port of the first machine, by default.
PORT = 29400


def add_command(commands: Commands) -> None:
    """Add `titanlite train` to argparse."""
    parser = new_command(
        commands,
        _run,
        "train",
        "train a config on all GPUs of this machine",
        "Check a config, then train it by torchrun on this machine and end with the code of its "
        "ranks. Without a GPU, and without a number of ranks, one rank trains on the CPU, in this "
        "process. A process that torchrun starts is one of its ranks: torchrun --nproc_per_node 8 "
        "-m titanlite train CONFIG. Rank 0 is shown, or the ranks of LOG_RANK, as 0,1; all are in "
        f"logs/ of job.dump_folder. {FLAGS}",
        "With launch.system, and without --nproc and --nnodes, it submits a job to that "
        "scheduler, as `titanlite launch --submit` does. For several machines by hand, run "
        "the same command on each, with its own --node-rank. Exit status: "
        "docs/reliability.md lists it.",
    )
    add_files(parser)
    ranks = "ranks on this machine (default: NGPU of the environment, else one per GPU, else one)"
    parser.add_argument("--nproc", "--nproc-per-node", dest="nproc", metavar="N", help=ranks)
    parser.add(
        "--nnodes", "number of machines, each with as many ranks (default: 1)", "N", type=int
    )
    parser.add(
        "--node-rank",
        "number of this machine, counted from 0 (default: 0)",
        "N",
        type=int,
        default=0,
    )
    first = f"address at which all machines reach machine 0 (default port: {PORT})"
    parser.add("--master", first, "HOST[:PORT]")


def _run(arguments: argparse.Namespace) -> tuple[str, int]:
    from titanlite import main

    argv = [*files_of(arguments), *arguments.flags]
    is_asked = arguments.nproc is not None or arguments.nnodes is not None
    if not argv and "RANK" not in os.environ:
        message = "no file and no key is given"
        raise bad_flag("CONFIG", message, "`titanlite train debug_model.toml` is a first run")
    if not is_asked and {"RANK", "WORLD_SIZE"} & os.environ.keys():
        main.main(argv)
    config, problems = read(argv)
    if not is_asked and (system := config.value("launch.system")):
        from titanlite.cli.launch import launch

        return launch(system, argv, "submit"), exit_codes.DONE
    exit_on_signals(*SIGNALS)
    nodes = arguments.nnodes or 1
    check_alone(config, problems)  # before a variable is set
    if arguments.nnodes is None and (asked := config.value("launch.nodes")) > 1:
        advice = "set launch.system to submit it, or start it on each machine with --nnodes"
        raise bad_flag(
            "launch.nodes",
            f"{asked} machines, but this command starts ranks on this one alone",
            advice,
        )
    environment = config.value("launch.environment")
    # The config in launch/ has no secrets: its job has set them.
    os.environ.update({name: value for name, value in environment.items() if value != REMOVED})
    gpus = count_gpus()
    if not (is_asked or gpus or "NGPU" in os.environ):
        main.main(argv)
    ranks = _ranks(arguments.nproc, gpus)
    shown = _shown(ranks)
    options = _rendezvous(nodes, arguments.node_rank, arguments.master)
    from titanlite.assembly.early_text_check import first_look

    first_look(resolve(config, nodes * ranks, machine=True, texts=True)[1])
    if not gpus:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if not chose_malloc():
            os.environ["GLIBC_TUNABLES"] = TUNABLES
    os.environ["PYTHONUNBUFFERED"] = (
        "1"  # so that a log that is piped into a file shows each step when it is done
    )
    start_ranks(ranks, ["train", *argv], [*options, *_output(ranks, shown)])


def _ranks(asked: str | None, gpus: int) -> int:
    name = "--nproc"
    text = asked
    if text is None:
        name = "NGPU"
        text = os.environ.get("NGPU", str(gpus or 1))
    if not re.fullmatch("[1-9][0-9]*", text):
        raise bad_flag(name, f"expected an integer >= 1, got {text!r}")
    if gpus and int(text) > gpus:
        message = f"{text}, but this machine shows {gpus} GPU(s): a GPU has one rank at most"
        raise bad_flag(name, message, "nvidia-smi -L and CUDA_VISIBLE_DEVICES tell which it shows")
    check_ranks(int(text))
    return int(text)


def check_ranks(ranks: int) -> None:
    """Check the number of ranks to start. Raises ConfigError."""
    if ranks < 1:
        raise bad_flag("--nproc-per-node", f"expected an integer >= 1, got {ranks}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise bad_flag("--nproc-per-node", "torchrun has started this process already")


def _shown(ranks: int) -> list[int]:
    text = os.environ.get("LOG_RANK", "0")
    words = re.split("[, ]+", text.strip())
    if not all(word.isdecimal() and int(word) < ranks for word in words):
        message = (
            f"expected ranks of this machine from 0 to {ranks - 1}, as in 0 or 0,1, got {text!r}"
        )
        raise bad_flag("LOG_RANK", message)
    return [int(word) for word in words]


def _rendezvous(nodes: int, node: int, master: str | None) -> list[str]:
    """Return torchrun's options for several machines.

    The static rendezvous ends on all of them when one is lost.
    """
    if nodes == 1 and master is None:
        return []
    if master is None or not 0 <= node < nodes:
        wrong = "--master" if master is None else "--node-rank"
        raise bad_flag(
            wrong,
            f"{nodes} machines need --node-rank from 0 to {nodes - 1} and the address of machine 0",
        )
    host, _, port = master.partition(":")
    words = {"nnodes": nodes, "node_rank": node, "master_addr": host, "master_port": port or PORT}
    return [word for name, value in words.items() for word in (f"--{name}", str(value))]


def _output(ranks: int, shown: list[int]) -> list[str]:
    options = ["--local-ranks-filter", ",".join(map(str, shown))]
    terminal = sys.stdout.isatty()
    if terminal and shown == [0] and ranks <= 10:
        # Rank 0 has the terminal to itself; torchrun writes the others' output
        # to files. It reads ranks of one digit here.
        if ranks > 1:
            options += ["--redirects", ",".join(f"{rank}:3" for rank in range(1, ranks))]
    else:
        # The ranks write to files that torchrun reads, and cannot see where its own output ends.
        options += ["--role", "rank", "--tee", "3"]
        if terminal and not os.environ.get("NO_COLOR"):
            os.environ["FORCE_COLOR"] = "1"
    if len(options) > 2:
        options += ["--log-dir", tempfile.mkdtemp(prefix="titanlite-")]
    return options


def start_ranks(ranks: int, words: Sequence[str], options: Sequence[str] = ()) -> NoReturn:
    """Become the torchrun of `torchrun.command`."""
    import signal

    from titanlite import torchrun

    require("torch")

    # torchrun would die of SIGUSR1, by which schedulers announce a time limit. Its workers listen
    # to it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Until torchrun can end by exit code 5; the mask stays in the program that this one becomes.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    os.execv(sys.executable, torchrun.command(ranks, words, options))
