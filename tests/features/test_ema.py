"""The average of the weights: its numbers, saved, resharded, validated and exported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import unequal
from tests.support.commands import evaluate_run
from tests.support.harness import full
from tests.support.pool import Pools
from tests.support.whole_runs import losses_of, make_trainer, outcome_of, train_run
from titanlite import exit_codes
from titanlite.callbacks import Callback
from titanlite.cli.argument_parser import Parser
from titanlite.cli.hub.compare_checkpoints import Contents
from titanlite.cli.hub.export_weights import convert, open_source
from titanlite.cli.loading import add_arguments, load_model
from titanlite.cli.main import main
from titanlite.dist.dist_env import DistEnv

EMA = [
    "--optimizer.ema_decay=0.5",
    "--training.steps=6",
    "--guard.policy=skip",
    "--training.reshard_after_forward=never",
]
VALIDATE = ["--validation.enable", "--validation.freq=1"]


class _Weights(Callback):
    """Keeps the head's weights at the start and after each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append(full(trainer.parts.model.get_parameter("output.weight")))

    on_step_end = on_start


def _run_kept(world: DistEnv, folder: str, *flags: str) -> dict[str, Any]:
    trainer = make_trainer(world, folder, *flags)
    kept = _Weights()
    trainer.callbacks = type(trainer.callbacks)([*trainer.callbacks.all, kept])

    def spoil(module: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return out * float("nan") if trainer.step == 3 and out.requires_grad else out

    # The gradients of step 3.
    trainer.parts.model.get_submodule("norm").register_forward_hook(spoil)
    return {**outcome_of(trainer, folder), "seen": kept.seen}


@pytest.fixture(scope="module")
def straight(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Six steps on two ranks, the third of them bad."""
    folder = tmp_path_factory.mktemp("ema")
    found = pool(2).run(
        _run_kept, str(folder), *EMA, *VALIDATE, "--validation.ema", "--checkpoint.interval=3"
    )[0]
    return folder / "checkpoint", found


def _validations(found: dict[str, Any]) -> dict[int, float]:
    return {
        row["step"]: row["validation_loss"] for row in found["rows"] if "validation_loss" in row
    }


def test_each_good_step_moves_it_and_training_does_not_notice(pool, tmp_path, straight):
    root, found = straight
    expected = found["seen"][0].clone()
    for step, weights in enumerate(found["seen"][1:], start=1):
        if step != 3:
            expected.lerp_(weights, 0.5)
    assert torch.equal(found["seen"][2], found["seen"][3])
    assert torch.equal(Contents(root / "step-6").read("ema.output.weight"), expected)
    assert torch.equal(open_source(root, ema=True).read("output.weight"), expected)
    plain = pool(2).run(_run_kept, str(tmp_path), *EMA, *VALIDATE, "--optimizer.ema_decay=0")[0]
    assert losses_of(plain["rows"]) == losses_of(found["rows"])
    assert _validations(plain).keys() == _validations(found).keys() == set(range(1, 7))
    assert _validations(plain)[6] < _validations(found)[6] - 1e-3, "the average lags"


def test_commands_take_the_average(pool, straight, capsys, tmp_path):
    root, found = straight
    ours = pool(2).run(evaluate_run, root)[0].all.loss
    assert ours == _validations(found)[6]
    assert pool(2).run(evaluate_run, root, "--no-validation.ema")[0].all.loss < ours - 1e-3

    convert(root, tmp_path / "hf", "hf", ema=True)
    expected = _logits(tmp_path / "hf")
    assert torch.equal(_logits(root, "--ema"), expected)
    assert not torch.allclose(_logits(root), expected, atol=1e-4)
    sample = ["sample", str(tmp_path / "hf"), "a", "--ema", "--device=cpu"]
    assert main(sample) == exit_codes.CHECKPOINT
    refused = "holds no average of the weights: it is no checkpoint of titanlite"
    assert refused in capsys.readouterr().err


def _logits(path: Path, *flags: str) -> torch.Tensor:
    parser = Parser()
    add_arguments(parser)
    model = load_model(parser.parse_args([str(path), "--device=cpu", *flags])).model
    logits: torch.Tensor = model(torch.arange(8)[None])
    return logits


@pytest.mark.slow
def test_it_resumes_exactly_and_on_other_ranks_and_begins_or_ends_when_asked(
    pool, tmp_path, straight
):
    flags = [*EMA, "--no-validation.enable"]
    folder = tmp_path / "run"
    root = tmp_path / "run" / "checkpoint"
    shutil.copytree(straight[0] / "step-3", root / "step-3")
    pool(2).run(train_run, str(folder), *flags)
    assert unequal(root / "step-6", straight[0] / "step-6") == []
    other = pool(1).run(train_run, str(folder), *flags, "--training.steps=7")[0]
    assert other["step"] == 7
    averages = [Contents(root / f"step-{step}").read("ema.output.weight") for step in (6, 7)]
    weights = Contents(root / "step-7").read("model.output.weight")
    assert torch.equal(averages[1], averages[0].lerp(weights, 0.5))
    off = ["--training.steps=8", "--optimizer.ema_decay=0", "--checkpoint.exclude_from_loading=ema"]
    assert pool(2).run(train_run, str(folder), *flags, *off)[0]["step"] == 8
    on = pool(2).run(train_run, str(folder), *flags, "--training.steps=9")[0]
    assert any("but with new averages" in line for line in on["said"])
    before, after = (Contents(root / f"step-{step}").read("model.output.weight") for step in (8, 9))
    assert torch.equal(Contents(root / "step-9").read("ema.output.weight"), before.lerp(after, 0.5))
