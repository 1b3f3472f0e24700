"""Whole runs of the trainer on the bundled text: resume, validation, records, refusals."""

from __future__ import annotations

import gc
import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.support.processes import ROOT, TORCHRUN, python
from tests.support.tiny import TWENTY_STEPS, size
from tests.support.whole_runs import losses_of, make_trainer, train_run
from titanlite import exit_codes
from titanlite.assembly.schedule_change import schedule_change
from titanlite.checkpoint.loaded import LoadedState
from titanlite.checkpoint.manifest import CheckpointError, read_manifest
from titanlite.checkpoint.resume import begin_from
from titanlite.data.tokenizer import BUNDLED_TOKENIZER, load_tokenizer
from titanlite.dist.dist_env import DistEnv
from titanlite.optim.schedule import LearningRate, Schedule
from titanlite.runs.attempts import read_attempts
from titanlite.runs.read_jsonl import read_metrics
from titanlite.trainer import Trainer

#: The flags with which a resumed `golden` run trains as it did.
SKIP = "--guard.policy=skip"


def test_ten_resume_ten_equals_twenty_bit_for_bit(pool, golden, tmp_path):
    golden.copy(tmp_path, newest=10)
    resumed = pool(2).run(train_run, str(tmp_path), "--training.steps=20", SKIP)[0]["rows"]
    straight = [row for row in read_metrics(golden.folder / "metrics.jsonl") if row["step"] <= 20]
    assert losses_of(resumed) == losses_of(straight)
    assert sorted(losses_of(resumed)) == list(range(1, 21))
    before, after = (
        [row["validation_loss"] for row in rows if "validation_loss" in row]
        for rows in (straight, resumed)
    )
    assert before == after
    seen = [row["tokens_seen"] for row in resumed if "loss" in row]
    assert seen == [256 * step for step in range(1, 21)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ranks", [1, 4])
def test_resume_on_other_ranks_goes_on_with_the_same_batches(pool, golden, tmp_path, ranks):
    """Another batch in any step would move that step's loss by far more than rounding."""
    golden.copy(tmp_path, newest=10)
    resumed = losses_of(
        pool(ranks).run(train_run, str(tmp_path), "--training.steps=20", SKIP)[0]["rows"]
    )
    straight = golden.rows()
    for step in range(11, 21):
        assert abs(resumed[step][0] - straight[step]["loss"]) < 5e-6, step


def test_training_lowers_the_loss_and_validation_measures_the_same_tokens(golden):
    first, last = (golden.rows()[step]["loss"] for step in (1, 20))
    validations = golden.rows("validation_loss")
    assert first > 7.0
    assert last < first - 0.3
    assert sorted(validations) == [10, 20, 24]
    assert {row["validation_tokens"] for row in validations.values()} == {2 * 4 * 2 * 32}
    at_10, at_20 = (validations[step]["validation_loss"] for step in (10, 20))
    assert at_20 < at_10 < first
    assert read_manifest(golden.folder / "checkpoint" / "step-20").validation_loss == at_20


@pytest.mark.parametrize(
    ("train", "name"),
    [({}, "tokens_seen"), ({"data": 3}, "data"), ({"guard": {"losses": ["a"]}}, "guard")],
)
def test_a_checkpoint_that_does_not_say_where_the_run_stood_is_refused(train, name):
    """To begin at step 1 with its weights would look like success."""
    good = {"tokens_seen": 7, "data": {}} if train else {}
    loaded = LoadedState(10, good | train, folder=Path("step-10"))
    wanted = f"step-10 does not say where its run continues: {name} in its train state"
    with pytest.raises(CheckpointError, match=wanted):
        begin_from(cast("Trainer", None), loaded)


def test_phases_and_schedules_of_another_version_are_told_as_changes():
    plain = LearningRate(Schedule(10, 2, "constant", "titan", 0.0), 1e-3)
    halved = replace(plain, phases=((8, 0.5),))

    def change(before, now, **other):
        record = json.loads(json.dumps({**before.record(), **other}))
        return schedule_change(LoadedState(6, {"schedule": record}), now, 10)

    assert change(plain, plain) is change(halved, halved) is None
    assert "phases [[8, 0.5]] -> []" in (change(halved, plain) or "")
    assert "phases [] -> [[8, 0.5]]" in (change(plain, halved) or "")
    for name, value in {"decay_type": "wavelet", "warmup_steps": "2 %", "phases": [8]}.items():
        found = change(plain, plain, **{name: value}) or ""
        assert f"schedule changed since step 6: {name} {value} -> " in found
        assert "learning rate of step" not in found


@pytest.mark.slow
def test_resume_says_how_the_learning_rate_changed(pool, tmp_path):
    short = ["--training.steps=6", "--lr_scheduler.total_steps=6", "--optimizer.lr=1e-3"]
    pool(1).run(train_run, str(tmp_path), *short)
    longer = ["--training.steps=7", "--lr_scheduler.total_steps=10", "--optimizer.lr=2e-3"]
    found = pool(1).run(train_run, str(tmp_path), *longer)[0]
    (line,) = [line for line in found["said"] if "schedule changed" in line]
    assert "total_steps 6 -> 10, peak 0.001 -> 0.002; learning rate of step 7: 0 -> 0.00114" in line
    # Warm-up 3: 6 of 10 steps done are 3 of the 7 of the decay.
    assert losses_of(found["rows"])[7][2] == pytest.approx(2e-3 * 4 / 7)


@pytest.mark.slow
def test_other_text_tokenizer_order_or_model_is_refused(pool, golden, tmp_path):
    golden.copy(tmp_path, newest=10)
    text = tmp_path / "other.jsonl"
    text.write_text(json.dumps({"text": "Another text. " * 99, "timestamp": "", "url": ""}))
    ranks = BUNDLED_TOKENIZER.read_text().splitlines()
    # Two entries change places: as many ids, other meanings.
    (one, number), (two, last) = (line.split() for line in ranks[-2:])
    ranks[-2:] = [f"{two} {number}", f"{one} {last}"]
    tokenizer = tmp_path / "other.tiktoken"
    tokenizer.write_text("\n".join(ranks) + "\n")
    for flag, name in [
        (f"--training.dataset_path={text}", "data"),
        (f"--model.tokenizer_path={tokenizer}", "tokenizer"),
        ("--data.seed=5", "data order"),
        ("--model.overrides.n_layers=3", "model"),
        ("--training.seq_len=16", "data order"),
    ]:
        refused = pool(1).run(train_run, str(tmp_path), "--training.steps=20", flag)[0]
        assert f"{name}:" in refused["error"] and "--job.dump_folder" in refused["error"], flag
        if flag == "--data.seed=5":
            assert "in the config: " in refused["error"]
            assert "data.seed: " in refused["error"]


@pytest.mark.slow
def test_epochs_end_where_the_text_ends(pool, tmp_path):
    """On 1 and 2 ranks: the same steps and losses, those of the padded last batch too."""
    text = tmp_path / "text.jsonl"
    verses = [f"Verse {n}: in the beginning was the word, {n * n}." for n in range(40)]
    text.write_text("".join(json.dumps({"text": verse}) + "\n" for verse in verses))
    flags = [
        "--training.epochs=2",
        f"--training.dataset_path={text}",
        "--no-checkpoint.enable_checkpoint",
    ]
    one, two = (pool(n).run(train_run, str(tmp_path / str(n)), *flags)[0] for n in (1, 2))
    tokenizer = load_tokenizer(str(BUNDLED_TOKENIZER))
    tokens = 2 * sum(len(tokenizer.encode_document(verse)) for verse in verses)
    assert one["step"] == two["step"] == math.ceil((tokens - 1) / 32 / 8)
    for step, (loss, norm, _) in losses_of(one["rows"]).items():
        other = losses_of(two["rows"])[step]
        assert abs(loss - other[0]) < 5e-6
        assert abs(norm - other[1]) < 1e-4 * norm


@pytest.mark.slow
def test_earlier_metrics_are_kept_not_mixed(pool, golden, tmp_path):
    golden.copy(tmp_path)
    fresh = pool(1).run(
        train_run, str(tmp_path), "--training.steps=2", "--no-checkpoint.enable_checkpoint"
    )[0]["rows"]
    assert sorted(losses_of(fresh)) == [1, 2]
    before = read_metrics(golden.folder / "metrics.jsonl")
    assert read_metrics(tmp_path / "metrics-1.jsonl") == before


def test_wrong_config_exits_2_before_torch_is_imported():
    code = (
        "import sys; from titanlite import exit_codes, main\n"
        "exit_codes.exit_now = lambda code, _: sys.exit(code + 40 * ('torch' in sys.modules))\n"
        "main.main()"
    )
    wrong = python("-c", code, "--training.setps=3", "--optimizer.lr=fast")
    assert wrong.returncode == exit_codes.CONFIG
    assert "training.setps" in wrong.stderr
    assert "training.steps" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert "optimizer.lr" in wrong.stderr, "all wrong keys are reported at once"
    assert python("train.py", "--training.setps=3").returncode == exit_codes.CONFIG


@pytest.mark.slow
def test_two_ranks_train_and_write_what_they_say(tmp_path):
    command = ["-m", "titanlite", "train", "debug_model.toml", "--nproc-per-node", "2"]
    done = python(*command, *TWENTY_STEPS, f"--job.dump_folder={tmp_path}", "--training.steps=4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step:  4") == done.stdout.count("config: ") == 1, "only rank 0 prints"
    assert "training done at step 4" in done.stdout
    assert (tmp_path / "checkpoint" / "step-4" / "manifest.json").is_file()
    assert len(losses_of(read_metrics(tmp_path / "metrics.jsonl"))) == 4
    environment = read_attempts(tmp_path)[0]["environment"]
    assert environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") == "300"


@pytest.mark.slow
def test_custom_loop_trains(tmp_path):
    source = ROOT / "examples" / "custom_loop.py"
    assert len(source.read_text().splitlines()) <= 40
    small = [
        *size(128, 2, 4, 64),
        "--training.steps=16",
        "--training.batch_size=2",
        "--optimizer.lr=4e-3",
    ]
    done = python(*TORCHRUN, source, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("step ")
    ]
    assert len(losses) == 16
    assert losses[-1] < losses[0] - 0.5


def _garbage(world: DistEnv, folder: str) -> list[int]:
    """Steps after which garbage was collected; Python collects by itself after the run."""
    flags = ("--training.steps=8", "--training.gc_freq=3", "--no-checkpoint.enable_checkpoint")
    trainer = make_trainer(world, folder, *flags)
    collected: list[int] = []
    gc.callbacks.append(
        lambda phase, _: collected.append(trainer.step) if phase == "start" else None
    )
    try:
        trainer.train()
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()
    return [step for step in collected if step]


@pytest.mark.slow
def test_garbage_is_collected_on_all_ranks_in_the_same_steps(pool, tmp_path):
    for steps in pool(2).run(_garbage, str(tmp_path)):
        assert steps[:2] == [3, 6]


@pytest.mark.soak
def test_the_shipped_default_learns(tmp_path):
    """`./run_llama_train.sh` as it is, cut to 40 steps: the loss falls by more than a nat."""
    done = subprocess.run(
        [
            "./run_llama_train.sh",
            "--training.steps=40",
            f"--job.dump_folder={tmp_path}",
            "--metrics.log_freq=1",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    losses = losses_of(read_metrics(tmp_path / "metrics.jsonl"))
    last = [losses[step][0] for step in range(36, 41)]
    assert losses[1][0] - sum(last) / len(last) > 1.0
