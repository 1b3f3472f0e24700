"""Plays one rank of N on the null GPU: the real config, model, step and Trainer, with nobody on the other ranks.

    tests/nullgpu/run.sh FOLDER tests/nullgpu/play.py --ranks 8 --steps 3 -- --job.config_file=train_configs/llama3_8b.toml

It prints one line of JSON: the CUDA calls of a step that is not logged, the allocator's peak, and the host's time.
NCCL is the null GPU's; torch's `fake` backend stands for gloo. Text and tokenizer are the bundled ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
#: Steps before the first one that is counted: they compile, allocate, and make communicators.
WARM = 2
#: Flags that every run has: text that is here, the vocabulary of Llama 3, and no log of the counted steps.
FLAGS = (
    "--training.dataset=c4_test",
    f"--model.tokenizer_path={ROOT}/titanlite/data/assets/tokenizer.tiktoken",
    "--no-validation.enable",
    "--no-metrics.enable_tensorboard",
    "--model.vocab_size=128256",
    "--metrics.log_freq=1000",
    "--training.seed=0",
)
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3, help="one is counted, the others give the host's time")
    parser.add_argument("--log", help="keep the calls of the counted step in this file")
    asked, flags = parser.parse_known_args()
    rank, ranks = asked.rank, asked.ranks
    local = {"LOCAL_RANK": rank % 8, "LOCAL_WORLD_SIZE": min(ranks, 8)}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in {"RANK": rank, "WORLD_SIZE": ranks, **local, **address}.items():
        os.environ[name] = str(value)
    os.environ["NULLGPU_COUNT"] = str(local["LOCAL_WORLD_SIZE"])
    with tempfile.TemporaryDirectory(prefix="nullgpu-") as folder:
        log = Path(asked.log or f"{folder}/calls")
        log.unlink(missing_ok=True)
        os.environ["NULLGPU_LOG"] = str(log)
        steps = f"--training.steps={WARM + asked.steps + 1}"
        found = play([*flags[flags[:1] == ["--"] :], *FLAGS, steps, f"--job.dump_folder={folder}/run"], log, asked.steps)
    print(json.dumps(found), flush=True)
    os._exit(0)  # the end of a run would wait for ranks that do not exist


def play(argv: Sequence[str], log: Path, steps: int) -> dict[str, Any]:
    """Train as the flags say until the last step is counted, and return the counts. log: where the null GPU writes."""
    import torch

    from titanlite.build import build
    from titanlite.fit import check_config
    from titanlite.parallel.dist_env import DistEnv
    from titanlite.preflight import check_machine
    from titanlite.run_text import read_datasets
    from titanlite.trainer import Trainer

    import_attention()
    run = check_config(argv, int(os.environ["WORLD_SIZE"]))[1]
    check_machine(run.training, run.compile, run.float8)
    counter = counting(log, steps)
    with alone(), DistEnv.open() as world, contextlib.suppress(Counted):
        Trainer(build(run, world, read_datasets(run), callbacks=[counter])).train()
    touched = [n for n in range(torch.cuda.device_count()) if calls().nullgpu_touched(n) and n != world.local_rank]
    return {**counter.found, "other_contexts": touched}


class Counted(BaseException):
    """Ends the run: all steps are counted."""


def counting(log: Path, steps: int) -> Any:
    """Return a callback that counts the calls of step `WARM` + 1 and times the steps after it."""
    import torch

    from titanlite.callbacks import Callback

    class Counter(Callback):
        found: dict[str, Any]

        def on_step_end(self, trainer: Any, result: Any) -> None:
            # All other callbacks have run: the next step's work begins with its save and its data.
            step, now = trainer.step, (time.perf_counter(), time.process_time())
            if step == WARM:
                torch.cuda.reset_peak_memory_stats()
                self.times, before = [], read_counts()
                calls().nullgpu_mark(b"begin")
                self.before = before
            elif step == WARM + 1:
                counts = {name: count - self.before[name] for name, count in read_counts().items()}
                calls().nullgpu_mark(b"end")
                calls().nullgpu_log(0)
                memory = torch.cuda.memory_stats()
                self.found = {"calls": counts, **read_log(log)}
                for name in ("allocated", "reserved"):
                    self.found[f"peak_{name}_gib"] = round(memory[f"{name}_bytes.all.peak"] / GIB, 3)
                self.found["retries"], self.found["ooms"] = memory["num_alloc_retries"], memory["num_ooms"]
            elif step > WARM + 1:
                self.times.append([end - begin for begin, end in zip(self.last, now, strict=True)])
            if step == WARM + steps:
                wall, processor = (statistics.median(column) for column in zip(*(self.times or [(0, 0)]), strict=True))
                self.found |= {"host_seconds": round(wall, 4), "processor_seconds": round(processor, 4)}
                raise Counted
            self.last = time.perf_counter(), time.process_time()

    return Counter()


def calls() -> Any:
    """Return the null GPU's own functions."""
    import ctypes

    return ctypes.CDLL(None)


#: In the order of the library's `nullgpu_count`.
NAMES = (
    "MALLOC FREE HOSTALLOC STREAMSYNC DEVSYNC EVENTSYNC D2H H2D D2D LAUNCH EVENTREC STREAMWAIT EVENTQUERY MEMSET "
    "SYNCMEMCPY BLOCKINGSTREAM"
).split()


def read_counts() -> dict[str, int]:
    """Return the calls so far by kind."""
    import ctypes

    return dict(zip(NAMES, (ctypes.c_long * len(NAMES)).in_dll(calls(), "nullgpu_count"), strict=True))


def import_attention() -> None:
    """Let cuDNN's attention, which asks its own library, give results of the right shape without one."""
    import warnings

    import torch
    from torch.utils._pytree import tree_map

    def hollow(op: Any) -> Callable[..., Any]:
        def empty(tensor: Any, device: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

        def call(*args: Any, **kwargs: Any) -> Any:
            device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
            shapes, named = tree_map(lambda t: empty(t, "meta"), (args, kwargs))
            calls().nullgpu_kernel(op._schema.name.encode(), None)
            return tree_map(lambda t: empty(t, device), op(*shapes, **named))

        return call

    library = torch.library.Library("aten", "IMPL")
    for name in ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(name, hollow(getattr(torch.ops.aten, name).default), "CUDA")
    import_attention.library = library  # type: ignore[attr-defined]  # its end would take the kernels away


@contextlib.contextmanager
def alone() -> Any:
    """Replace what waits for other ranks by nothing, and let the guard see finite numbers."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    import titanlite.build
    from titanlite.guard import FiniteGuard
    from titanlite.parallel import dist_env, rendezvous

    init, group, read = dist.init_process_group, dist.new_group, FiniteGuard._read

    def init_fake(backend: str, **more: Any) -> None:
        init(backend.replace("gloo", "fake"), **more)

    def group_fake(*args: Any, backend: str | None = None, **more: Any) -> Any:
        return group(*args, backend=backend and backend.replace("gloo", "fake"), **more)

    def read_finite(self: FiniteGuard, unread: int) -> None:
        for record, _ in self._copies:
            record.zero_()  # nothing has computed it
        read(self, unread)

    with (
        mock.patch.object(dist, "init_process_group", init_fake),
        mock.patch.object(dist, "new_group", group_fake),
        mock.patch.object(FiniteGuard, "_read", read_finite),
        mock.patch.object(dist_env, "connect_store", lambda *_: dist.HashStore()),
        mock.patch.object(rendezvous, "barrier", lambda *_: None),
        mock.patch.object(titanlite.build, "check_ranks", lambda *_, **__: []),
    ):
        yield


def read_log(log: Path) -> dict[str, Any]:
    """Return counts of the log's part between its marks: kernels, NCCL calls by kind, copies by kind of host memory."""
    from collections import Counter

    kinds: Counter[str] = Counter()
    nccl: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    with open(log) as lines:
        for line in lines:
            if line.startswith("MARK begin"):
                kinds.clear(), nccl.clear(), copies.clear()
            words = line.split()
            kinds[words[0]] += 1
            if words[0] == "KERNEL" and "nccl:" in words[3]:
                nccl[words[3].rpartition("nccl:")[2]] += 1
            elif words[0] in ("D2H", "H2D"):
                copies[f"{words[0]} {words[2].lower()}"] += 1
    return {"kernels": kinds["KERNEL"] - nccl.total(), "nccl": dict(nccl), "copies": dict(copies)}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
