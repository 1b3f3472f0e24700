"""The plan in a run: its row, the check of its peak, and what a run out of memory says."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.pool import Pools
from tests.words import listening
from titanlite.callbacks import CallbackError, Callbacks
from titanlite.derive import RunConfig
from titanlite.exit_codes import CONFIG, LOST_PEER, OUT_OF_MEMORY, code_of
from titanlite.fit import check_config
from titanlite.metrics.watchdog import PeerError
from titanlite.parallel.compile import CompileError
from titanlite.parallel.dist_env import DistEnv
from titanlite.plan import runtime
from titanlite.plan.memory import estimate
from titanlite.plan.parts import GIB
from titanlite.plan.runtime import PeakCheck, memory_report, remedies, start_rows

#: As torch words it, with 6.3 GiB that the allocator holds and cannot use.
ON_GPU = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB is "
    "free. Of the allocated memory 70.10 GiB is allocated by PyTorch, and 6.30 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting ..."
)


def planned(config: str, ranks: int, *flags: str) -> RunConfig:
    return check_config([f"--job.config_file={config}", *flags], ranks, training=False)[1]


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def too_large() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


def test_memory_has_an_exit_code_of_its_own_wherever_it_was_missing() -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    for error in (ON_GPU, too_large(), MemoryError()):
        assert code_of(error) == OUT_OF_MEMORY
        assert code_of(caused(CallbackError("callback mine:Own failed"), error)) == OUT_OF_MEMORY
        compiler = BackendCompilerFailed("inductor", error, None)  # type: ignore[arg-type]
        assert code_of(caused(CompileError("layers.0"), compiler)) == OUT_OF_MEMORY
    nccl = torch.distributed.DistBackendError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'")
    assert code_of(nccl) == OUT_OF_MEMORY, "no other rank is to blame"
    assert code_of(PeerError(f"rank 1 raised: {too_large()}")) == LOST_PEER
    assert code_of(CompileError("layers.0: cannot trace")) == CONFIG


def test_the_row_of_the_start_report_is_quick_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned("llama3_8b.toml", 8)
    began = time.process_time()
    ((name, text),) = start_rows(run, "cuda", int(79.1 * GIB))
    assert time.process_time() - began < 0.2, "some 30 ms on a quiet machine"
    peak = estimate(run).peak
    assert name == "memory" and text.startswith(f"planned {peak.total / GIB:.1f} of 79.1 GiB per GPU, in ")
    assert text.endswith(f"in {peak.phase} of {peak.module}")
    assert [name for name, _ in start_rows(run, "cuda", peak.total - 1)] == ["memory", "warning"]
    ((_, on_cpu),) = start_rows(run, "cpu", 2 * GIB)
    assert re.match(r"planned [\d.]+ GiB of host memory per rank, in ", on_cpu)
    assert start_rows(planned("hf_debug.toml", 1), "cuda", GIB) == [], "it has no formulas"
    monkeypatch.setattr(runtime, "estimate", lambda *_: {}["gone"])
    assert start_rows(run, "cuda", GIB) == [("note", "the memory of this run is not planned: KeyError: 'gone'")]


CHANGED = [
    ("llama3_8b.toml", 8, ["--training.loss_chunks=1"]),
    ("llama3_1_70b.toml", 64, ["--activation_checkpoint.mode=none"]),
    ("llama2_7b.toml", 16, ["--training.data_parallel_replicate_degree=4", "--training.data_parallel_shard_degree=4"]),
    (
        "debug_model.toml",
        2,
        ["--training.batch_size=8", "--training.data_parallel_type=ddp", "--model.vocab_size=2048"],
    ),
]


@pytest.mark.parametrize(("config", "ranks", "flags"), CHANGED)
def test_each_remedy_saves_what_it_says_when_a_config_sets_its_keys(config: str, ranks: int, flags: list[str]) -> None:
    run = planned(config, ranks, *flags)
    found = remedies(run)
    assert len(found) >= 3 and [one.slower for one in found] == sorted(one.slower for one in found)
    for one in found:
        with_keys = [f"--{key}={value}" for key, value in one.changes.items()]
        less = planned(config, one.ranks or ranks, *flags, *with_keys)
        assert one.ranks or less.batch.global_batch_size == run.batch.global_batch_size
        assert estimate(run).peak.total - estimate(less).peak.total == one.saves > 0, one


def test_the_report_has_the_plan_the_figures_and_three_remedies() -> None:
    run = planned("llama3_8b.toml", 8)
    error = caused(CallbackError("callback a:B failed"), ON_GPU)
    lines = memory_report(run, error, "log of step 3", 5, "cuda").splitlines()
    assert lines[0] == "out of memory of the GPU, in log of step 3: callback a:B failed"
    assert lines[1].startswith("caused by OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    peak = estimate(run, 5).peak
    assert lines[2].startswith(f"planned for rank 5, {peak.phase} of {peak.module}") and "allocator" in lines[2]
    table = "\n".join(lines[3:])
    for part, size in peak.parts.items():
        assert not size or re.search(rf"^{part} +[\d.]+ .?.?B", table, re.M)
    assert re.search(r"allocated +70.1 GiB$", table, re.M) and re.search(r"reserved +76.4 GiB$", table, re.M)
    assert re.search(r"request +2.0 GiB$", table, re.M)
    for one in remedies(run, 5)[:3]:
        assert re.search(rf"^  {re.escape(str(one))} +saves [\d.]+ GiB, about {one.slower:.0%} slower$", table, re.M)
    assert lines[-1].startswith("6.3 GiB are reserved and not allocated") and "expandable_segments:True" in lines[-1]


def test_the_report_needs_neither_a_gpu_nor_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned("debug_model.toml", 1, "--model.vocab_size=2048")
    on_host = memory_report(run, too_large(), "start", 0, "cpu")
    assert re.search(r"^out of memory of the host, before the first step: .*DefaultCPUAllocator", on_host)
    assert re.search(r"process\n", on_host) and re.search(r"resident, peak +[\d.]+ .iB\n", on_host)
    assert re.search(r"request +1048576.0 TiB\n", on_host) and "expandable" not in on_host
    validating = memory_report(run, ON_GPU, "validate of step 2", 0, "cuda")
    assert "leaves out the phase validate: lower validation.batch_size (now 8)" in validating
    beside_a_gpu = memory_report(run, MemoryError(), "save of step 2", 0, "cuda")
    assert beside_a_gpu.startswith("out of memory of the host, in save of step 2")
    assert "checkpoint.async_mode" in beside_a_gpu
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    without = memory_report(planned("hf_debug.toml", 1), ON_GPU, "start", 0, "cuda")
    assert "request 2.0 GiB" in without and "There is no plan" in without and "are reserved and not" not in without


def check_peaks(world: DistEnv, shares: list[float], phases: list[str]) -> list[str]:
    """What a check logs on this rank, where ranks measure so much of their plan. phases: between step 1 and 2."""
    run = planned("debug_model.toml", world.size, "--model.vocab_size=2048", "--job.dump_folder=out")
    reads: list[int] = []

    def read() -> int:
        reads.append(1)
        return round(shares[world.rank] * estimate(run, world.rank).peak.total)

    check = PeakCheck(run, read)
    calls = Callbacks([check])
    with listening() as said:
        for step in range(1, 5):
            trainer: Any = SimpleNamespace(step=step, parts=SimpleNamespace(world=world))
            for phase in ["forward", *(phases if step == 2 else [])]:
                calls("on_phase", trainer, phase)
            calls("on_step_end", trainer, None)
            if step != 2:  # a log follows, which begins a new peak
                calls("on_log", trainer, {})
    assert len(reads) == 1
    return said


def test_the_measured_peak_is_compared_once_and_reported_where_far_apart(pool: Pools) -> None:
    for said in pool(2).run(check_peaks, [0.9, 1.1], ["optimizer"]):
        assert len(said) == 1 and re.search(
            r"memory of step 2: measured .* GiB .* planned .* GiB \([-+]10.0%\)$", said[0]
        )
    first, other = pool(2).run(check_peaks, [1.0, 1.2], [])
    assert "on rank 1, planned" in first[0] and "(+20.0%): more than 15% apart" in first[0]
    assert "Please report it, with this line and with config.toml and logs/rank_1.log of out" in first[0]
    assert other[0].endswith("(+20.0%)"), "the console shows a warning once"
    (said, _) = pool(2).run(check_peaks, [1.0, 1.0], ["validate"])
    assert "memory of step 4" in said[0], "the peak since the log of step 1 has a validation's"
