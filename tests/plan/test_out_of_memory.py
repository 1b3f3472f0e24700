"""The report of a run out of memory."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed import HashStore

from tests.support.run_of import run_from
from titanlite.assembly.error_exit import first_here
from titanlite.callbacks import CallbackError
from titanlite.data import DataError
from titanlite.exit_codes import CONFIG, LOST_PEER, OUT_OF_MEMORY, VARIABLE, code_of, report_code
from titanlite.metrics.watchdog import PeerError
from titanlite.parallel.compile import CompileError
from titanlite.plan.out_of_memory import memory_report

#: As torch words it, with 6.3 GiB that the allocator holds and cannot use.
ON_GPU = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.25 GiB is free. Of the allocated memory 70.10 GiB is allocated by PyTorch, and 6.30 "
    "GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting ..."
)


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def too_large() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


def test_memory_has_an_exit_code_of_its_own_wherever_it_was_missing():
    from torch._dynamo.exc import BackendCompilerFailed

    libraries = [
        RuntimeError(f"CUDA error: CU{name}_STATUS_ALLOC_FAILED when calling")
        for name in ("BLAS", "DNN")
    ]
    for error in (ON_GPU, too_large(), MemoryError(), *libraries):
        assert code_of(error) == OUT_OF_MEMORY
        assert code_of(caused(CallbackError("callback mine:Own failed"), error)) == OUT_OF_MEMORY
        compiler = BackendCompilerFailed("inductor", error, None)  # type: ignore[arg-type]
        assert code_of(caused(CompileError("layers.0"), compiler)) == OUT_OF_MEMORY
    nccl = torch.distributed.DistBackendError(
        "ncclUnhandledCudaError: Cuda failure 2 'out of memory'"
    )
    assert code_of(nccl) == OUT_OF_MEMORY, "no other rank is to blame"
    assert code_of(PeerError(f"rank 1 raised: {too_large()}")) == LOST_PEER
    assert code_of(CompileError("layers.0: cannot trace")) == CONFIG
    read = caused(DataError("a.jsonl cannot be read"), MemoryError())
    assert code_of(read) == read.exit_code, "it says more"  # type: ignore[attr-defined]


def test_one_worker_of_a_machine_is_the_first_with_its_code(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "codes"))
    assert [report_code(code) for code in (LOST_PEER, OUT_OF_MEMORY, OUT_OF_MEMORY)] == [
        True,
        True,
        False,
    ]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert report_code(OUT_OF_MEMORY)
    assert (tmp_path / "codes").read_text() == "0 7\n0 8\n0 8\n1 8\n"
    monkeypatch.delenv(VARIABLE)
    assert report_code(OUT_OF_MEMORY) and report_code(OUT_OF_MEMORY), "nobody knows"


def test_the_report_needs_neither_a_gpu_nor_a_plan():
    run = run_from("debug_model.toml", 1, "--model.vocab_size=2048")
    pinned = memory_report(run, RuntimeError("CUDA error: out of memory"), "start", 0, "cuda")
    assert pinned.startswith("out of memory of the GPU or pinned host memory, before")
    on_host = memory_report(run, too_large(), "start", 0, "cpu")
    assert re.search(
        r"^out of memory of the host, before the first step: .*DefaultCPUAllocator", on_host
    )
    validating = memory_report(run, ON_GPU, "validate of step 2", 0, "cuda")
    assert "not of the phase validate: validation.batch_size and eval.batch_size" in validating
    without = memory_report(run_from("hf_debug.toml", 1), ON_GPU, "start", 0, "cuda")
    assert "Tried to allocate 2.00 GiB" in without
    assert "There is no plan" in without


def test_one_rank_of_a_machine_prints_the_report_where_no_launcher_decides():
    store = HashStore()
    assert [first_here(store), first_here(store), first_here(None)] == [True, False, True]
