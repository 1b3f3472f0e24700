"""Lengths, batches and rates of the runs of a ladder."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.contrib.lab.ladder.tiny import FLAGS, NAMES, written
from titanlite.config.errors import ConfigError
from titanlite.contrib.lab.ladder.law import LadderError
from titanlite.contrib.lab.ladder.rungs import DEFAULTS, Rung, rungs
from titanlite.contrib.lab.ladder.target import Target, target_of
from titanlite.contrib.lab.members import check_members
from titanlite.run.config import RunConfig


def target(folder: Path, *flags: str, nproc: int = 1, more: str = "") -> Target:
    """The tiny target with flags. more: of its file."""
    arguments = argparse.Namespace(
        files=[str(written(folder, more))],
        nproc_per_node=nproc,
        dry_run=False,
        gpu=None,
        gpus=None,
        instance=None,
        nodes=None,
    )
    return target_of(arguments, [*FLAGS, *flags])


def values(rung: Rung) -> Mapping[str, Any]:
    """The flags of a run by key."""
    found = {}
    for flag in rung.flags:
        key, _, value = flag.removeprefix("--").partition("=")
        found[key] = value
    return found


def test_each_size_has_a_trunk_and_shorter_branches_from_it(tmp_path):
    found = rungs(target(tmp_path))
    assert [rung.name for rung in found] == list(NAMES)
    for trunk, branch in zip(found[::2], found[1::2], strict=True):
        assert (trunk.trunk, branch.trunk) == (None, trunk.name)
        assert trunk.steps == round(0.04 * trunk.parameters / (trunk.sequences * 16))
        assert branch.steps == round(0.02 * trunk.parameters / (trunk.sequences * 16))
        assert branch.begins == branch.steps - round(branch.steps / 2)
        assert trunk.tokens == trunk.steps * trunk.sequences * 16
        first, second = values(trunk), values(branch)
        assert first["checkpoint.milestones"] == f"[{branch.begins}]"
        assert int(first["validation.freq"]) == branch.begins // 2
        changed = {key for key in second if first.get(key) != second[key]}
        assert changed == {
            "training.steps",
            "lr_scheduler.total_steps",
            "lr_scheduler.decay_steps",
            "validation.freq",
            "checkpoint.start",
            "checkpoint.interval",
            "checkpoint.milestones",
            "checkpoint.initial_load_model_only",
        }
        member = branch.member(tmp_path)
        folder = tmp_path / trunk.name / "checkpoint" / f"step-{branch.begins}"
        assert member.flags[-1] == f"--checkpoint.initial_load_path={folder}"


def test_rates_and_batches_follow_the_size(tmp_path):
    aim = target(tmp_path)
    for rung in rungs(aim):
        share = rung.parameters / aim.parameters
        assert rung.rate == pytest.approx(1e-3 * share ** (-1 / 3), rel=1e-5)
        assert abs(rung.sequences - 8 * share ** (2 / 3)) <= 1
    flags = ("--ladder.lr_exponent=0", "--ladder.batch_exponent=0")
    for rung in rungs(target(tmp_path, *flags, "--ladder.tokens_per_parameter=[0.1,0.2]")):
        assert (rung.rate, rung.sequences) == (1e-3, 8)
        assert values(rung)["training.batch_size"] == "4"


def checked(aim: Target, folder: Path) -> list[RunConfig]:
    """The configs of the trunks, as the runs begin with."""
    trunks = [rung.member(folder) for rung in rungs(aim) if rung.trunk is None]
    return check_members(trunks, [*aim.files, *DEFAULTS, *aim.flags], folder, 1)


def test_the_lowest_rate_follows_the_size_as_the_rate_does(tmp_path):
    aim = target(tmp_path, "--lr_scheduler.min_lr=1e-4")
    for rung in rungs(aim):
        floor = float(values(rung)["lr_scheduler.min_lr"])
        assert floor / rung.rate == pytest.approx(0.1, rel=1e-5)
    first = checked(aim, tmp_path)[0]
    assert first.schedule.min_lr == pytest.approx(first.optimizer.lr / 10, rel=1e-5)
    assert "lr_scheduler.min_lr" not in values(rungs(target(tmp_path))[0])


def test_under_mup_all_models_have_the_rate_of_the_file(tmp_path):
    found = checked(target(tmp_path, "--mup.base_dim=16"), tmp_path)
    assert {(one.optimizer.lr, one.mup.base_dim) for one in found} == {(1e-3, 16)}


def test_batches_are_whole_micro_batches_of_all_ranks(tmp_path):
    flags = ("--training.global_batch_size=60", "--ladder.tokens_per_parameter=[0.5,1]")
    for rung in rungs(target(tmp_path, *flags, nproc=3)):
        micro = int(values(rung)["training.batch_size"])
        assert rung.sequences % (3 * micro) == 0
        assert 1 <= micro <= 4


def test_each_seed_has_runs_of_its_own(tmp_path):
    found = rungs(target(tmp_path, "--ladder.seeds=2"))
    assert len(found) == 12
    assert found[0].name == f"{NAMES[0]}-s5"
    assert [values(rung)["training.seed"] for rung in found[:4]] == ["5", "5", "6", "6"]
    assert {rung.trunk for rung in found[2:4]} == {None, f"{NAMES[0]}-s6"}


def test_the_models_of_a_ladder_are_not_saved_where_the_run_of_the_file_is(tmp_path):
    keys = {"enable_checkpoint": "true", "hub": '"ada/big"', "hub_every": "100"}
    keys |= {"local_folder": '"/local"', "interval": "100", "local_interval": "50"}
    table = "\n[checkpoint]\n" + "\n".join(f"{key} = {value}" for key, value in keys.items())
    aim = target(tmp_path, more=table)
    assert aim.run.checkpoint.hub == "ada/big"
    for one in checked(aim, tmp_path):
        assert (one.checkpoint.hub, one.checkpoint.local_folder) == ("", None)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--ladder.tokens_per_parameter=[0.001,0.04]", "too few for a warm-up and a decay"),
        ("--model.name=hf", "takes none|hf_config"),
        ("--validation.enable=false", "validation.enable"),
        ("--data.phase=[{tokens=800},{tokens=800,seq_len=8}]", "data.phase"),
        ("--lora.rank=4", "lora.rank"),
    ],
)
def test_ladders_that_cannot_be_are_refused(tmp_path, flag, message):
    with pytest.raises((LadderError, ConfigError), match=message):
        rungs(target(tmp_path, flag))
