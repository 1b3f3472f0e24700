"""Later and older names, the defaults they bring, and keys of features that other trainers have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titanlite.config.aliases import ALIASES
from titanlite.config.dialect import LATER_DEFAULTS
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.keys import keys
from titanlite.config.load import load, load_file, read_text
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import Config
from titanlite.config.toml import loads, quote
from titanlite.config.unsupported_keys import UNSUPPORTED

MEANS = (Path(__file__).parent / "means.txt").read_text().partition("\n\n")[2].splitlines()


def read(text: str) -> tuple[LoadedConfig, list[Problem]]:
    return read_text(text, Path("run.toml"))


@pytest.mark.parametrize("row", MEANS)
def test_other_name_means_the_key_and_marks_the_file_only_where_an_older_one_exists(row):
    name, _, meant = row.removeprefix("2026: ").partition(" => ")
    key = meant.partition(" = ")[0]
    (value,) = loads(meant)[key.partition(".")[0]].values()
    config, problems = read(f"\n{name}\n")
    assert not problems
    assert config.value(key) == value
    assert type(config.value(key)) is type(value)
    assert config.source(key).line == 2
    assert config.source(key).written == name.partition(" = ")[0]
    implies = row.startswith("2026: ")
    assert config.sections.job.dialect == ("2026" if implies else "2024")
    assert config.sections.checkpoint.keep_latest_k == (10 if implies else 0)


def test_every_other_name_is_one_of_a_key_and_each_conversion_has_a_row():
    rows = {row.removeprefix("2026: ").partition(" = ")[0] for row in MEANS}
    # Those of a converter are below.
    mx = {name for name in ALIASES if name.startswith("quantize.linear.mx.")}
    assert {name for name, alias in ALIASES.items() if alias.conversion} - mx <= rows
    assert {alias.key for alias in ALIASES.values()} <= set(keys())
    assert not set(ALIASES) & set(keys())


def written(tmp_path: Path, text: str, *flags: str) -> LoadedConfig:
    (tmp_path / "run.toml").write_text(text)
    return load_file(tmp_path / "run.toml", flags)


def texts(config: LoadedConfig) -> list[str]:
    return [note.text for note in config.notes]


def refused(text: str) -> Problem:
    (problem,) = read(text)[1]
    return problem


LATER = {
    "checkpoint.keep_latest_k": 10,
    "optimizer.implementation": "fused",
    "experimental.pipeline_parallel_microbatches": 4,
    "lr_scheduler.style": "titan-0.2",
}


def test_dialect_2026_brings_the_later_defaults_and_says_so(tmp_path):
    config = written(tmp_path, '[job]\ndialect = "2026"\n[training]\nbatch_size = 4\n')
    assert set(LATER) == set(LATER_DEFAULTS)
    assert {key: config.value(key) for key in LATER} == LATER
    # Weights-only last saves, the one dangerous default, are never implied.
    assert config.sections.checkpoint.model_weights_only is False
    source = config.source("checkpoint.keep_latest_k")
    assert (source.kind, source.line) == ("dialect", 2)
    said = texts(config)
    place = f"{tmp_path}/run.toml:2"
    assert any(place in text and "checkpoint.keep_latest_k = 10" in text for text in said)
    assert not any("unset" in text for text in said)


def test_defaults_that_differ_from_torchtitans_are_named_where_their_feature_is_on(tmp_path):
    text = (
        "[training]\nlocal_batch_size = 4\n[checkpoint]\nenable = true\n"
        "[validation]\nenable = true\nseq_len = 64\n"
    )
    assert (
        "unset, with titanlite's defaults: checkpoint.model_weights_only = false (there "
        "true), validation.freq = 100 (there 10)"
    ) in texts(written(tmp_path, text))


@pytest.mark.parametrize("flags", [[], ["--training.local_batch_size", "4", "--checkpoint.enable"]])
def test_only_a_file_brings_later_defaults(flags):
    config = load(flags)
    assert [config.value(key) for key in LATER] == [0, None, None, "titan"]
    assert config.sections.job.dialect == "2024"


def test_written_values_win_over_later_defaults(tmp_path):
    text = "[training]\nlocal_batch_size = 4\n[checkpoint]\nkeep_latest_k = 3\n"
    config = written(tmp_path, text, "--optimizer.implementation", "foreach")
    assert {key: config.value(key) for key in LATER} == {
        **LATER,
        "checkpoint.keep_latest_k": 3,
        "optimizer.implementation": "foreach",
    }
    config = written(tmp_path, f'[job]\ndialect = "2024"\n{text}')
    assert config.sections.optimizer.implementation is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("training.batch_size = 4", "training.local_batch_size = 8"),
        ("training.enable_loss_parallel = true", "parallelism.disable_loss_parallel = true"),
        ("optimizer.fused = true", 'optimizer.implementation = "foreach"'),
        (
            "experimental.pipeline_parallel_microbatches = 2",
            "parallelism.pipeline_parallel_microbatch_size = 2",
        ),
    ],
)
def test_two_names_with_different_values_in_one_layer_show_both(first, second):
    problem = refused(f"{first}\n{second}\n")
    assert (problem.where, problem.code) == ("run.toml:2", "given-twice")
    assert f"{first} (run.toml:1) and {second} (run.toml:2)" in problem.message


def test_two_names_with_one_value_or_in_two_layers_are_fine(tmp_path):
    text = "[training]\nbatch_size = 4\nlocal_batch_size = 4\n"
    assert written(tmp_path, text).sections.training.batch_size == 4
    assert (
        written(tmp_path, text, "--training.local_batch_size=5").sections.training.batch_size == 5
    )


def test_micro_batch_size_must_divide_the_batch(tmp_path):
    text = "[parallelism]\npipeline_parallel_microbatch_size = 3\n"
    assert refused(text).code == "does-not-fit"
    config = written(tmp_path, text, "--training.batch_size", "9")
    assert config.sections.experimental.pipeline_parallel_microbatches == 3
    # With a wrong batch size nothing is known about its parts.
    assert refused(f"training.batch_size = 0\n{text}").key == "training.batch_size"


OTHERS = {bool: 7, str: "other", int: 77, float: 0.7, list: ["other"], dict: {"a": "b"}}


def test_unsupported_keys_are_accepted_switched_off_and_refused_otherwise():
    for name, key in UNSUPPORTED.items():
        for value in key.off:
            config, problems = read(f"{name} = {quote(value)}\n")
            assert problems == [] and config.sections == Config(), name
        text = f"\n{name} = {quote(OTHERS[type(key.off[0])])}\n"
        # The table of a converter that is not named does not count.
        if (key.switch and key.switch not in keys()) or name.startswith("quantize.linear.mx."):
            continue
        if key.switch:
            is_flag = keys()[key.switch].default is False
            text += f"{key.switch} = {quote(True if is_flag else 2)}\n"
        problem = refused(text)
        assert (problem.where, problem.key, problem.code) == ("run.toml:2", name, "unsupported")
        assert key.reason in problem.message


def test_a_config_that_a_run_of_version_0_2_0_wrote_loads():
    # Run folders and checkpoints hold every key of their version, also those at their defaults.
    config = load_file(Path(__file__).with_name("of_0.2.0.toml"))
    assert config.value("training.steps") == 600


def test_unsupported_keys_of_a_feature_that_is_off_change_nothing_and_a_note_says_so():
    switched = [name for name, key in UNSUPPORTED.items() if key.switch]
    assert {"quantize.grouped_mm.float8.fqns", "fault_tolerance.sync_steps"} < set(switched)
    for name in switched:
        value = OTHERS[type(UNSUPPORTED[name].off[0])]
        config, problems = read(f"{name} = {quote(value)}\n")
        assert problems == [] and config.sections == Config(), name
        assert texts(config) == [f"no effect, as their features are off: {name}"]


def test_an_unsupported_key_is_refused_where_any_layer_switches_its_feature_on(tmp_path):
    name = "parallelism.expert_tensor_parallel_degree"
    text = f"{name} = 8\n"
    assert written(tmp_path, text).notes
    assert not written(tmp_path, text, f"--{name}=1").notes
    with pytest.raises(ConfigError, match="8 is not supported: experts are not divided by tensor"):
        written(tmp_path, text, "--parallelism.expert_parallel_degree=2")


def test_a_python_config_is_refused_with_the_page_that_helps():
    (problem,) = read_text("from torchtitan.trainer import Trainer\n", Path("llama.py"))[1]
    assert (problem.where, problem.code) == ("llama.py", "broken-toml")
    assert "from-torchtitan" in problem.remedy


# Names that count only where `model.converters` has their converter


ON = '[model]\nconverters = ["quantize.linear.mx"]\n'
OFF = "[model]\nconverters = []\n"
FILTERS = '[quantize.linear.mx]\nfilter_fqns = ["output", "wk"]\n'
FLOAT8 = """[quantize.linear.float8]
filter_fqns = ["wv"]
recipe_name = "rowwise"
enable_fsdp_float8_all_gather = true
"""


def recipe(name: str) -> str:
    return f'{ON}[quantize.linear.mx]\nrecipe_name = "{name}"\n'


def float8(text: str) -> dict[str, Any]:
    """Return the values of the float8 section that differ from its defaults."""
    config, problems = read(text)
    assert problems == []
    section = config.sections.float8
    fields = type(section)()
    names = section.__struct_fields__
    return {n: getattr(section, n) for n in names if getattr(section, n) != getattr(fields, n)}


MX = {"enable_float8_linear": True, "recipe_name": "mxfp8_floor"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # torchtitan's own default is mxfp8_cublas, whose scales are rounded down.
        (ON, MX),
        (recipe("mxfp8_cublas"), MX),
        (recipe("mxfp8_cublas_rceil"), MX | {"recipe_name": "mxfp8"}),
        (ON + FILTERS, MX | {"filter_fqns": ["output", "wk"]}),
        (
            ON + '[quantize.linear.mx]\nfilter_fqns = "output,wk"',
            MX | {"filter_fqns": ["output", "wk"]},
        ),
        # The table of the other converter does not count, on either side.
        (ON + FLOAT8 + FILTERS, MX | {"filter_fqns": ["output", "wk"]}),
        (ON + FLOAT8, MX),
        (OFF + FILTERS, {}),
        (
            '[model]\nconverters = ["float8"]\n' + FILTERS + '[float8]\nfilter_fqns = ["wo"]',
            {"enable_float8_linear": True, "filter_fqns": ["wo"]},
        ),
        # Own names beside theirs.
        (ON + "[float8]\nenable_float8_linear = true", MX),
        (
            ON + '[float8]\nrecipe_name = "mxfp8"\nemulate = true',
            MX | {"recipe_name": "mxfp8", "emulate": True},
        ),
        (
            '[float8]\nenable_float8_linear = true\nrecipe_name = "mxfp8"\n' + FILTERS,
            MX | {"recipe_name": "mxfp8", "filter_fqns": ["output", "wk"]},
        ),
        *(
            (f'{ON}[quantize.linear.mx]\nmxfp8_dim1_cast_kernel_choice = "{kernel}"', MX)
            for kernel in ("triton", "cuda", "torch")
        ),
    ],
)
def test_the_table_of_a_converter_counts_where_the_converter_is_named(text, wanted):
    assert float8(text) == wanted


def test_a_table_that_does_not_count_is_told():
    told = "no effect, by model.converters: quantize.linear."
    for text, table in ((OFF + FILTERS, "mx"), (ON + FLOAT8, "float8")):
        (note,) = (line for line in texts(read(text)[0]) if line.startswith("no effect"))
        assert note.startswith(f"{told}{table}.filter_fqns")


def test_flags_lie_over_the_table(tmp_path):
    flags = ("--float8.filter_fqns=wo", "--float8.recipe_name=mxfp8")
    config = written(tmp_path, ON + FILTERS, *flags)
    assert config.value("float8.filter_fqns") == ["wo"]
    assert config.value("float8.recipe_name") == "mxfp8"
    off = written(tmp_path, ON + FILTERS, "--model.converters=")
    assert off.value("float8.filter_fqns") == []
    assert not off.value("float8.enable_float8_linear")


@pytest.mark.parametrize(
    "text",
    [ON + FILTERS, OFF + FILTERS, recipe("mxfp8_cublas_rceil") + FLOAT8],
)
def test_the_shown_config_has_the_same_linears_in_the_same_numbers(text):
    shown = read(text)[0].to_toml(defaults=False)
    assert float8(shown) == float8(text)
    rows = [line for line in shown.split("\n") if not line.startswith("#")]
    assert not any("quantize" in row or "converters" in row for row in rows)
