"""Traces on a cycle, per rank, of the step they say, with nothing lost when the disk does not play
along.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.support.golden_run import GoldenRun
from tests.support.stand_ins import ANY, at_step
from tests.support.words import listening
from titanlite.callbacks import RunEnd
from titanlite.config.run_sections import Profiling
from titanlite.metrics.profiler import Profiler


def test_the_profiled_step_is_recorded_by_every_rank(golden: GoldenRun) -> None:
    folder = golden.folder / "profile_traces"
    assert sorted(p.name for p in folder.iterdir()) == ["iteration_20"]
    for rank in range(2):
        trace = json.loads((folder / "iteration_20" / f"rank{rank}_trace.json").read_text())
        operations = [
            event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"
        ]
        # Each of the 2 blocks has 7 linears, and there is the head: 15 products forward, 30
        # backward.
        # 8 sequences in micro-batches of 2 on 2 ranks: twice.
        assert operations.count("aten::mm") == 2 * 45
        assert operations.count("c10d::allreduce_") == 2 + 1, "the step's two, and the logger's"


def _profile(folder: Path) -> None:
    """Nine steps, of which each negates as many numbers as it has."""
    config = Profiling(
        enable_profiling=True,
        save_traces_folder=str(folder),
        profile_freq=4,
        profiler_warmup=1,
        profiler_active=3,
    )
    profiler = Profiler(config, 0, torch.device("cpu"))
    profiler.on_start(at_step(0))
    for step in range(1, 10):
        torch.ones(step).neg()
        profiler.on_step_end(at_step(step), ANY)
    profiler.on_end(at_step(9), RunEnd("done", 9))


def test_a_trace_holds_the_active_steps_of_a_cycle_and_no_others(tmp_path: Path) -> None:
    _profile(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_4", "iteration_8"]
    trace = json.loads((tmp_path / "iteration_8" / "rank0_trace.json").read_text())
    negations = [event for event in trace["traceEvents"] if event["name"] == "aten::neg"]
    assert [event["args"]["Input Dims"][0] for event in negations] == [[6], [7], [8]]


def test_a_full_disk_costs_the_trace_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("not a folder")
    with listening() as said:
        _profile(tmp_path / "traces")
    assert any(str(tmp_path / "traces") in line for line in said)
