"""`titanlite train`: train in this process, or in ranks of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from titanlite.config.errors import bad_flag
from titanlite.tools.parser import FLAGS, Commands, add_files, files_of, new_command
from titanlite.utils import require


def add_command(commands: Commands) -> None:
    """Add `titanlite train` to argparse."""
    train = new_command(
        commands,
        _train,
        "train",
        "train a model on this machine",
        "Train a config, as train.py does: one rank in this process, or N ranks with "
        "--nproc-per-node. A process that torchrun starts is one of its ranks: "
        "torchrun --nproc_per_node 8 -m titanlite train CONFIG",
        f"{FLAGS} Exit status: docs/reliability.md lists it.",
    )
    add_files(train)
    train.add("--nproc-per-node", "start N ranks on this machine with torchrun", "N", type=int)


def _train(arguments: argparse.Namespace) -> NoReturn:
    from titanlite import main
    from titanlite.start.first_look import first_look
    from titanlite.start.fit import check_config
    from titanlite.start.signals import SIGNALS, exit_on_signals

    argv = [*files_of(arguments), *arguments.flags]
    ranks = arguments.nproc_per_node
    if ranks is None:
        main.main(argv)
    check_ranks(ranks)
    exit_on_signals(*SIGNALS)
    first_look(check_config(argv, ranks)[1])
    start_ranks(ranks, ["train", *argv])


def check_ranks(ranks: int) -> None:
    """Check the value of --nproc-per-node. Raises ConfigError."""
    if ranks < 1:
        raise bad_flag("--nproc-per-node", f"expected an integer >= 1, got {ranks}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise bad_flag("--nproc-per-node", "torchrun has started this process already")


def start_ranks(ranks: int, words: Sequence[str], options: Sequence[str] = ()) -> NoReturn:
    """Become the torchrun of `torchrun.command`."""
    import signal

    from titanlite import torchrun
    from titanlite.start.signals import hold_signals

    require("torch")

    # torchrun would die of SIGUSR1, by which schedulers announce a time limit. Its workers listen
    # to it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Until torchrun can end by exit code 5.
    hold_signals(signal.SIGTERM, signal.SIGINT)
    os.execv(sys.executable, torchrun.command(ranks, words, options))
