"""Every class of wrong input: its code, file and line, key, and a remedy."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.refusals import refusal
from titanlite.config.aliases import known_names, known_sections
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.keys import keys
from titanlite.config.load import load, read_text
from titanlite.config.unsupported_keys import NAMES as OTHER_NAMES
from titanlite.models import SPECS
from titanlite.resolve.load import check_config

HERE = Path("run.toml")


def problems(flag: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load([flag])
    return list(caught.value.problems)


def only(text: str) -> Problem:
    found = read_text(text, HERE)[1]
    assert len(found) == 1, found
    return found[0]


FOLDER = Path(__file__).parent
SMALL = (
    "--float8.enable_float8_linear --model.overrides.dim=64 --model.overrides.n_heads=4 "
    "--training.seq_len=32 --training.batch_size=2"
)
ROW = r"^(?:(\d+) ranks: )?([^#\n].*)\n    (\S+) (.*?):(.*)$"
REFUSED = re.findall(ROW, (FOLDER / "refused.txt").read_text(), re.M)
WRONG = (FOLDER / "wrong.txt").read_text().split("\n\n")[1:]


@pytest.mark.parametrize("row", REFUSED, ids=[row[1] for row in REFUSED])
def test_a_command_line_is_refused_with_code_and_key(row):
    ranks, line, code, key, words = row
    problem = refusal(shlex.split(line.replace("SMALL", SMALL)), int(ranks or 1))
    assert (problem.where, problem.code, problem.key) == ("command line", code, key)
    assert words.strip() in f"{problem.message} {problem.remedy}", str(problem)


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_value_is_named_with_code_place_key_and_remedy(text):
    lines = text.splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if "#!" in line)
    problem = only(text)
    assert problem.where == f"run.toml:{number}"
    said, _, words = lines[number - 1].partition("#! ")[2].partition(":")
    hint, _, message = map(str.strip, words.partition("|"))
    assert f"{problem.code} {problem.key}" == said
    assert message in problem.message
    assert hint in problem.remedy
    assert bool(problem.remedy) == bool(hint)


#: Names of other trainers, and slips → the key that is meant.
MEANT = {
    "train.batch_size": "training.batch_size",
    "train.max_steps": "training.steps",
    "trainer.learning_rate": "optimizer.lr",
    "model.n_layers": "model.overrides.n_layers",
    "training.batchsize": "training.batch_size",
    "optimizer.weightdecay": "optimizer.weight_decay",
}


@pytest.mark.parametrize("name", MEANT)
def test_an_unknown_key_is_told_the_key_that_is_meant(name):
    (problem,) = problems(f"--{name}=1")
    assert problem.code in ("unknown-key", "unknown-section")
    assert problem.remedy.endswith(f" {MEANT[name]}")


def test_a_key_that_is_gone_is_refused_with_what_does_its_work_now():
    for name, remedy in OTHER_NAMES["gone"].items():
        assert name not in known_names()
        (problem,) = problems(f"--{name}=1")
        assert (problem.key, problem.message, problem.remedy) == (name, "this key is gone", remedy)


def test_every_key_that_stands_for_a_name_of_another_trainer_exists():
    own = {field.name for spec in SPECS.values() for field in fields(spec.args_class)}
    known = {*keys(), *(f"model.overrides.{name}" for name in own)}
    for name, ours in OTHER_NAMES["other_trainers"].items():
        assert set(ours.split(" and ")) <= known, name
        assert name not in keys(), name
    (problem,) = problems("--model.activation=silu")
    assert problem.remedy, "nothing is like it"


def test_problem_in_a_base_is_named_in_the_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("base.toml").write_text("[training]\nsteps = 0\n")
    Path("a/run.toml").write_text('[job]\nextends = ["../base.toml"]\n[training]\nseq_len = 0\n')
    found = [problem.where for problem in problems("--job.config_file=a/run.toml")]
    assert found == ["a/run.toml:4", "base.toml:2"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[training]\nsteps = \n", 2),
        ("[a]\nb = 1\nb = 2\n", 3),
        ("[training]\nseed = 007\n", 2),
    ],
)
def test_broken_toml_is_named_with_its_line(text, line):
    problem = only(text)
    assert (problem.where, problem.code) == ("run.toml", "broken-toml")
    assert f"line {line}" in problem.message


def test_files_that_cannot_be_read_are_named_where_they_are_written(tmp_path):
    (tmp_path / "bin.toml").write_bytes(b"\xff\xfe\x00")
    for path, reason in ((tmp_path, "directory"), (tmp_path / "bin.toml", "not UTF-8")):
        (problem,) = problems(f"--job.config_file={path}")
        assert (problem.where, problem.code) == ("command line", "unreadable")
        assert reason in problem.message
    run = tmp_path / "run.toml"
    run.write_text('\n[job]\nextends = ["nope.toml"]\n')
    (problem,) = problems(f"--job.config_file={run}")
    assert (problem.where, problem.key, problem.code) == (f"{run}:3", "job.extends", "unreadable")
    (tmp_path / "b.toml").write_text('[job]\nextends = ["run.toml"]\n')
    run.write_text('[job]\nextends = ["b.toml"]\n')
    (problem,) = problems(f"--job.config_file={run}")
    assert (problem.where, problem.code) == (f"{tmp_path / 'b.toml'}:2", "circle")
    assert "run.toml -> b.toml -> run.toml" in problem.message


VALUES = st.recursive(
    st.sampled_from(
        ["0", "-1", "3", "1.5", "inf", "true", '""', '"x"', '"none"', "1979-05-27", "07:32:00"]
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2).map(lambda items: f"[{', '.join(items)}]"),
        inner.map(lambda item: f"{{path = {item}, x = {item}}}"),
    ),
    max_leaves=4,
)
UNKNOWN = ["x", "training.x", "x.y.z", '""', "data.source.x"]
NAMES = st.sampled_from([*sorted(known_names()), *sorted(known_sections()), *UNKNOWN])


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pairs=st.lists(st.tuples(NAMES, VALUES), max_size=3),
    flags=st.lists(st.tuples(NAMES, VALUES), max_size=2),
)
def test_nothing_written_ever_ends_in_another_error(tmp_path, pairs, flags):
    file = tmp_path / "run.toml"
    file.write_text("".join(f"{name} = {value}\n" for name, value in pairs))
    own = ("job.config_file", "job.extends")
    words = [f"--{name}={value}" for name, value in flags if name not in own]
    try:
        check_config([f"--job.config_file={file}", *words], 2)
    except ConfigError as error:
        assert error.problems
        assert all(problem.message and problem.code for problem in error.problems)
