"""`titanlite config diff`: effective differences between files and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titanlite.cli.config import differences, side
from titanlite.cli.main import main
from titanlite.config.errors import ConfigError
from titanlite.config.load import load

pytestmark = pytest.mark.usefixtures("elsewhere")


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def found(left: str, right: str) -> list[tuple]:
    return differences(side(left), side(right))


def test_spelling_order_and_written_defaults_are_no_difference(capsys):
    left = write(
        "a.toml", '[job]\ndialect = "2024"\n[training]\nlocal_batch_size = 4\nsteps = 10000\n'
    )
    right = write("b.toml", "[metrics]\nlog_freq = 10\n[training]\nbatch_size = 4\n")
    assert found(left, right) == []
    assert main(["config", "diff", left, right]) == 0
    assert capsys.readouterr().out == "no difference in effect\n"


def recorded(*flags: str) -> str:
    return load(flags).to_toml()


def test_file_against_a_run_that_was_started_from_it_differs_by_the_flags_only(capsys):
    file = write(
        "run.toml", "[training]\nsteps = 20\nlocal_batch_size = 4\n[optimizer]\nlr = 1e-3\n"
    )
    text = recorded("--job.config_file=run.toml", "--optimizer.lr=2e-3", "--training.tokens=500")
    write("outputs/config.toml", text)
    lines = {line.partition(" = ")[0]: number for number, line in enumerate(text.split("\n"), 1)}
    assert found(file, "outputs") == [
        ("training.steps", ("20", "run.toml:2"), ("(not set)", "")),
        ("training.tokens", ("(not set)", ""), ("500", f"outputs/config.toml:{lines['tokens']}")),
        ("optimizer.lr", ("0.001", "run.toml:5"), ("0.002", f"outputs/config.toml:{lines['lr']}")),
    ]


def manifest(folder: str, content: object) -> None:
    write(f"{folder}/manifest.json", content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("named", ["out", "out/ckpt", "out/ckpt/step-20"])
def test_run_without_config_file_is_known_by_its_newest_checkpoint(named):
    for step in (3, 20):
        manifest(
            f"out/ckpt/step-{step}",
            {"step": step, "config": {"toml": recorded(f"--training.steps={step}")}},
        )
    ((key, left, right),) = found(write("a.toml", ""), named)
    assert (key, left, right[0]) == ("training.steps", ("10000", "default"), "20")
    assert right[1].startswith("out/ckpt/step-20/manifest.json:")


@pytest.mark.parametrize("newest", ["{", "[]", '{"config": {}}', '{"config": {"toml": 3}}'])
def test_checkpoint_that_holds_no_config_is_passed_over(newest):
    manifest("out/ckpt/step-3", {"config": {"toml": recorded("--training.steps=3")}})
    manifest("out/ckpt/step-20", newest)
    manifest("out/ckpt/step-30.invalid", {"config": {"toml": recorded("--training.steps=4")}})
    ((key, _, right),) = found(write("a.toml", ""), "out")
    assert (key, right[0]) == ("training.steps", "3")


def test_folder_without_a_config_and_wrong_files_are_errors(capsys):
    Path("empty").mkdir()
    write("a.toml", "")
    write("b.toml", "[training]\nstepz = 3\n")
    for words, message in [
        (["a.toml", "empty"], 'no config in "empty"'),
        (["a.toml", "b.toml"], "b.toml:2: training.stepz: unknown key"),
        (["a.toml", "c.toml"], 'no file "c.toml"'),
        (["a.toml", "a.toml", "--training.steps=3"], "takes no --section.key flags"),
    ]:
        assert main(["config", "diff", *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError):
        side("empty")
