"""Validation of several texts: one loss each, and one over all their tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.pool import Pools
from tests.support.texts import make_corpus, write_texts
from tests.support.whole_runs import make_trainer, train_run
from titanlite.assembly.datasets import read_held_out
from titanlite.config.errors import ConfigError
from titanlite.data.dataset_builder import TextReader
from titanlite.data.sequences import PackedDataset
from titanlite.data.tokenizer import load_tokenizer
from titanlite.dist.dist_env import DistEnv
from titanlite.resolve.load import load_config
from titanlite.validation import HeldOutLoss, ValidationResult

#: A full pass over each text.
FULL = ["--validation.enable", "--validation.steps=-1", "--validation.batch_size=2"]
NAMES = ("long", "short")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Texts of unequal length, of other words."""
    folder = tmp_path_factory.mktemp("texts")
    long = [
        f"The river was {n} miles wide, and they crossed it by night in the boats of the enemy."
        for n in range(40)
    ]
    texts = {"long": long, "short": ["0 1 2 3 4 5 6 7 8 9 " * 20, "7 7 7"]}
    return {name: write_texts(folder / f"{name}.jsonl", texts[name]) for name in NAMES}


def sources(files: dict[str, Path]) -> str:
    tables = (f"{{name='{name}', path='{path}'}}" for name, path in files.items())
    return f"--validation.sources=[{', '.join(tables)}]"


@pytest.fixture(scope="module")
def one_rank(
    pool: Pools, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, float]:
    """The losses before the first step, on one rank."""
    return before_step_1(pool, tmp_path_factory.mktemp("one"), 1, sources(files))


def before_step_1(pool: Pools, folder: Path, ranks: int, texts: str) -> dict[str, float]:
    """The figures of the validation before the first step. texts: the flag that names them."""
    batch = ["--training.batch_size=1", "--training.global_batch_size=12"]
    flags = [*FULL, *batch, "--validation.first", "--training.steps=1", texts]
    found = pool(ranks).run(train_run, str(folder), *flags)[0]
    rows = {row["step"]: row for row in found["rows"] if "validation_loss" in row}
    assert sorted(rows) == [0, 1]
    said = "\n".join(found["said"])
    assert "validation at 0: loss" in said
    if texts.startswith("--validation.sources"):
        assert all(f"validation at 0, {name}: loss" in said for name in NAMES)
    return {k: v for k, v in rows[0].items() if k not in ("time", "validation_seconds")}


def _validated(world: DistEnv, folder: str, *flags: str) -> bool:
    trainer = make_trainer(world, folder, *flags, "--validation.enable", "--validation.steps=1")
    parts = trainer.parts
    assert parts.validation is not None
    held = {id(p) for group in parts.optimizer.param_groups for p in group["params"]}
    parts.validation.measure(parts.model, world.device, parts.train_step.runner)
    return held == {id(p) for p in parts.model.parameters()}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("reshard", ["default", "2"])
def test_the_models_parameters_are_those_of_the_optimizer(pool, tmp_path, reshard):
    """Not the gathered ones of a forward pass without a backward."""
    assert all(
        pool(4).run(_validated, str(tmp_path), f"--training.reshard_after_forward={reshard}")
    )


@pytest.mark.slow
def test_each_text_has_the_loss_that_it_has_alone_and_all_count_by_tokens(
    pool, files, one_rank, tmp_path
):
    alone = {
        n: before_step_1(pool, tmp_path / n, 1, f"--validation.dataset_path={files[n]}")
        for n in NAMES
    }
    tokens = {name: row["validation_tokens"] for name, row in alone.items()}
    for name, row in alone.items():
        loss = row["validation_loss"]
        assert one_rank[f"validation/{name}/loss"] == loss
        perplexity = one_rank[f"validation/{name}/perplexity"]
        assert perplexity == row["validation_perplexity"] == math.exp(loss)
        assert not any(key.startswith("validation/") for key in row)
    assert tokens["long"] > 2 * tokens["short"] > 100
    assert one_rank["validation_tokens"] == sum(tokens.values())
    losses = {name: one_rank[f"validation/{name}/loss"] for name in NAMES}
    mean = sum(losses[name] * tokens[name] for name in NAMES) / sum(tokens.values())
    assert one_rank["validation_loss"] == pytest.approx(mean, rel=1e-12)
    assert abs(mean - sum(losses.values()) / 2) > 1e-3


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_full_pass_gives_the_same_losses_on_any_number_of_ranks(
    pool, files, one_rank, tmp_path, ranks
):
    found = before_step_1(pool, tmp_path, ranks, sources(files))
    assert found.pop("validation_tokens") == one_rank["validation_tokens"]
    assert found == pytest.approx({key: one_rank[key] for key in found}, rel=1e-6)


def test_a_full_pass_over_text_without_an_end_is_refused(monkeypatch):
    endless = {"wiki": PackedDataset(make_corpus([5, 5]), seq_len=16)}
    monkeypatch.setattr(TextReader, "held_out", lambda *_: endless)

    def held_out(steps):
        flags = ["--validation.enable", f"--validation.steps={steps}"]
        return read_held_out(load_config("debug_model.toml", 1, flags), load_tokenizer())

    words = r"validation\.steps: -1 is a full pass, and wiki is read as a stream"
    with pytest.raises(ConfigError, match=words):
        held_out(-1)
    assert held_out(3) == endless


def test_figures_at_the_limits():
    assert HeldOutLoss(1e6, 1).perplexity == math.inf
    result = ValidationResult({"none": HeldOutLoss(0.0, 0), "some": HeldOutLoss(6.0, 3)})
    assert math.isnan(result.sources["none"].loss) and result.all.loss == 2.0
