"""Run folders of an earlier titanlite are listed, and resumed to the losses of an
undisturbed run.
"""

from __future__ import annotations

import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import train
from titanlite.cli.main import main
from titanlite.runs.attempts import read_entries
from titanlite.runs.read_jsonl import read_metrics

ARCHIVE = Path(__file__).parent / "fixtures" / "runs.tar.xz"
#: How the runs were started.
STEPS = 8
TEXT = "text.jsonl"
FLAGS = f"""
--model.name=llama3 --model.flavor=debugmodel --model.overrides.dim=8 --model.overrides.n_layers=1
--model.overrides.n_heads=2 --model.overrides.multiple_of=8 --model.tokenizer_path=tokenizer.json
--training.dataset_path={TEXT} --training.seq_len=16 --training.batch_size=1
--training.global_batch_size=4 --training.steps={STEPS} --training.warmup_steps=2 --training.seed=0
--training.mixed_precision_param=float32 --training.mixed_precision_reduce=float32
--lr_scheduler.total_steps=10 --checkpoint.enable_checkpoint
--checkpoint.keep_latest_k=1 --checkpoint.interval=3 --data.token_cache=off --metrics.log_freq=1
""".split()
VALIDATION = f"""
--validation.enable --validation.dataset_path={TEXT} --validation.freq=4 --validation.steps=2
--validation.batch_size=1 --validation.seq_len=16
""".split()


#: The ranks of each run, and its own flags.
RUNS = {
    "finished": (1, VALIDATION),
    "killed": (2, ["--training.data_parallel_shard_degree=2"]),
    "stopped": (
        2,
        ["--training.tensor_parallel_degree=2", "--checkpoint.async_mode=async", *VALIDATION],
    ),
}
#: Figures of a row that must not depend on the stop.
NUMBERS = (
    "loss",
    "max_loss",
    "grad_norm",
    "lr",
    "tokens_seen",
    "validation_loss",
    "validation_tokens",
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with tarfile.open(ARCHIVE) as archive:
        # Python 3.11.2, as Debian has it, lacks `filter=`.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    return tmp_path


def _listed(capsys: pytest.CaptureFixture[str], folder: Path) -> Any:
    assert main(["runs", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _train(runs: Path, name: str, *more: str) -> str:
    """Run the command of that run again, from the same folder; its output."""
    ranks, own = RUNS[name]
    command = [*FLAGS, *own, f"--job.dump_folder={name}", *more]
    codes, said = train(command, ranks, runs / "console")
    assert codes == [0] * ranks, said
    return said


def _rows(path: Path, steps: int) -> list[dict[str, float]]:
    """Rows up to a step, with the figures that must not depend on the stop."""
    return [
        {name: row[name] for name in ("step", *NUMBERS) if name in row}
        for row in read_metrics(path)
        if row["step"] <= steps
    ]


def _check_numbers(run: Path, steps: int) -> None:
    found = _rows(run / "metrics.jsonl", steps)
    assert [row["step"] for row in found if "loss" in row] == list(range(1, steps + 1))
    for row, other in zip(found, _rows(run / "undisturbed.jsonl", steps), strict=True):
        assert row == pytest.approx(other, rel=1e-5)


def test_they_are_listed_with_their_states(runs, capsys):
    found = {Path(run["run"]).name: run for run in _listed(capsys, runs)}
    shown = {
        name: [run[key] for key in ("state", "step", "steps", "attempts", "problems")]
        for name, run in found.items()
    }
    assert shown == {
        "finished": ["done", 8, None, 1, []],
        "killed": ["died", 7, None, 2, []],
        "stopped": ["preempted", 5, None, 1, []],
    }
    assert found["stopped"]["reason"].startswith("SIGTERM on every rank")
    assert 0 < found["killed"]["duration"] < 60, "the pause between the attempts does not count"


@pytest.mark.slow
def test_a_finished_run_trains_on_when_it_gets_more_steps(runs):
    said = _train(runs, "finished", "--training.steps=10")
    assert "resumed from step 8" in said
    assert "resume verified at step 8" in said
    # The last step of the former run has validated; the undisturbed one did so there too.
    _check_numbers(runs / "finished", 10)


@pytest.mark.parametrize(
    ("name", "step", "after", "attempt", "lost"),
    [
        ("killed", 6, "killed", 3, {"attempt": 2, "steps": 1, "tokens": 64}),
        pytest.param("stopped", 5, "preempted", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_the_same_command_goes_on_to_the_losses_of_an_undisturbed_run(
    runs, name, step, after, attempt, lost, capsys
):
    # Of another machine or boot: only its age tells that nobody renews it.
    for lock in runs.rglob("run.lock"):
        os.utime(lock, (0, time.time() - 200))
    said = _train(runs, name)
    assert f"resumed from step {step}" in said
    assert f"resume verified at step {step}" in said
    _check_numbers(runs / name, 8)
    assert not list((runs / name).rglob("run.lock"))
    start, end = read_entries(runs / name)[-2:]
    assert (start["attempt"], start["after"], start["step"]) == (attempt, after, step)
    assert {key: n for key, n in start.get("lost", {}).items() if key != "seen"} == lost
    assert (end["state"], end["exit_code"], end["saved_step"]) == ("done", 0, 8)
    (run,) = _listed(capsys, runs / name)
    assert (run["state"], run["step"], run["attempts"]) == ("done", 8, attempt)
