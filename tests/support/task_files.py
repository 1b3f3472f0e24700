"""Files of tasks, runs with them, and their figures."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from tests.support.whole_runs import losses_of, make_trainer, outcome_of, train_run
from titanlite.cli.main import main as command
from titanlite.dist.dist_env import DistEnv
from titanlite.features.tasks.run import TaskRun
from titanlite.trainer import Trainer

TEXTS = ["The first of all", "Some words that go on " * 12, "Naïve – 日本", "a b c"]
SHORT = ["--training.steps=4", "--checkpoint.interval=4", "--no-validation.enable"]


def write_files(folder: Path) -> tuple[Path, Path]:
    """Write a file of questions and one of texts; return both."""
    words = random.Random(0)
    names = ["a cat", "the dog that ran", "no", "of the sea ", "and"]
    quiz = folder / "quiz.jsonl"
    lines = []
    for number in range(13):
        choices = words.sample(names, 2 + number % 3)
        prompt = f"In the {'long ' * (number % 5)}beginning of {number} there was"
        lines.append({"question": prompt, "choices": choices, "answer": number % 2})
    lines[3] = {"context": "", **{key: lines[3][key] for key in ("choices", "answer")}}
    lines[4]["context"] = "It rained. "
    quiz.write_text("".join(json.dumps(line) + "\n" for line in lines))
    held = folder / "held.jsonl"
    held.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return quiz, held


def flags_of(*entries: Path | str, freq: int = 2) -> list[str]:
    names = ", ".join(f"'{entry}'" for entry in entries)
    return [f"--eval.tasks=[{names}]", f"--eval.freq={freq}", "--eval.batch_size=3"]


def scores_of(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """The figures of tasks in metrics.jsonl, by step."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        figures = {name: value for name, value in row.items() if name.startswith("eval/")}
        if figures:
            assert row["step"] not in found, "once for each step"
            found[row["step"]] = figures
    return found


def evaluated(
    checkpoint: Path, *entries: Path | str, flags: tuple[str, ...] = ()
) -> dict[str, float]:
    """What `titanlite eval` says, under the names of a run."""
    names = ",".join(map(str, entries))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        words = ["eval", str(checkpoint), "--tasks", names, "--device=cpu", "--json"]
        assert command([*words, "--batch-size=3", *flags]) == 0
    found = {}
    for task, row in json.loads(said.getvalue())["results"].items():
        for metric, value in row.items():
            if isinstance(value, float) and "stderr" not in metric:
                found[f"eval/{task}/{metric.removesuffix(',none')}"] = value
    return found


def task_run(trainer: Trainer) -> Any:
    """What runs the tasks of a run."""
    (found,) = [one for one in trainer.callbacks.all if isinstance(one, TaskRun)]
    return found


def with_and_without(world: DistEnv, folder: str, tasks: list[str], *flags: str) -> dict[str, Any]:
    """A run without and one with tasks, whose losses and generators are the same."""
    bare = train_run(world, f"{folder}/bare", *SHORT, *flags)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    trainer = make_trainer(world, folder, *SHORT, *flags, *tasks)
    found = outcome_of(trainer, folder)
    assert (found["error"], bare["error"]) == ("", "")
    assert losses_of(bare["rows"]) == losses_of(found["rows"]), "to the last bit"
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert trainer.parts.model.training
    return found


def main() -> NoReturn:
    """Train as `train.py`; rank 1 is killed in the second evaluation."""
    from titanlite import main as entry
    from titanlite.features.tasks.ranks import RankScorer

    score = RankScorer._score
    calls = []

    def kill(self: RankScorer, batches: Any) -> Any:
        calls.append(0)
        # Two tasks have one message each.
        if len(calls) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return score(self, batches)

    RankScorer._score = kill  # type: ignore[method-assign]
    entry.main()
