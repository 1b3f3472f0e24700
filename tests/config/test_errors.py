"""Every class of wrong input: file, line, key, what was expected, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titanlite.config.entries import known_names, known_sections
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.load import load, load_file
from titanlite.config.resolve import resolve
from titanlite.models import SHAPES
from titanlite.prepare import checked_plans


def problems(tmp_path: Path, text: str, *flags: str) -> list[Problem]:
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_file(file, flags)
    return list(caught.value.problems)


def only(tmp_path: Path, text: str, *flags: str) -> Problem:
    found = problems(tmp_path, text, *flags)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("text", "line", "key", "message", "hint"),
    [
        (
            "[training]\nsteps = 5\nbatchsize = 4\n",
            3,
            "training.batchsize",
            "unknown key",
            "nearest: training.batch_size",
        ),
        ("[training]\n\nlr = 1.0\n", 3, "training.lr", "unknown key", "lr belongs to another section: optimizer.lr"),
        ("[optimizer]\nfused_ = true\n", 2, "optimizer.fused_", "unknown key", "nearest: optimizer.fused"),
        ("[training]\ngrad_clip = 1.0\n", 2, "training.grad_clip", "unknown key", "here this is training.max_norm"),
        ("#\n[optim]\nlr = 1.0\n", 2, "[optim]", "unknown section", "nearest section: [optimizer]"),
        ("[zzz]\nq = 1.0\n", 1, "[zzz]", "unknown section", "sections: job, model, training"),
        ("steps = 4\n", 1, "steps", "outside any section", "steps belongs to another section: training.steps"),
        ("training = 4\n", 1, "training", "is a section, not a value; got 4", ""),
        (
            '[optimizer]\nlr = "3e-4"\n',
            2,
            "optimizer.lr",
            'expected a number >= 0, got the string "3e-4"',
            "without quotes",
        ),
        ("[optimizer]\nlr = true\n", 2, "optimizer.lr", "expected a number >= 0, got true", ""),
        ("[optimizer]\nlr = -1\n", 2, "optimizer.lr", "expected a number >= 0, got -1", ""),
        ("[optimizer]\nlr = inf\n", 2, "optimizer.lr", "expected a number >= 0, got inf", ""),
        ("[optimizer]\nlr = nan\n", 2, "optimizer.lr", "expected a number >= 0, got nan", ""),
        ("[training]\nsteps = true\n", 2, "training.steps", "expected an integer >= 1, got true", ""),
        ("[training]\nsteps = 1e3\n", 2, "training.steps", "expected an integer >= 1, got 1000.0", "integer: 1000"),
        ("[training]\nsteps = 0\n", 2, "training.steps", "expected an integer >= 1, got 0", ""),
        ("[training]\nseq_len = 0\n", 2, "training.seq_len", "expected an integer >= 1, got 0", ""),
        ("[training]\ncompile = 1\n", 2, "training.compile", "expected true or false, got 1", ""),
        ('[training]\ncompile = "False"\n', 2, "training.compile", "expected true or false", "without quotes: false"),
        ("[job]\ndescription = 5\n", 2, "job.description", "expected a string, got 5", 'with quotes: "5"'),
        ("[training]\nglobal_batch_size = 0\n", 2, "training.global_batch_size", "-1 or an integer >= 1, got 0", ""),
        (
            '[training]\ndataset = "c4test"\n',
            2,
            "training.dataset",
            'one of "c4", "c4_test"',
            'did you mean "c4_test"?',
        ),
        (
            '[training]\nmixed_precision_reduce = "float16"\n',
            2,
            "training.mixed_precision_reduce",
            '"float16" is not supported: float16 needs loss scaling',
            "",
        ),
        (
            '[float8]\nscaling_type_input = "delayed"\n',
            2,
            "float8.scaling_type_input",
            "gone from torchao",
            "",
        ),
        (
            '[activation_checkpoint]\nselective_ac_option = "0"\n',
            2,
            "activation_checkpoint.selective_ac_option",
            'got the string "0"',
            "",
        ),
        (
            "[training]\nreshard_after_forward = 1\n",
            2,
            "training.reshard_after_forward",
            "or an integer >= 2, got 1",
            "",
        ),
        ("[training]\nseed = -1\n", 2, "training.seed", "an integer >= 0 and <= 9223372036853727231, got -1", ""),
        (
            f"[training]\nseed = {2**63 - 1}\n",
            2,
            "training.seed",
            "<= 9223372036853727231, got 9223372036854775807",
            "",
        ),
        (f"[data]\nseed = {2**63}\n", 2, "data.seed", "<= 9223372036853727231, got 9223372036854775808", ""),
        ('[data]\nskip_steps = [1, "2"]\n', 2, "data.skip_steps", "an integer >= 1 or steps as", ""),
        ("[model]\noverrides = 3\n", 2, "model.overrides", "expected a table, got 3", ""),
        (
            '[[data.source]]\npath = "a"\nweihgt = 1.0\n',
            3,
            "data.source[0].weihgt",
            "unknown key",
            "nearest: weight",
        ),
        ('[[data.source]]\npath = "a"\nweight = 0\n', 3, "data.source[0].weight", "expected a number > 0, got 0", ""),
        ('[[data.source]]\nformat = "text"\n', 2, "data.source[0].path", "is missing", "File, folder or hub id"),
        ("[launch.environment]\nA = 1\n", 2, "launch.environment.A", "expected a string, got 1", ""),
        ("[model.rope_scaling]\nfactor = 0.5\n", 2, "model.rope_scaling.factor", "expected a number >= 1, got 0.5", ""),
        ('[comm]\nmode = "fake_backend"\n', 2, "comm.mode", '"fake_backend" is not supported', 'leave it at "default"'),
        ("[fault_tolerance]\nenable = true\n", 2, "fault_tolerance.enable", "true is not supported", "at false"),
        ('[model]\nconverters = ["float9"]\n', 2, "model.converters", 'no converter "float9"', ""),
        (
            "[parallelism]\ndisable_loss_parallel = 0\n",
            2,
            "parallelism.disable_loss_parallel",
            "true or false, got 0",
            "",
        ),
        ('[job]\nconfig_file = "x.toml"\n', 2, "job.config_file", "a file cannot name itself", ""),
    ],
)
def test_a_wrong_value_is_named_with_file_line_key_and_help(tmp_path, text, line, key, message, hint):
    problem = only(tmp_path, text)
    assert problem.where == f"{tmp_path / 'run.toml'}:{line}"
    assert problem.key == key
    assert message in problem.message
    assert hint in problem.hint
    assert bool(problem.hint) == bool(hint)


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(tmp_path):
    text = '[training]\nsteps = "5"\nfoo = 1\n[optimzer]\nlr = 1.0\n[checkpoint]\nstart = "from"\n'
    found = problems(tmp_path, text, "--training.compile", "perhaps", "--nosuch.key", "3")
    assert [(p.where.removeprefix(str(tmp_path)), p.key) for p in found] == [
        ("/run.toml:2", "training.steps"),
        ("/run.toml:3", "training.foo"),
        ("/run.toml:4", "[optimzer]"),
        ("/run.toml:7", "checkpoint.start"),
        ("command line", "nosuch.key"),
        ("command line", "training.compile"),
    ]


def test_problem_in_a_base_is_named_in_the_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "base.toml").write_text("[training]\nsteps = 0\n")
    (tmp_path / "a" / "run.toml").write_text('[job]\nextends = ["../base.toml"]\n[training]\nseq_len = 0\n')
    with pytest.raises(ConfigError) as caught:
        load_file("a/run.toml")
    assert [problem.where for problem in caught.value.problems] == ["a/run.toml:4", "base.toml:2"]


def test_report_is_readable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('[training]\nbatchsize = 4\n\n[optimizer]\nlr = "3e-4"\n')
    with pytest.raises(ConfigError) as caught:
        load_file("run.toml")
    assert str(caught.value) == (
        "2 problems in the config:\n"
        "  run.toml:2: training.batchsize: unknown key\n"
        "      nearest: training.batch_size\n"
        '  run.toml:5: optimizer.lr: expected a number >= 0, got the string "3e-4"\n'
        "      write it without quotes: 3e-4"
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[training]\nsteps = \n", "line 2"),
        ("[training]\nsteps = 1\nsteps = 2\n", "line 3"),
        ("[training\n", "line 1"),
        ("[training]\nseed = 007\n", "line 2"),
    ],
)
def test_broken_toml_is_named_with_its_line(tmp_path, text, what):
    problem = only(tmp_path, text)
    assert problem.where == str(tmp_path / "run.toml")
    assert "broken TOML" in problem.message
    assert what in problem.message


def test_missing_file_names_the_nearest_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "llama9_8b.toml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load(["--job.config_file", "lama9_8b.toml"])
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == ("command line", "job.config_file")
    assert problem.message == 'no file "lama9_8b.toml"'
    assert problem.hint == "nearest in train_configs/: llama9_8b.toml"


def test_folder_or_binary_instead_of_a_file(tmp_path):
    (tmp_path / "bin.toml").write_bytes(b"\xff\xfe\x00")
    for path, reason in ((tmp_path, "directory"), (tmp_path / "bin.toml", "not UTF-8")):
        with pytest.raises(ConfigError, match=reason):
            load_file(path)


def test_missing_base_and_circle_of_bases_are_named_where_they_are_written(tmp_path):
    assert "cannot read" in (problem := only(tmp_path, '\n[job]\nextends = ["nope.toml"]\n')).message
    assert problem.where.endswith("run.toml:3")
    (tmp_path / "b.toml").write_text('[job]\nextends = ["run.toml"]\n')
    problem = only(tmp_path, '[job]\nextends = ["b.toml"]\n')
    assert problem.where.endswith("b.toml:2")
    assert "run.toml -> b.toml -> run.toml" in problem.message


@pytest.mark.parametrize(
    ("flags", "key", "message"),
    [
        (["stray"], "", 'unexpected word "stray"'),
        (["--training.steps"], "--training.steps", "needs a value"),
        (["--training.steps", "1", "2"], "--training.steps", 'takes one value, got ["1", "2"]'),
        (["--training.steps", "many"], "training.steps", 'expected an integer >= 1, got the string "many"'),
        (["--training.steps=1.5"], "training.steps", "expected an integer >= 1, got 1.5"),
        (["--optimizer.lr", "nan"], "optimizer.lr", "expected a number >= 0, got nan"),
        (["--training.compile", "yes"], "training.compile", 'expected true or false, got the string "yes"'),
        (["--no-training.steps"], "--no-training.steps", "not a switch"),
        (["--no-training.compile", "true"], "--no-training.compile", "takes no value"),
        (["--trainig.steps", "4"], "trainig.steps", "unknown section [trainig]"),
        (["--training.stepps", "4"], "training.stepps", "unknown key"),
        (["--job.dialect", "2026"], "job.dialect", "belongs in the file"),
        (["--job.extends", "a.toml"], "job.extends", "belongs in a file"),
    ],
)
def test_wrong_flag_is_named(flags, key, message):
    with pytest.raises(ConfigError) as caught:
        load(flags)
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == ("command line", key)
    assert message in problem.message


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--lr_scheduler.decay_type", "plateau"], "lr_scheduler.decay_type"),
        (["--lr_scheduler.decay_type=constant", "--lr_scheduler.decay_ratio=0.1"], "lr_scheduler.decay_ratio"),
        (["--lr_scheduler.decay_type=constant", "--lr_scheduler.min_lr_factor=0.1"], "lr_scheduler.min_lr_factor"),
        (["--lr_scheduler.style=fsdp", "--lr_scheduler.decay_steps=5"], "lr_scheduler.decay_steps"),
        (["--lr_scheduler.min_lr=1.0"], "lr_scheduler.min_lr"),
        (
            ["--training.data_parallel_type=ddp", "--training.data_parallel_shard_degree=2"],
            "training.data_parallel_shard_degree",
        ),
        (["--experimental.enable_async_tensor_parallel"], "experimental.enable_async_tensor_parallel"),
        (["--checkpoint.last_save_in_hf"], "checkpoint.last_save_in_hf"),
        (["--checkpoint.start=from"], "checkpoint.start"),
        (["--checkpoint.start=resume"], "checkpoint.start"),
        (["--checkpoint.initial_load_in_hf"], "checkpoint.initial_load_in_hf"),
        (["--checkpoint.start=fresh", "--checkpoint.load_step=5"], "checkpoint.load_step"),
        (["--checkpoint.initial_load_path=/x"], "checkpoint.initial_load_path"),
        (
            ["--checkpoint.enable_checkpoint", "--checkpoint.start=fresh", "--checkpoint.initial_load_path=/x"],
            "checkpoint.initial_load_path",
        ),
        (["--guard.policy=rollback"], "guard.policy"),
        (["--guard.policy=skip", "--guard.max_skips=100"], "guard.max_skips"),
        (["--data.skip_steps=3,250-200"], "data.skip_steps"),
        (["--debug.deterministic_warn_only"], "debug.deterministic_warn_only"),
        (["--profiling.enable_profiling", "--profiling.profiler_active=8"], "profiling.profiler_active"),
        (["--profiling.enable_profiling", "--profiling.profile_freq=3"], "profiling.profile_freq"),
        (["--model.vocab_size=64", "--model.overrides.vocab_size=128"], "model.vocab_size"),
        (["--model.overrides.norm_type=layernorm"], "model.overrides.norm_type"),
        (["--model.rope_scaling=8", "--model.overrides.rope_scaling=4"], "model.overrides.rope_scaling"),
    ],
)
def test_contradictions_are_refused(flags, key):
    with pytest.raises(ConfigError) as caught:
        load(flags)
    assert [(p.where, p.key) for p in caught.value.problems] == [("command line", key)]


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
def test_two_ways_to_say_one_thing_exclude_each_other_in_a_layer(first, second):
    with pytest.raises(ConfigError) as caught:
        load([f"--{first}", f"--{second}"])
    (problem,) = caught.value.problems
    for written in (first, second):
        key, _, value = written.partition("=")
        assert f"{key} = {value}" in problem.message


VALUES = st.recursive(
    st.sampled_from(["0", "-1", "3", "1.5", "inf", "true", '""', '"x"', '"none"', "1979-05-27", "07:32:00"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2).map(lambda items: f"[{', '.join(items)}]"),
        inner.map(lambda item: f"{{path = {item}, x = {item}}}"),
    ),
    max_leaves=4,
)
NAMES = st.sampled_from(
    [*sorted(known_names()), *sorted(known_sections()), "x", "training.x", "x.y.z", '""', "data.source.x"]
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(NAMES, VALUES), max_size=3), flags=st.lists(st.tuples(NAMES, VALUES), max_size=2))
def test_nothing_written_ever_ends_in_another_error(tmp_path, pairs, flags):
    (tmp_path / "run.toml").write_text("".join(f"{name} = {value}\n" for name, value in pairs))
    words = [f"--{name}={value}" for name, value in flags if name not in ("job.config_file", "job.extends")]
    try:
        checked_plans([f"--job.config_file={tmp_path / 'run.toml'}", *words], world_size=2, training=True)
    except ConfigError as error:
        assert error.problems
        assert all(problem.message for problem in error.problems)


@pytest.mark.parametrize(
    "flag",
    ["--", "--.", "--=", "--training", "--training.", "--model.overrides.", "--model.overrides=3", "-x", "--no-"],
)
def test_odd_flags_are_problems_too(flag):
    with pytest.raises(ConfigError):
        load([flag])


@pytest.mark.parametrize(
    "text",
    [
        "[[training]]\nsteps = 1\n",
        "[training.steps]\nx = 1\n",
        "[data.source]\npath = 'x'\n",
        "quantize = 3\n",
        "[quantize.linear.float9]\nx = 1\n",
        "[training.dataloader]\nworkers = 1\n",
        "[optimizer]\ngroups = [1]\n",
        "[training]\nsteps = 1979-05-27\n",
    ],
)
def test_wrong_shapes_of_tables_are_problems_with_a_line(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(load_file(tmp_path / "run.toml"), world_size=1, shapes=SHAPES)
    assert all(problem.where.startswith(f"{tmp_path / 'run.toml'}:") for problem in caught.value.problems)
