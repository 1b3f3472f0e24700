"""Every class of wrong input: its code, file and line, key, and a remedy."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titanlite.config.aliases import known_names, known_sections
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.keys import keys
from titanlite.config.load import load, read_text
from titanlite.config.unsupported_keys import NAMES as OTHER_NAMES
from titanlite.models import SPECS
from titanlite.resolve.load import check_config

HERE = Path("run.toml")


def problems(*flags: str, file: Path | None = None) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load([*([f"--job.config_file={file}"] if file else []), *flags])
    return list(caught.value.problems)


def only(text: str) -> Problem:
    found = read_text(text, HERE)[1]
    assert len(found) == 1, found
    return found[0]


LOSS_PARALLEL = "training.disable_loss_parallel (training.enable_loss_parallel)"
#: (text, line, key, code, part of the hint; empty: there is none)
WRONG = [
    (
        "[training]\nsteps = 5\nbatchsize = 4",
        3,
        "training.batchsize",
        "unknown-key",
        "training.batch_size",
    ),
    (
        "[training]\n\nlr = 1.0",
        3,
        "training.lr",
        "unknown-key",
        "belongs to another section: optimizer.lr",
    ),
    ("[optimizer]\nfused_ = true", 2, "optimizer.fused_", "unknown-key", "optimizer.fused"),
    (
        "[training]\nclip_grad = 1.0",
        2,
        "training.clip_grad",
        "unknown-key",
        "here this is training.max_norm",
    ),
    ("steps = 4", 1, "steps", "unknown-key", "belongs to another section: training.steps"),
    ("#\n[optim]\nlr = 1.0", 2, "[optim]", "unknown-section", "[optimizer]"),
    ("[zzz]\nq = 1.0", 1, "[zzz]", "unknown-section", "config explain"),
    ("training = 4", 1, "training", "wrong-type", ""),
    ('[optimizer]\nlr = "3e-4"', 2, "optimizer.lr", "wrong-type", ""),
    ("[optimizer]\nlr = -1", 2, "optimizer.lr", "out-of-range", ""),
    ("[optimizer]\nlr = nan", 2, "optimizer.lr", "out-of-range", ""),
    ("[training]\nsteps = 1e3", 2, "training.steps", "wrong-type", ""),
    ("[training]\nsteps = 0", 2, "training.steps", "out-of-range", ""),
    ('[training]\ncompile = "False"', 2, "training.compile", "wrong-type", ""),
    ("[job]\ndescription = 5", 2, "job.description", "wrong-type", ""),
    ("[training]\nglobal_batch_size = 0", 2, "training.global_batch_size", "out-of-range", ""),
    ('[optimizer]\nname = "AdamWW"', 2, "optimizer.name", "unknown-value", '"AdamW"'),
    ('[training]\ndtype = "float16"', 2, "training.dtype", "unsupported", ""),
    ("[training]\nfsdp_units = []", 2, "training.fsdp_units", "out-of-range", ""),
    (f"[training]\nseed = {2**63 - 1}", 2, "training.seed", "out-of-range", ""),
    ('[data]\nskip_steps = [1, "2"]', 2, "data.skip_steps", "out-of-range", ""),
    ("[model.overrides]\nrope_theta = inf", 2, "model.overrides.rope_theta", "out-of-range", ""),
    ("[launch.environment]\nA = 1", 2, "launch.environment.A", "wrong-type", ""),
    (
        '[[data.source]]\npath = "a"\nweihgt = 1.0',
        3,
        "data.source[0].weihgt",
        "unknown-key",
        "weight",
    ),
    ('[[data.source]]\npath = "a"\nweight = 0', 3, "data.source[0].weight", "out-of-range", ""),
    ("[[optimizer.groups]]\nlr = 1.0", 1, "optimizer.groups[0].pattern", "missing", "Regular"),
    ("[optimizer]\ngroups = [1]", 2, "optimizer.groups", "wrong-type", ""),
    ("[[training]]\nsteps = 1", 1, "training", "wrong-type", ""),
    (
        "[quantize.linear.float9]\nx = 1",
        1,
        "quantize.linear.float9",
        "unknown-key",
        "quantize.linear.float8",
    ),
    ('[comm]\nmode = "fake_backend"', 2, "comm.mode", "unsupported", 'leave it at "default"'),
    ("[fault_tolerance]\nenable = true", 2, "fault_tolerance.enable", "unsupported", "at false"),
    ('[model]\nconverters = ["float9"]', 2, "model.converters", "unsupported", ""),
    ("[training]\ndisable_loss_parallel = 0", 2, LOSS_PARALLEL, "wrong-type", ""),
    (
        "[training]\nlocal_batch_size = 0",
        2,
        "training.local_batch_size (training.batch_size)",
        "out-of-range",
        "",
    ),
    (
        "training.batch_size = 4\ntraining.local_batch_size = 8",
        2,
        "training.local_batch_size",
        "given-twice",
        "",
    ),
    ('[job]\nconfig_file = "x.toml"', 2, "job.config_file", "misplaced", ""),
]


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


@pytest.mark.parametrize("key", ["{}", "training.{}", "{}.steps"])
def test_a_key_of_200_kb_is_refused_in_few_words(tmp_path, key):
    file = tmp_path / "run.toml"
    file.write_text(f"{key.format('a' * 200_000)} = 1\n")
    (problem,) = problems(file=file)
    assert problem.code in ("unknown-key", "unknown-section")
    assert len(str(problem)) < 3_000


def test_a_key_that_is_gone_is_refused_with_what_does_its_work_now():
    for name, remedy in OTHER_NAMES["gone"].items():
        assert name not in known_names()
        (problem,) = problems(f"--{name}=1")
        assert (problem.key, problem.message, problem.remedy) == (name, "this key is gone", remedy)


def test_every_key_that_stands_for_a_name_of_another_trainer_exists():
    known = {field.name for spec in SPECS.values() for field in fields(spec.args_class)}
    for name, ours in OTHER_NAMES["other_trainers"].items():
        for key in ours.split(" and "):
            assert key in keys() or (
                key.startswith("model.overrides.") and key.rpartition(".")[2] in known
            ), name
        assert name not in keys(), name
    (problem,) = problems("--model.activation=silu")
    assert problem.remedy, "nothing is like it"


@pytest.mark.parametrize(("text", "line", "key", "code", "hint"), WRONG)
def test_a_wrong_value_is_named_with_code_place_key_and_remedy(text, line, key, code, hint):
    problem = only(text)
    assert (problem.where, problem.key, problem.code) == (f"run.toml:{line}", key, code)
    assert hint in problem.remedy
    assert bool(problem.remedy) == bool(hint)


def test_problem_in_a_base_is_named_in_the_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("base.toml").write_text("[training]\nsteps = 0\n")
    Path("a/run.toml").write_text('[job]\nextends = ["../base.toml"]\n[training]\nseq_len = 0\n')
    assert [problem.where for problem in problems(file=Path("a/run.toml"))] == [
        "a/run.toml:4",
        "base.toml:2",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[training]\nsteps = \n", 2),
        ("[a]\nb = 1\nb = 2\n", 3),
        ("[training\n", 1),
        ("[training]\nseed = 007\n", 2),
    ],
)
def test_broken_toml_is_named_with_its_line(text, line):
    problem = only(text)
    assert (problem.where, problem.code) == ("run.toml", "broken-toml")
    assert f"line {line}" in problem.message


def test_missing_file_names_the_nearest_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train_configs").mkdir()
    Path("train_configs/llama9_8b.toml").write_text("")
    (problem,) = problems("--job.config_file", "lama9_8b.toml")
    assert (problem.where, problem.key, problem.code) == (
        "command line",
        "job.config_file",
        "no-file",
    )
    assert "llama9_8b.toml" in problem.remedy


def test_files_that_cannot_be_read_are_named_where_they_are_written(tmp_path):
    (tmp_path / "bin.toml").write_bytes(b"\xff\xfe\x00")
    for path, reason in ((tmp_path, "directory"), (tmp_path / "bin.toml", "not UTF-8")):
        (problem,) = problems(file=path)
        assert (problem.where, problem.code) == (
            "command line",
            "unreadable",
        )
        assert reason in problem.message
    run = tmp_path / "run.toml"
    run.write_text('\n[job]\nextends = ["nope.toml"]\n')
    (problem,) = problems(file=run)
    assert (problem.where, problem.key, problem.code) == (f"{run}:3", "job.extends", "unreadable")
    (tmp_path / "b.toml").write_text('[job]\nextends = ["run.toml"]\n')
    run.write_text('[job]\nextends = ["\\u0000"]\n')
    (problem,) = problems(file=run)
    assert (problem.where, problem.key, problem.code) == (f"{run}:2", "job.extends", "unreadable")
    run.write_text('[job]\nextends = ["b.toml"]\n')
    (problem,) = problems(file=run)
    assert (problem.where, problem.code) == (f"{tmp_path / 'b.toml'}:2", "circle")
    assert "run.toml -> b.toml -> run.toml" in problem.message


@pytest.mark.parametrize(
    ("flags", "key", "code"),
    [
        (["stray"], "", "bad-flag"),
        (["--training.steps"], "--training.steps", "bad-flag"),
        (["--training.steps", "1", "2"], "--training.steps", "bad-flag"),
        (["--no-training.steps"], "--no-training.steps", "bad-flag"),
        (["--no-training.compile", "true"], "--no-training.compile", "bad-flag"),
        (["--model.overrides."], "model.overrides.", "unknown-key"),
        (["--model.overrides.", "8"], "model.overrides.", "unknown-key"),
        (["--model.overrides.n layers", "8"], "model.overrides.n layers", "unknown-key"),
        (
            ["--model.overrides.rope_scaling.factor", "8"],
            "model.overrides.rope_scaling.factor",
            "unknown-key",
        ),
        (["--training.steps", "1" + "0" * 5000], "training.steps", "wrong-type"),
        (["--data.source", "[" * 5000], "data.source", "wrong-type"),
        (["--job.config_file", "a" * 5000], "job.config_file", "no-file"),
        (["--model.overrides.n_layers.b", "3"], "model.overrides.n_layers.b", "unknown-key"),
        (["--launch.environment.A B", "3"], "launch.environment.A B", "unknown-key"),
        (["--training.steps", "many"], "training.steps", "wrong-type"),
        (["--training.steps=1.5"], "training.steps", "wrong-type"),
        (["--optimizer.lr", "nan"], "optimizer.lr", "out-of-range"),
        (["--training.compile", "yes"], "training.compile", "wrong-type"),
        (["--data.source", "[1"], "data.source", "wrong-type"),
        (["--trainig.steps", "4"], "trainig.steps", "unknown-section"),
        (["--training.stepps", "4"], "training.stepps", "unknown-key"),
        (["--job.dialect", "2026"], "job.dialect", "misplaced"),
        (["--job.extends", "a.toml"], "job.extends", "misplaced"),
        (["--comm.mode=x"], "comm.mode", "unsupported"),
        (["--"], "", "bad-flag"),
        (["--training"], "training", "unknown-key"),
        (["--model.overrides=3"], "model.overrides", "wrong-type"),
    ],
)
def test_wrong_flag_is_named(flags, key, code):
    assert [(p.where, p.key, p.code) for p in problems(*flags)] == [("command line", key, code)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("training.steps=10", "training.tokens=1000"),
        ("training.steps=10", "training.epochs=2"),
        ("training.tokens=10", "training.epochs=2"),
        ("training.warmup_steps=10", "lr_scheduler.warmup_ratio=0.1"),
        ("lr_scheduler.decay_ratio=0.1", "lr_scheduler.decay_steps=5"),
        ("lr_scheduler.plateau_ratio=0.1", "lr_scheduler.decay_ratio=0.5"),
    ],
)
def test_two_keys_for_one_thing_exclude_each_other_in_a_layer(first, second):
    (problem,) = problems(f"--{first}", f"--{second}")
    assert problem.code == "exclusive"
    assert all(written.replace("=", " = ") in problem.message for written in (first, second))


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
NAMES = st.sampled_from(
    [
        *sorted(known_names()),
        *sorted(known_sections()),
        "x",
        "training.x",
        "x.y.z",
        '""',
        "data.source.x",
    ]
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pairs=st.lists(st.tuples(NAMES, VALUES), max_size=3),
    flags=st.lists(st.tuples(NAMES, VALUES), max_size=2),
)
def test_nothing_written_ever_ends_in_another_error(tmp_path, pairs, flags):
    (tmp_path / "run.toml").write_text("".join(f"{name} = {value}\n" for name, value in pairs))
    words = [
        f"--{name}={value}"
        for name, value in flags
        if name not in ("job.config_file", "job.extends")
    ]
    try:
        check_config(
            [f"--job.config_file={tmp_path / 'run.toml'}", *words], world_size=2, training=True
        )
    except ConfigError as error:
        assert error.problems
        assert all(problem.message and problem.code for problem in error.problems)
