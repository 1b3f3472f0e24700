"""Tasks in a run: their figures are those of `titanlite eval` on any ranks, training does not
notice them, and a broken task ends nothing.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.pool import Pools
from tests.support.whole_runs import losses_of, make_trainer, outcome_of, train_run
from titanlite.parallel.dist_env import DistEnv
from titanlite.tools.cli import main

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: tasks of the harness are NOT tested",
)
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


def evaluated(checkpoint: Path, *entries: Path | str, flags: tuple[str, ...] = ()) -> dict[str, float]:
    """What `titanlite eval` says, under the names of a run."""
    import contextlib
    import io

    names = ",".join(map(str, entries))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        words = ["eval", str(checkpoint), "--tasks", names, "--device=cpu", "--json"]
        assert main([*words, "--batch-size=3", *flags]) == 0
    found = {}
    for task, row in json.loads(said.getvalue())["results"].items():
        for metric, value in row.items():
            if isinstance(value, float) and "stderr" not in metric:
                found[f"eval/{task}/{metric.removesuffix(',none')}"] = value
    return found


def _both(world: DistEnv, folder: str, tasks: list[str], *flags: str) -> dict[str, Any]:
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_figures_are_those_of_the_command_on_any_ranks_and_training_does_not_notice(
    pool: Pools, tmp_path: Path, ranks: int
) -> None:
    files = write_files(tmp_path)
    found = pool(ranks).run(_both, str(tmp_path / "run"), flags_of(*files))[0]
    scores = scores_of(found["rows"])
    assert sorted(scores) == [2, 4]
    assert sorted(scores[4]) == ["eval/held/bits_per_byte", "eval/quiz/acc", "eval/quiz/acc_norm"]
    assert scores[2] != scores[4]
    assert scores[4] == evaluated(tmp_path / "run" / "checkpoint" / "step-4", *files)
    said = [line for line in found["said"] if "bits_per_byte" in line][-1]
    assert said.split() == ["held", "bits_per_byte", f"{scores[4]['eval/held/bits_per_byte']:.4f}"]


LAYOUTS = {
    "tensor": (2, ["--training.tensor_parallel_degree=2"]),
    "tensor, loss in chunks": (
        2,
        ["--training.tensor_parallel_degree=2", "--training.loss_chunks=3"],
    ),
    "context": (2, ["--experimental.context_parallel_degree=2"]),
    "pipeline": (
        2,
        [
            "--experimental.pipeline_parallel_degree=2",
            "--experimental.pipeline_parallel_microbatches=2",
        ],
    ),
    "pipeline of two ranks each": (
        4,
        [
            "--experimental.pipeline_parallel_degree=2",
            "--training.tensor_parallel_degree=2",
            "--experimental.pipeline_parallel_schedule=Interleaved1F1B",
            "--model.overrides.n_layers=4",
            "--training.loss_chunks=2",
        ],
    ),
    "replicas": (4, ["--training.data_parallel_replicate_degree=2"]),
    "experts": (
        2,
        [
            "--job.config_file=debug_deepseek_v3.toml",
            "--parallelism.expert_parallel_degree=2",
        ],
    ),
    "compiled": (2, ["--training.compile", "--compile.backend=aot_eager"]),
    "loss in chunks": (1, ["--training.loss_chunks=3", "--activation_checkpoint.mode=full"]),
    "averaged weights": (2, ["--optimizer.ema_decay=0.5", "--eval.ema"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_figures_are_those_of_the_command_in_every_layout(
    pool: Pools, tmp_path: Path, layout: str
) -> None:
    files = write_files(tmp_path)
    ranks, flags = LAYOUTS[layout]
    found = pool(ranks).run(_both, str(tmp_path / "run"), flags_of(*files), *flags)[0]
    scores = scores_of(found["rows"])
    averaged = ("--ema",) if layout == "averaged weights" else ()
    checkpoint = tmp_path / "run" / "checkpoint" / "step-4"
    expected = evaluated(checkpoint, *files, flags=averaged)
    assert scores[4].keys() == expected.keys()
    for name, value in expected.items():
        exact = name.endswith(("acc", "acc_norm"))
        assert scores[4][name] == (value if exact else pytest.approx(value, rel=1e-6)), name
    if averaged:
        assert scores[4] != evaluated(checkpoint, *files)
    assert not any("compiled" in line and "again" in line for line in found["said"])
