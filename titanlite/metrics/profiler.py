"""Traces of time and of memory, on a cycle, one file per rank."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from titanlite.config.sections.run import Profiling
from titanlite.utils import human_time, logger

#: Allocations kept in a memory snapshot.
_ENTRIES = 100_000


class Profiler:
    """Records while it is entered; call `step` after every training step.

    Time: torch.profiler traces in `iteration_N/rankR_trace.json`, N the last step recorded, for Perfetto or
    chrome://tracing. Memory: CUDA's allocations in `iteration_N/rankR_memory_snapshot.pickle`, for
    pytorch.org/memory_viz, every `profile_freq` steps and when memory runs out (the error goes on).

    config: its two folders are used as they are.
    """

    def __init__(self, config: Profiling, rank: int, device: torch.device) -> None:
        self._config, self._rank = config, rank
        self._step = 0
        cuda = device.type == "cuda"
        self._snapshots = config.enable_memory_snapshot and cuda
        if config.enable_memory_snapshot and not cuda:
            logger.warning("profiling.enable_memory_snapshot records CUDA's allocations: on a CPU there are none")
        self._profiler: torch.profiler.profile | None = None
        if config.enable_profiling:
            activity = torch.profiler.ProfilerActivity
            warmup, active = config.profiler_warmup, config.profiler_active
            self._profiler = torch.profiler.profile(
                activities=[activity.CPU, *([activity.CUDA] if cuda else [])],
                schedule=torch.profiler.schedule(
                    wait=config.profile_freq - warmup - active, warmup=warmup, active=active
                ),
                on_trace_ready=self._write_trace,
                record_shapes=True,
            )

    def __enter__(self) -> Profiler:
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
            # Drop a cycle that was cut short: its trace would lack steps.
            with contextlib.suppress(RuntimeError):
                self._profiler.on_trace_ready = None
                self._profiler.stop()

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""
        return self._snapshots or self._profiler is not None

    def step(self, step: int) -> None:
        """Take note that training step number `step` is done, and write the files that are due."""
        self._step = step
        if self._profiler:
            self._profiler.step()
        if self._snapshots and step % self._config.profile_freq == 0:
            self._write_snapshot("")

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        self._write(
            self._config.save_traces_folder, "", "trace.json", lambda path: profiler.export_chrome_trace(str(path))
        )

    def _write_snapshot(self, suffix: str) -> None:
        def dump(path: Path) -> None:
            with open(path, "wb") as stream:
                pickle.dump(torch.cuda.memory._snapshot(), stream)

        self._write(self._config.save_memory_snapshot_folder, suffix, "memory_snapshot.pickle", dump)

    def _write(self, folder: str, suffix: str, name: str, dump: Callable[[Path], None]) -> None:
        """Write the file of this rank and step. A full disk costs a profile, not the run."""
        path = Path(folder) / f"iteration_{self._step}{suffix}" / f"rank{self._rank}_{name}"
        began = time.perf_counter()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            dump(path)
        except (OSError, RuntimeError) as error:
            logger.warning(f"step {self._step}: {path} could not be written: {error}")
        else:
            logger.info(f"profile of step {self._step} written to {path} in {human_time(time.perf_counter() - began)}")
