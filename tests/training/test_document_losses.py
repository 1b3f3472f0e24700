"""A spike's document: a poisoned record among three sources is named first, on every layout."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from tests.support.whole_runs import make_trainer, outcome_of, train_run
from titanlite.cli.main import main
from titanlite.dist.dist_env import DistEnv
from titanlite.metrics import document_losses
from titanlite.metrics.bad_step_log import AnomalyLog
from titanlite.optim.bad_step_errors import BadStepError

#: Record of the source "blue" that is poisoned, from 0, and of how many.
POISON, RECORDS = 20, 100
NOISE = random.Random(3)
NOISY = "".join(chr(NOISE.randrange(33, 127)) for _ in range(40))


def flags_of(folder: Path, poison: bool, *more: str) -> list[str]:
    """Three sources of dull text, in the order of their files."""
    sources = []
    for name in ("red", "green", "blue"):
        texts = [f"the {name} fox jumps over the {name} dog, and again " * 2] * RECORDS
        if poison and name == "blue":
            texts[POISON] = NOISY
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(lines))
        sources.append({"name": name, "path": str(path)})
    return [
        f"--data.source={json.dumps(sources)}",
        "--data.shuffle=false",
        "--training.batch_size=1",
        "--training.global_batch_size=4",
        "--training.steps=20",
        "--no-validation.enable",
        "--guard.spike_sigmas=4",
        "--guard.window=6",
        "--guard.max_skips=2",
        *more,
    ]


STREAM = ["--data.streaming=true", "--data.lanes=2"]
ROLL_BACK = ["--guard.policy=rollback", "--checkpoint.interval=5"]
TP = "--training.tensor_parallel_degree=2"
PP = "--experimental.pipeline_parallel_degree=2"


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(1, ["--guard.policy=skip"], id="one-rank-skip"),
        pytest.param(2, [*STREAM, *ROLL_BACK], id="fsdp-stream-rollback"),
        pytest.param(
            2, [PP, "--training.batch_size=2", "--data.mask_documents"], id="pipeline-stop"
        ),
        pytest.param(2, ["--experimental.context_parallel_degree=2"], id="context-stop"),
        pytest.param(4, [TP, "--training.loss_chunks=4"], id="tensor-fsdp-stop"),
    ],
)
def test_the_poisoned_document_is_named_first(pool, tmp_path, capsys, ranks, flags):
    out = f"--job.dump_folder={tmp_path / 'run'}"
    given = flags_of(tmp_path, True, *flags)
    event = pool(ranks).run(train_run, str(tmp_path / "run"), *given)[0]["events"][-1]
    worst, *others = event["losses"]
    assert event["kind"] == "spike"
    assert worst["source"] == "blue"
    text = worst["text"].removeprefix("<|begin_of_text|>").removesuffix("<|end_of_text|>")
    assert len(text) > 8
    assert text in NOISY
    assert worst["loss"] > 4 > 2 * worst["others"]
    assert f"blue: {worst['name']} has loss" in event["message"]
    if "--data.streaming=true" in flags:
        assert (worst["file"], worst["record"]) == (str(tmp_path / "blue.jsonl"), POISON + 1)
    else:
        assert worst["name"] == str(POISON)
    # All targets once, with the weights of the step: the mean is the step's loss.
    targets = [one["tokens"] for one in event["losses"]]
    total = sum(one["loss"] * one["tokens"] for one in event["losses"])
    assert 100 < sum(targets) <= 4 * 32
    assert total / sum(targets) == pytest.approx(event["loss"], rel=1e-5)
    left = sum(one["loss"] * one["tokens"] for one in others)
    assert worst["others"] == pytest.approx(left / sum(targets[1:]), rel=1e-6)

    code = main(["data", "peek", "debug_model.toml", "--bad-step", str(event["step"]), out])
    shown = capsys.readouterr().out
    assert code == 0
    first, figures = shown.splitlines()[2:4]
    assert first.startswith("── document blue: ")
    assert f"loss {worst['loss']}, the others {worst['others']}, " in figures
    assert text in shown
    assert f"[data]\nskip_steps = [{event['data_steps']}]" in shown


def test_without_poison_nothing_is_reported(pool, tmp_path, capsys):
    folder = tmp_path / "run"
    found = pool(1).run(train_run, str(folder), *flags_of(tmp_path, False))[0]
    assert (found["step"], found["error"], found["events"]) == (20, "", [])
    words = ["data", "peek", "debug_model.toml", f"--job.dump_folder={folder}", "--bad-step", "9"]
    assert main(words) == 2
    assert "The guard writes it at a bad step" in capsys.readouterr().err


def _unread(world: DistEnv, folder: str, name: str, rank: int, *flags: str) -> dict[str, Any]:
    """Train; a rank fails while the losses of documents are measured."""
    trainer = make_trainer(world, folder, *flags)

    def fail(*_: Any) -> None:
        assert trainer.parts.callbacks[0].watch.where == f"evaluate of step {trainer.step}"
        raise MemoryError(name)

    given = fail if world.rank == rank else getattr(document_losses, name)
    with patch.object(document_losses, name, given):
        return outcome_of(trainer, folder)


@pytest.mark.parametrize(
    ("ranks", "name"), [(1, "TargetLogs"), pytest.param(2, "documents_of", marks=pytest.mark.slow)]
)
def test_a_run_that_skips_a_step_goes_on_where_its_documents_cannot_be_measured(
    pool, tmp_path, ranks, name
):
    flags = flags_of(tmp_path, True, "--guard.policy=skip")
    found = pool(ranks).run(_unread, str(tmp_path / "run"), name, ranks - 1, *flags)[0]
    assert (found["step"], found["error"], found["events"][0]["losses"]) == (20, "", [])
    assert f"the losses of documents cannot be measured: MemoryError: {name}" in found["said"]


@pytest.mark.parametrize("losses", [[], [{"loss": math.nan, "others": math.nan}]])
def test_no_document_is_blamed_where_the_others_have_no_loss(monkeypatch, losses):
    """Weights that are not finite give every document such a loss."""
    monkeypatch.setattr("titanlite.metrics.document_losses.document_losses", lambda *_: losses)
    bad = BadStepError(3, math.nan, math.nan, "why", "not finite")
    before = str(bad)
    AnomalyLog(MagicMock()).measure(bad, MagicMock())
    assert (str(bad), bad.losses) == (before, losses)
