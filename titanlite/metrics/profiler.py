"""Traces of time and of memory, on a cycle, one file per rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from titanlite.callbacks import Callback, RunEnd
from titanlite.config.run_sections import Profiling
from titanlite.utils import human_time, logger

if TYPE_CHECKING:
    from titanlite.step import StepResult
    from titanlite.trainer import Trainer

#: Allocations kept in a memory snapshot.
_ENTRIES = 100_000


class Profiler(Callback):
    """Records what section `[profiling]` asks for.

    Time: torch.profiler traces in `iteration_N/rankR_trace.json` for Perfetto, N the last step
    recorded. Memory: CUDA's allocations in `iteration_N/rankR_memory_snapshot.pickle`, for
    pytorch.org/memory_viz, at the end of each cycle and when memory runs out.
    """

    def __init__(self, config: Profiling, rank: int, device: torch.device) -> None:
        self._config, self._rank = config, rank
        self._step = 0
        self._snapshots = config.enable_memory_snapshot and device.type == "cuda"
        if config.enable_memory_snapshot and not self._snapshots:
            logger.warning(
                "profiling.enable_memory_snapshot records CUDA's allocations: on a CPU there are "
                "none"
            )
        self._profiler: torch.profiler.profile | None = None
        if config.enable_profiling:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            warmup, active = config.profiler_warmup, config.profiler_active
            self._profiler = torch.profiler.profile(
                activities=activities,
                schedule=torch.profiler.schedule(
                    wait=config.profile_freq - warmup - active, warmup=warmup, active=active
                ),
                on_trace_ready=self._write_trace,
                record_shapes=True,
            )

    def on_start(self, trainer: Trainer) -> None:
        if self._snapshots:
            # C++ stacks double the cost of an allocation and the size of the file.
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_ENTRIES)
        if self._profiler:
            self._profiler.start()

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        trainer.phase("profile")  # writing a trace takes a while
        self._step = trainer.step
        if self._profiler:
            self._profiler.step()
        if self._snapshots and self._step % self._config.profile_freq == 0:
            self._write_snapshot("")

    def on_end(self, trainer: Trainer, end: RunEnd) -> None:
        """A cycle that was cut short leaves no trace: steps would be missing."""
        if self._snapshots:
            if isinstance(end.error, torch.OutOfMemoryError):
                self._write_snapshot("_out_of_memory")
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._profiler:
            with contextlib.suppress(RuntimeError):
                self._profiler.on_trace_ready = None
                self._profiler.stop()

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        self._write(self._config.save_traces_folder, "", "trace.json", profiler.export_chrome_trace)

    def _write_snapshot(self, suffix: str) -> None:
        dump = torch.cuda.memory._dump_snapshot
        self._write(
            self._config.save_memory_snapshot_folder, suffix, "memory_snapshot.pickle", dump
        )

    def _write(self, folder: str, suffix: str, name: str, dump: Callable[[str], None]) -> None:
        """A full disk costs a profile, not the run."""
        path = Path(folder) / f"iteration_{self._step}{suffix}" / f"rank{self._rank}_{name}"
        began = time.perf_counter()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(
                missing_ok=True
            )  # of the same step before a resume: it would pass for the new one
            dump(str(path))
            if not path.is_file():  # torch only prints that it could not write one
                raise OSError("torch wrote no file; its reason stands above")
        except (OSError, RuntimeError) as error:
            logger.warning(f"step {self._step}: {path} could not be written: {error}")
        else:
            logger.info(
                f"profile of step {self._step} written to {path} in "
                f"{human_time(time.perf_counter() - began)}"
            )
