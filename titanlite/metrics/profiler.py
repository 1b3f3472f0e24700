"""Traces of time and of memory, on a cycle, one file per rank."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from titanlite.config.plans import ProfilePlan
from titanlite.utils import human_time, logger

#: Allocations kept in a memory snapshot.
_ENTRIES = 100_000


class Profiles:
    """Records what `plan` asks for while it is entered; call `step` after every training step.

    Time: torch.profiler traces in `iteration_N/rankR_trace.json`, N the last step recorded, for Perfetto or
    chrome://tracing. Memory: CUDA's allocations in `iteration_N/rankR_memory_snapshot.pickle`, for
    pytorch.org/memory_viz, every `freq` steps and when memory runs out (the error goes on).
    """

    def __init__(self, plan: ProfilePlan, rank: int, device: torch.device) -> None:
        self._plan, self._rank = plan, rank
        self._step = 0
        self._snapshots = plan.snapshot_folder is not None and device.type == "cuda"
        if plan.snapshot_folder is not None and not self._snapshots:
            logger.warning("profiling.enable_memory_snapshot records CUDA's allocations: on a CPU there are none")
        self._profiler: torch.profiler.profile | None = None
        if plan.trace_folder is not None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(
                activities=activities,
                schedule=torch.profiler.schedule(
                    wait=plan.freq - plan.warmup - plan.active, warmup=plan.warmup, active=plan.active
                ),
                on_trace_ready=self._write_trace,
                record_shapes=True,
            )

    def __enter__(self) -> Profiles:
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
        if self._profiler:
            self._profiler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._snapshots:
            if isinstance(error, torch.OutOfMemoryError):
                self._write_snapshot("_out_of_memory")
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._profiler:
            # A cycle that was cut short is dropped: its trace would lack steps.
            with contextlib.suppress(RuntimeError):
                self._profiler.on_trace_ready = None
                self._profiler.stop()

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""
        return self._snapshots or self._profiler is not None

    def step(self, step: int) -> None:
        """Training step number `step` is done."""
        self._step = step
        if self._profiler:
            self._profiler.step()
        if self._snapshots and step % self._plan.freq == 0:
            self._write_snapshot("")

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        assert self._plan.trace_folder is not None
        self._write(self._plan.trace_folder, "", "trace.json", lambda path: profiler.export_chrome_trace(str(path)))

    def _write_snapshot(self, suffix: str) -> None:
        assert self._plan.snapshot_folder is not None
        self._write(self._plan.snapshot_folder, suffix, "memory_snapshot.pickle", _dump_snapshot)

    def _write(self, folder: str, suffix: str, name: str, dump: Callable[[Path], None]) -> None:
        """Write the file of this rank and step. A disk that is full costs a profile, not the run."""
        path = Path(folder) / f"iteration_{self._step}{suffix}" / f"rank{self._rank}_{name}"
        began = time.perf_counter()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            dump(path)
        except (OSError, RuntimeError) as error:
            logger.warning(f"step {self._step}: {path} could not be written: {error}")
        else:
            logger.info(f"profile of step {self._step} written to {path} in {human_time(time.perf_counter() - began)}")


def _dump_snapshot(path: Path) -> None:
    with open(path, "wb") as stream:
        pickle.dump(torch.cuda.memory._snapshot(), stream)
