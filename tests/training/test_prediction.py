"""The prediction for a run is recorded at its start, and a run that leaves it warns."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.support.run_folders import strict_lines
from tests.support.run_of import run_from
from tests.support.tiny import EIGHT_STEPS
from tests.support.whole_runs import make_trainer, outcome_of
from tests.support.words import listening
from titanlite.assembly import prediction_callback
from titanlite.assembly.prediction_callback import KeptPrediction
from titanlite.callbacks import Callback
from titanlite.cli.main import main
from titanlite.metrics import throughput
from titanlite.runs.attempts import read_attempts
from titanlite.runs.prediction import compare, keep, read
from titanlite.runs.record import AttemptRecord
from titanlite.trainer import Trainer

FLAGS = [*EIGHT_STEPS, "--validation.steps=1", "--validation.seq_len=16", "--validation.freq=20"]
#: A step of 64 tokens takes 0.01 s by the clock of these runs; that is the plan's middle.
RATE = 6400.0


class Clock(Callback):
    """Stands in for the module `time`: steps take 10 ms, those from `slow` on 20 ms."""

    def __init__(self, slow: int) -> None:
        self.slow = slow
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter

    def on_phase(self, trainer: Trainer, phase: str) -> None:
        if phase == "optimizer":
            self.now += 0.02 if trainer.step >= self.slow else 0.01


def _timed(world, folder, steps, slow):
    clock = Clock(slow)
    with patch.object(throughput, "time", clock):
        trainer = make_trainer(world, folder, *FLAGS, f"--training.steps={steps}")
        # Before the callback of the figures.
        trainer.callbacks._at["on_phase"].insert(0, clock)
        return outcome_of(trainer, folder)


def kept(capsys, folder, ranks, steps):
    """Keep the plan of a run, with a rate that its clock meets; return what `plan --json` has."""
    words = ["debug_model.toml", *FLAGS, f"--training.steps={steps}", "--gpu", "h100-80g"]
    words += ["--gpus", str(ranks), f"--job.dump_folder={folder}", "--keep", "--json"]
    assert main(["plan", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert read(folder) == {"plan": plan}
    rate = RATE / ranks
    plan |= {"tokens_per_second": rate, "tokens_per_second_range": [0.85 * rate, 1.2 * rate]}
    keep(folder, plan=plan)
    return plan


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_leaves_its_prediction_tells_it_once_after_exactly_fifty_steps(
    pool, tmp_path, capsys, ranks
):
    plan = kept(capsys, tmp_path, ranks, 140)
    points = ((1, 20.0), (79, 20.0), (80, 0.2), (140, 0.2))
    curve = [{"step": step, "loss": 0.1, "low": 0.0, "high": high} for step, high in points]
    keep(tmp_path, loss={"curve": curve})
    found = pool(ranks).run(_timed, str(tmp_path), 140, 41)[0]
    slow, loss = found["events"]
    assert (slow["step"], slow["kind"], slow["figure"]) == (90, "prediction", "tps")
    assert slow["measured"] == pytest.approx(RATE / ranks / 2)
    assert slow["low"] == 0.85 * RATE / ranks
    assert (loss["step"], loss["figure"]) == (130, "validation_loss"), "validated after step 80"
    assert loss["high"] == 0.2 < loss["measured"]
    said = [line for line in found["said"] if "outside of the prediction" in line]
    assert said == [slow["message"], loss["message"]]
    assert "plan: 100%" in next(line for line in found["said"] if line.startswith("step: 40"))
    assert "plan: 50%" in next(line for line in found["said"] if line.startswith("step: 41"))
    assert main(["runs", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["predicted"] == {"plan": plan, "loss": {"curve": curve}}
    assert run["compared"]["tps"] == {
        "measured": run["tokens_per_second_per_device"],
        "predicted": plan["tokens_per_second"],
        "low": plan["tokens_per_second_range"][0],
        "high": plan["tokens_per_second_range"][1],
    }
    assert main(["runs", str(tmp_path)]) == 0
    rate = RATE / ranks
    line = f"{rate / 2:,.0f} tokens/s per device, predicted {rate:,.0f} ("
    assert line in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_as_predicted_raises_no_alarm(pool, tmp_path, capsys):
    kept(capsys, tmp_path, 1, 300)
    curve = [{"step": step, "loss": 5.0, "low": 0.0, "high": 20.0} for step in (1, 300)]
    keep(tmp_path, loss={"steps": 300, "curve": curve})
    (found,) = pool(1).run(_timed, str(tmp_path), 300, 301)
    assert found["events"] == [] and found["step"] == 300
    (attempt,) = read_attempts(tmp_path)
    assert attempt["predicted"].keys() == {"plan", "loss"} and attempt["state"] == "done"


PLAN = {
    "tokens_per_second": 100.0,
    "tokens_per_second_range": [80.0, 120.0],
    "step_seconds": 2.0,
    "peak_gib": 10.0,
    "needed_gib": 12.0,
}


@pytest.fixture
def watch(tmp_path):
    """The callback that compares the figures of a run in this folder with its plan."""
    run = SimpleNamespace(job=SimpleNamespace(dump_folder=str(tmp_path)))
    watch = KeptPrediction(SimpleNamespace(run=run), None, None)
    watch._found = {"plan": PLAN}
    return watch


def test_each_episode_is_told_once_and_a_window_counts_all_its_steps(watch, tmp_path):
    good, bad = 11.9, 12.1
    outside = [*range(20, 80, 10), *range(90, 190, 10), 200, *range(220, 290, 10)]
    for step in range(10, 300, 10):
        memory = bad if step in outside else good
        figures = {"tps": 130.0, "memory_gib": memory, "reserved_gib": 13.0}
        watch.on_log(SimpleNamespace(step=step, validated=None), figures)
    rows = strict_lines(tmp_path / "guard.jsonl")
    assert [row["step"] for row in rows] == [60, 130, 260]
    assert {(row["figure"], row["measured"]) for row in rows} == {("memory_gib", bad)}


def test_steps_after_a_rollback_count_from_its_checkpoint(watch, tmp_path):
    watch.on_log(SimpleNamespace(step=40, validated=None), {"tps": 100.0})
    watch.on_rollback(SimpleNamespace(step=0))
    for step in (20, 49, 50, 60):
        watch.on_log(SimpleNamespace(step=step, validated=None), {"tps": 79.0})
    (row,) = strict_lines(tmp_path / "guard.jsonl")
    assert row["step"] == 50


@pytest.mark.parametrize("total", [139.7, 40.0])
def test_on_a_gpu_the_start_makes_the_plan_that_the_command_makes(tmp_path, capsys, total):
    file, folder = "llama3_8b.toml", f"--job.dump_folder={tmp_path}"
    assert main(["plan", file, folder, "--gpus", "8", "--gpu", "h200-141g", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    keep(tmp_path, plan={**plan, "world_size": 4})
    run = run_from(file, 8, folder)
    parts = SimpleNamespace(
        run=run,
        world=SimpleNamespace(device=torch.device("cuda")),
        datasets=SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=128256)),
    )
    metrics = SimpleNamespace()
    record = AttemptRecord(tmp_path, 1, 0, 0, False)
    watch = KeptPrediction(parts, SimpleNamespace(record=record), metrics)
    with (
        patch.multiple(
            prediction_callback,
            device_name=lambda _: "NVIDIA H200",
            read_launch_env=lambda: SimpleNamespace(local_world_size=8),
            total_memory_bytes=lambda _: total * 2**30,
        ),
        listening() as said,
        listening(logging.WARNING) as warned,
    ):
        watch.on_start(SimpleNamespace(step=0, steps=run.steps))
    assert read(tmp_path) == {"plan": plan}
    assert metrics.planned_tps == plan["tokens_per_second"]
    told = f"memory planned: {plan['peak_gib']:.1f} GiB of tensors, {plan['needed_gib']:.1f} with "
    told += f"overhead, of {total:.1f} per GPU"
    assert plan["needed_gib"] > 40
    assert any(line.startswith(told) for line in said)
    assert any(line.startswith(told) for line in warned) == (total == 40)


def test_figures_are_compared_by_hand():
    curve = [
        {"step": 100, "loss": 5.0, "low": 4.0, "high": 6.0},
        {"step": 200, "loss": 4.0, "low": 3.5, "high": 4.5},
    ]
    found = {"plan": PLAN, "loss": {"curve": curve}}
    figures = {"tps": 50.0, "seconds_per_step": 4.0, "hours_left": 3.0, "validation_loss": 4.9}
    assert compare(found, figures, 125) == {
        "tps": (50.0, 100.0, 80.0, 120.0),
        "hours_left": (3.0, 1.5, 1.25, 1.875),
        "validation_loss": (4.9, 4.75, 3.875, 5.625),
    }
    assert "memory_gib" not in compare(found, {"memory_gib": 1.0}, 0)
    assert compare(found, figures, 99).keys() == compare(found, figures, 201).keys()
    assert "validation_loss" not in compare(found, figures, 201)


def test_a_damaged_prediction_counts_as_none(tmp_path):
    for content in ("{", "[]", '{"plan": {"tokens_per_second": 0}}', '{"loss": {"curve": [1]}}'):
        (tmp_path / "prediction.json").write_text(content)
        assert read(tmp_path) == {}
    keep(tmp_path, loss={"curve": []})
    assert compare(read(tmp_path), {"validation_loss": 3.0}, 0) == {}
