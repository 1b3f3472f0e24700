"""Counts of one step of any trainer on the null GPU, and what stands for the ranks that do not
exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

#: Steps before the first one that is counted: they compile, allocate, and make communicators.
WARM = 2
GIB = 2**30
#: In the order of the library's `nullgpu_count`.
_NAMES = """MALLOC FREE HOSTALLOC STREAMSYNC DEVSYNC EVENTSYNC D2H H2D D2D
LAUNCH EVENTREC STREAMWAIT
EVENTQUERY MEMSET SYNCMEMCPY BLOCKINGSTREAM"""
NAMES = _NAMES.split()
CUDA: Any = ctypes.CDLL(None)


class Counted(BaseException):
    """Ends a run: all steps are counted."""


class Counting:
    """Counts the calls of step `WARM` + 1, and times the steps after it; `end` raises Counted when
    all are there.

    log: the null GPU's. steps: counted and timed. traffic: one more step counts bytes (see
    `traffic.Traffic`).
    """

    def __init__(self, log: Path, steps: int, traffic: bool = False) -> None:
        self.log = log
        self.steps = steps
        self.traffic = traffic
        self._counted = contextlib.ExitStack()
        self.found: dict[str, Any] = {}
        self._times: list[list[float]] = []

    def begin(self, step: int) -> None:
        import torch

        if step == WARM + 1:
            torch.cuda.reset_peak_memory_stats()
            self._before = read_counts()
            CUDA.nullgpu_mark(b"begin")
        if step > WARM + self.steps:
            from tests.nullgpu.traffic import Traffic

            self._moved = Traffic()
            self._counted.enter_context(self._moved.counting())
        self._began = time.perf_counter(), time.process_time()

    def end(self, step: int) -> None:
        import torch

        if step <= WARM:
            return
        now = time.perf_counter(), time.process_time()
        if step == WARM + 1:
            counts = {
                name.lower(): count - self._before[name] for name, count in read_counts().items()
            }
            CUDA.nullgpu_mark(b"end")
            CUDA.nullgpu_log(0)
            memory = torch.cuda.memory_stats()
            own = torch.cuda.current_device()
            self.found = {"calls": counts, **read_log(self.log)}
            for name in ("allocated", "reserved"):
                self.found[f"peak_{name}_gib"] = round(memory[f"{name}_bytes.all.peak"] / GIB, 3)
            self.found |= {"retries": memory["num_alloc_retries"], "ooms": memory["num_ooms"]}
            devices = range(torch.cuda.device_count())
            self.found["other_contexts"] = [
                n for n in devices if CUDA.nullgpu_touched(n) and n != own
            ]
        elif step > WARM + self.steps:
            self._counted.close()
            self.found |= {"moved_gb": round(self._moved.moved / 1e9, 2)}
            self.found |= {"attention_tflop": round(self._moved.attention / 1e12, 2)}
        else:
            self._times.append([end - begin for begin, end in zip(self._began, now, strict=True)])
        if step == WARM + self.steps + self.traffic:
            columns = zip(*(self._times or [[0.0, 0.0]]), strict=True)
            wall, processor = (round(statistics.median(column), 4) for column in columns)
            self.found |= {"host_seconds": wall, "processor_seconds": processor}
            raise Counted


def read_counts() -> dict[str, int]:
    """Return the calls so far by kind."""
    return dict(zip(NAMES, (ctypes.c_long * len(NAMES)).in_dll(CUDA, "nullgpu_count"), strict=True))


def set_ranks(rank: int, ranks: int, log: Path, device: int | None = None) -> None:
    """Set the launcher's variables for one of so many ranks, 8 on a machine. log: of the null GPU.

    device: other than the rank's place on its machine, so that a context on GPU 0 shows.

    Call it before anything uses CUDA.
    """
    log.unlink(missing_ok=True)
    here = min(ranks, 8)
    local = rank % 8 if device is None else device
    launch = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here}
    # One root of NCCL's start for all ranks: beyond 128 torch asks others, which do not exist.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCH_NCCL_RANKS_PER_ROOT": ranks}
    os.environ.update(
        {name: str(value) for name, value in {**launch, **address, "NULLGPU_COUNT": here}.items()}
    )
    os.environ["NULLGPU_LOG"] = str(log)


@contextlib.contextmanager
def nobody_else() -> Iterator[None]:
    """Replace gloo by torch's `fake` backend, and let objects of other ranks be like this one's.

    NCCL is a stand-in.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint import default_planner
    from torch.distributed.pipelining import stage as pipeline
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    init, group = dist.init_process_group, dist.new_group

    def init_fake(backend: str, **more: Any) -> None:
        alone = {"store": dist.HashStore(), "rank": rank, "world_size": ranks}
        init(backend.replace("gloo", "fake"), **{**more, **alone})

    def group_fake(*args: Any, backend: str | None = None, **more: Any) -> Any:
        return group(*args, backend=backend and backend.replace("gloo", "fake"), **more)

    def gather_all(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        gather_all(object_gather_list or [], obj)

    def scatter(
        scatter_object_output_list: list[Any], scatter_object_input_list: Any = None, **_: Any
    ) -> None:
        scatter_object_output_list[0] = scatter_object_input_list[rank]

    def receive(stage: Any, source: int) -> Any:
        # Hidden states have one shape between all stages, and gradients have theirs.
        own = stage._stage_meta
        return (
            pipeline._StageBackwardMeta(own.outputs)
            if source > stage.stage_index
            else pipeline._StageForwardMeta(own.inputs)
        )

    replaced = {
        "init_process_group": init_fake,
        "new_group": group_fake,
        "all_gather_object": gather_all,
        "gather_object": gather,
        "scatter_object_list": scatter,
        "broadcast_object_list": lambda *_, **__: None,
    }
    # The other ranks' parts of a checkpoint are missing.
    with (
        mock.patch.multiple(dist, **replaced),
        mock.patch.object(default_planner, "_validate_global_plan", lambda *_: []),
        # torch 2.11 has other names, so that no pipeline is played there.
        mock.patch.object(pipeline.PipelineStage, "_recv_meta", receive, create=True),
        mock.patch.object(pipeline.PipelineStage, "_send_meta", lambda *_: None, create=True),
    ):
        yield


def read_log(log: Path) -> dict[str, Any]:
    """Return counts of the log's part between its marks.

    kernels; nccl: collectives by kind; gemm_tflop: of all matrix products; copies, by kind of host
    memory and thread; syncs: waits of the host by stream; exposed: collectives beside which no
    matrix product can run (see `Streams`); shapes: "m n k type" → products; sent: "ranks bytes" →
    collectives and those exposed, bytes that each rank receives.
    """
    kernels = 0
    gemm = 0
    streams = Streams()
    nccl = Counter[str]()
    copies = Counter[str]()
    syncs = Counter[str]()
    shapes = Counter[str]()
    with open(log) as lines:
        for line in lines:
            words = line.split()
            if words[0] == "MARK":
                if words[1] == "end":
                    break
                kernels = 0
                gemm = 0
                streams = Streams()
                nccl.clear(), copies.clear(), syncs.clear(), shapes.clear()
            elif words[0] == "KERNEL":
                name = words[3]
                if name.startswith("nccl:"):
                    nccl[name.removeprefix("nccl:")] += 1
                    ranks, count, dtype = (int(word.lstrip("cdnout")) for word in words[5:8])
                    # A rank receives a part from each of the others, or one; a sum is scattered and
                    # gathered.
                    one = 1 / max(ranks - 1, 1)
                    parts = {"AllReduce": 2 / ranks, "Send": 0, "Recv": one, "Broadcast": one}.get(
                        name[5:], 1
                    )
                    size = round(parts * (ranks - 1) * count * _BYTES[dtype])
                    streams.collective(words[2], f"{ranks} {size}")
                    continue
                kernels += 1
                if name == "gemm":
                    m, n, k, batch = map(int, words[4:8])
                    gemm += 2 * m * n * k * batch
                    shapes[f"{m} {n} {k} {words[8]}"] += batch
                    streams.products += words[2] == COMPUTE
            elif words[0] in ("D2H", "H2D"):
                copies[
                    f"{words[0].lower()} {words[2]}{'' if words[-1] == '1' else ' in a thread'}"
                ] += 1
            elif words[0] == "STREAMSYNC":
                syncs["compute" if words[1] == COMPUTE else "other"] += 1
            elif words[0] == "RECORD":
                streams.record(words[4], words[2])
            elif words[0] == "WAITEVENT":
                streams.wait(words[2], words[4])
    found = {
        "kernels": kernels,
        "nccl": dict(nccl),
        "gemm_tflop": round(gemm / 1e12, 3),
        "copies": dict(copies),
    }
    sent = {kind: [count, streams.bare[kind]] for kind, count in streams.sent.items()}
    return {
        **found,
        "syncs": dict(syncs),
        "exposed": streams.exposed,
        "shapes": dict(shapes),
        "sent": sent,
    }


#: Of NCCL's types, in their order.
_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
#: The default stream, in which a step computes.
COMPUTE = "(nil)"


class Streams:
    """Follows the order that streams and events leave open, to tell which collectives can run
    beside products.

    A collective begins once those products of the compute stream are done that its stream has
    waited for, and must end before the first product that waits for it. It is exposed if there is
    no product in between.
    """

    def __init__(self) -> None:
        #: Matrix products that were put into the compute stream.
        self.products = 0
        self.exposed = 0
        #: Stream → products it waits for; collectives it waits for. Event → the same.
        self._at: dict[str, tuple[int, frozenset[int]]] = {}
        self._events: dict[str, tuple[int, frozenset[int]]] = {}
        #: Kinds of collectives: all, and the exposed ones.
        self.sent = Counter[str]()
        self.bare = Counter[str]()
        #: Collectives that no product waits for yet → products done before they begin, and kind.
        self._open: dict[int, tuple[int, str]] = {}
        self._count = 0

    def collective(self, stream: str, kind: str = "") -> None:
        self._count += 1
        self.sent[kind] += 1
        products, waits = self._state(stream)
        self._open[self._count] = products, kind
        self._at[stream] = products, waits | {self._count}
        if stream == COMPUTE:
            self._close()

    def record(self, stream: str, event: str) -> None:
        self._events[event] = self._state(stream)

    def wait(self, stream: str, event: str) -> None:
        if event in self._events:
            (products, waits), (more, others) = self._state(stream), self._events[event]
            # Nothing is asked any more about those that are closed.
            self._at[stream] = (
                max(products, more),
                frozenset(one for one in waits | others if one in self._open),
            )
            if stream == COMPUTE:
                self._close()

    def _state(self, stream: str) -> tuple[int, frozenset[int]]:
        products, waits = self._at.get(stream, (0, frozenset()))
        return (self.products if stream == COMPUTE else products), waits

    def _close(self) -> None:
        for number in self._at[COMPUTE][1]:
            products, kind = self._open.pop(number, (-1, ""))
            self.exposed += products == self.products
            self.bare[kind] += products == self.products
