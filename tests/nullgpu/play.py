"""Plays one rank of N on the null GPU: the real config, model, step and Trainer, with nobody on the
other ranks.

    tests/nullgpu/run.sh FOLDER tests/nullgpu/play.py --ranks=8 --
        --job.config_file=train_configs/llama3_8b.toml

It prints one line of JSON: the CUDA calls of a step that is not logged, the allocator's peak, and
the host's time. NCCL is the null GPU's; torch's `fake` backend stands for gloo. Text and tokenizer
are the bundled ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.nullgpu.counts import WARM, Counted, Counting, nobody_else, set_ranks

ROOT = Path(__file__).resolve().parents[2]
#: Flags that every run has: text that is here, the vocabulary of Llama 3, and no log of the counted
#: steps.
FLAGS = (
    "--training.dataset=c4_test",
    f"--model.tokenizer_path={ROOT}/titanlite/data/assets/tokenizer.tiktoken",
    "--no-validation.enable",
    "--no-metrics.enable_tensorboard",
    "--model.vocab_size=128256",
    "--metrics.log_freq=1000",
    "--training.seed=0",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--device", type=int, help="of this rank; else its place on its machine")
    parser.add_argument(
        "--steps", type=int, default=3, help="one is counted, the others give the host's time"
    )
    parser.add_argument("--traffic", action="store_true", help="count bytes in one more step")
    parser.add_argument("--log", help="keep the calls of the counted step in this file")
    asked, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="nullgpu-") as folder:
        log = Path(asked.log or f"{folder}/calls").resolve()
        set_ranks(asked.rank, asked.ranks, log, asked.device)
        steps = f"--training.steps={WARM + asked.steps + asked.traffic + 1}"
        flags = [*FLAGS, *flags[flags[:1] == ["--"] :], steps, f"--job.dump_folder={folder}/run"]
        found = play(flags, Counting(log, asked.steps, asked.traffic))
    print(json.dumps(found), flush=True)
    os._exit(0)  # the end of a run would wait for ranks that do not exist


def play(argv: Sequence[str], counting: Counting) -> dict[str, Any]:
    """Train as the flags say until all steps are counted, and return the counts."""
    from titanlite.assembly.build import build
    from titanlite.assembly.datasets import read_datasets
    from titanlite.assembly.own_callbacks import load_callbacks
    from titanlite.assembly.preflight import check_machine
    from titanlite.callbacks import Callback
    from titanlite.dist.dist_env import DistEnv
    from titanlite.resolve.load import check_config
    from titanlite.trainer import Trainer

    class Counter(Callback):
        """Counts from the fetch of the data until all other callbacks have run: without the save
        that may follow.
        """

        def on_phase(self, trainer: Trainer, phase: str) -> None:
            if phase == "data":
                counting.begin(trainer.step)

        def on_step_end(self, trainer: Trainer, result: Any) -> None:
            counting.end(trainer.step)

    run = check_config(argv, int(os.environ["WORLD_SIZE"]))[1]
    check_machine(run)
    callbacks = [*load_callbacks(run.job.callbacks), Counter()]
    with nobody_else(), no_waiting(), DistEnv.open() as world, contextlib.suppress(Counted):
        Trainer(build(run, world, read_datasets(run), callbacks=callbacks)).train()
    return counting.found


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Replace titanlite's own waiting for other ranks by nothing, and let the host read what a GPU
    would have computed: finite numbers, and as many rows to and from each rank.
    """
    import torch
    import torch.distributed as dist

    from titanlite.assembly import rank_checks
    from titanlite.checkpoint import manager
    from titanlite.dist import dist_env, rendezvous
    from titanlite.features.experts import exchange
    from titanlite.optim.guard import FiniteGuard

    read = FiniteGuard._read

    def read_finite(self: FiniteGuard, unread: int) -> None:
        for record, _ in self._copies:
            record.zero_()  # nothing has computed it
        read(self, unread)

    dispatch = exchange.Exchange.dispatch
    read_sizes = exchange._on_host
    rows_of_call: list[int] = []

    def dispatch_even(self: exchange.Exchange, rows: Any, counts: Any) -> Any:
        rows_of_call[:] = [len(rows)]
        return dispatch(self, rows, counts)

    def read_even(sizes: Any) -> Any:
        ranks = sizes.size(1)
        return torch.full_like(read_sizes(sizes), rows_of_call[0] // ranks)

    with (
        mock.patch.object(FiniteGuard, "_read", read_finite),
        mock.patch.object(exchange.Exchange, "dispatch", dispatch_even),
        mock.patch.object(exchange, "_on_host", read_even),
        mock.patch.object(manager, "check_finite", lambda *_: None),
        mock.patch.object(dist_env, "connect_store", lambda *_: dist.HashStore()),
        mock.patch.object(rendezvous, "barrier", lambda *_: None),
        mock.patch.object(rank_checks, "check_ranks", lambda *_, **__: []),
    ):
        yield


if __name__ == "__main__":
    main()
