"""Plays one rank of N on the null GPU: the real config, model, step and Trainer, with nobody on the other ranks.

    tests/nullgpu/run.sh FOLDER tests/nullgpu/play.py --ranks=8 -- --job.config_file=train_configs/llama3_8b.toml

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
        flags = [*FLAGS, *flags[flags[:1] == ["--"] :], steps, f"--job.dump_folder={folder}/run"]
        found = play(flags, log, asked.steps)
    print(json.dumps(found), flush=True)
    os._exit(0)  # the end of a run would wait for ranks that do not exist


def play(argv: Sequence[str], log: Path, steps: int) -> dict[str, Any]:
    """Train as the flags say until the last step is counted, and return the counts. log: where the null GPU writes."""
    import torch

    from titanlite.build import build
    from titanlite.callbacks import load_callbacks
    from titanlite.fit import check_config
    from titanlite.parallel.dist_env import DistEnv
    from titanlite.preflight import check_machine
    from titanlite.run_text import read_datasets
    from titanlite.trainer import Trainer

    import_attention()
    run = check_config(argv, int(os.environ["WORLD_SIZE"]))[1]
    check_machine(run.training, run.compile, run.float8)
    counter = counting(log, steps)
    callbacks = [*load_callbacks(run.job.callbacks), counter]
    with alone(), DistEnv.open() as world, contextlib.suppress(Counted):
        Trainer(build(run, world, read_datasets(run), callbacks=callbacks)).train()
    touched = [n for n in range(torch.cuda.device_count()) if calls().nullgpu_touched(n) and n != world.local_rank]
    return {**counter.found, "other_contexts": touched}


class Counted(BaseException):
    """Ends the run: all steps are counted."""


def counting(log: Path, steps: int) -> Any:
    """Return a callback that counts the calls of step `WARM` + 1, without the save after it, and times later steps."""
    import torch

    from titanlite.callbacks import Callback

    class Counter(Callback):
        found: dict[str, Any]

        def on_phase(self, trainer: Any, phase: str) -> None:
            if phase == "data":
                if trainer.step == WARM + 1:
                    torch.cuda.reset_peak_memory_stats()
                    self.times, self.before = [], read_counts()
                    calls().nullgpu_mark(b"begin")
                self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, trainer: Any, result: Any) -> None:
            # All other callbacks have run.
            step, now = trainer.step, (time.perf_counter(), time.process_time())
            if step == WARM + 1:
                counts = {name.lower(): count - self.before[name] for name, count in read_counts().items()}
                calls().nullgpu_mark(b"end")
                calls().nullgpu_log(0)
                memory = torch.cuda.memory_stats()
                self.found = {"calls": counts, **read_log(log)}
                for name in ("allocated", "reserved"):
                    self.found[f"peak_{name}_gib"] = round(memory[f"{name}_bytes.all.peak"] / GIB, 3)
                self.found["retries"], self.found["ooms"] = memory["num_alloc_retries"], memory["num_ooms"]
            elif step > WARM + 1:
                self.times.append([end - begin for begin, end in zip(self.began, now, strict=True)])
            if step == WARM + steps:
                wall, processor = (statistics.median(column) for column in zip(*(self.times or [(0, 0)]), strict=True))
                self.found |= {"host_seconds": round(wall, 4), "processor_seconds": round(processor, 4)}
                raise Counted

    return Counter()


def calls() -> Any:
    """Return the null GPU's own functions."""
    import ctypes

    return ctypes.CDLL(None)


#: In the order of the library's `nullgpu_count`.
_NAMES = """MALLOC FREE HOSTALLOC STREAMSYNC DEVSYNC EVENTSYNC D2H H2D D2D LAUNCH EVENTREC STREAMWAIT EVENTQUERY MEMSET
SYNCMEMCPY BLOCKINGSTREAM"""
NAMES = _NAMES.split()


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
    from torch.distributed.checkpoint import default_planner
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    import titanlite.build
    from titanlite.checkpoint import manager
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

    def gather_all(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        gather_all(object_gather_list or [], obj)

    def scatter(scatter_object_output_list: list[Any], scatter_object_input_list: Any = None, **_: Any) -> None:
        scatter_object_output_list[0] = scatter_object_input_list[rank]

    rank = int(os.environ["RANK"])
    with (
        mock.patch.object(dist, "init_process_group", init_fake),
        mock.patch.object(dist, "new_group", group_fake),
        mock.patch.object(dist, "all_gather_object", gather_all),
        mock.patch.object(dist, "gather_object", gather),
        mock.patch.object(dist, "broadcast_object_list", lambda *_, **__: None),
        mock.patch.object(dist, "scatter_object_list", scatter),
        mock.patch.object(FiniteGuard, "_read", read_finite),
        mock.patch.object(manager, "find_nonfinite", lambda *_: ""),
        mock.patch.object(default_planner, "_validate_global_plan", lambda *_: []),
        mock.patch.object(dist_env, "connect_store", lambda *_: dist.HashStore()),
        mock.patch.object(rendezvous, "barrier", lambda *_: None),
        mock.patch.object(titanlite.build, "check_ranks", lambda *_, **__: []),
    ):
        yield


def read_log(log: Path) -> dict[str, Any]:
    """Return counts of the log's part between its marks.

    kernels; nccl: collectives by kind; gemm_tflop: of all matrix products; copies, by kind of host memory; syncs: waits
    of the host by stream; exposed: collectives beside which no matrix product can run (see `Streams`).
    """
    from collections import Counter

    kernels, gemm, streams = 0, 0, Streams()
    nccl, copies, syncs = Counter[str](), Counter[str](), Counter[str]()
    with open(log) as lines:
        for line in lines:
            words = line.split()
            if words[0] == "MARK":
                if words[1] == "end":
                    break
                kernels, gemm, streams = 0, 0, Streams()
                nccl.clear(), copies.clear(), syncs.clear()
            elif words[0] == "KERNEL":
                name = words[3]
                if name.startswith("nccl:"):
                    nccl[name.removeprefix("nccl:")] += 1
                    streams.collective(words[2])
                    continue
                kernels += 1
                if name == "gemm":
                    m, n, k, batch = map(int, words[4:8])
                    gemm += 2 * m * n * k * batch
                    streams.products += words[2] == COMPUTE
            elif words[0] in ("D2H", "H2D"):
                copies[f"{words[0].lower()} {words[2]}"] += 1
            elif words[0] == "STREAMSYNC":
                syncs["compute" if words[1] == COMPUTE else "other"] += 1
            elif words[0] == "RECORD":
                streams.record(words[4], words[2])
            elif words[0] == "WAITEVENT":
                streams.wait(words[2], words[4])
    found = {"kernels": kernels, "nccl": dict(nccl), "gemm_tflop": round(gemm / 1e12, 3), "copies": dict(copies)}
    return {**found, "syncs": dict(syncs), "exposed": streams.exposed}


#: The default stream, in which a step computes.
COMPUTE = "(nil)"


class Streams:
    """Follows the order that streams and events leave open, to tell which collectives can run beside products.

    A collective begins once those products of the compute stream are done that its stream has waited for, and must end
    before the first product that waits for it. It is exposed if there is no product in between.
    """

    def __init__(self) -> None:
        #: Matrix products that were put into the compute stream.
        self.products = 0
        self.exposed = 0
        #: Stream → products it waits for; collectives it waits for. Event → the same.
        self._at: dict[str, tuple[int, frozenset[int]]] = {}
        self._events: dict[str, tuple[int, frozenset[int]]] = {}
        #: Collectives that no product waits for yet → products done before they begin.
        self._open: dict[int, int] = {}
        self._count = 0

    def collective(self, stream: str) -> None:
        self._count += 1
        products, waits = self._state(stream)
        self._open[self._count] = products
        self._at[stream] = products, waits | {self._count}
        if stream == COMPUTE:
            self._close()

    def record(self, stream: str, event: str) -> None:
        self._events[event] = self._state(stream)

    def wait(self, stream: str, event: str) -> None:
        if event in self._events:
            (products, waits), (more, others) = self._state(stream), self._events[event]
            # Of those that are closed nothing is asked any more.
            self._at[stream] = max(products, more), frozenset(one for one in waits | others if one in self._open)
            if stream == COMPUTE:
                self._close()

    def _state(self, stream: str) -> tuple[int, frozenset[int]]:
        products, waits = self._at.get(stream, (0, frozenset()))
        return (self.products if stream == COMPUTE else products), waits

    def _close(self) -> None:
        for number in self._at[COMPUTE][1]:
            self.exposed += self._open.pop(number, -1) == self.products


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
