"""Later and older names, the defaults they bring, and keys of features that other trainers have."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlite.config.aliases import ALIASES
from titanlite.config.dialect import LATER_DEFAULTS
from titanlite.config.errors import ConfigError, Problem
from titanlite.config.keys import keys
from titanlite.config.load import load, load_file, read_text
from titanlite.config.loaded import LoadedConfig
from titanlite.config.sections import Config
from titanlite.config.toml import quote
from titanlite.config.unsupported_keys import UNSUPPORTED

PIPELINE = "experimental.pipeline_parallel"

#: (as written, the key here, its value, whether it marks a file as of the later dialect)
ROWS = [
    ("training.local_batch_size = 3", "training.batch_size", 3, True),
    ("lr_scheduler.warmup_steps = 3", "training.warmup_steps", 3, True),
    ("training.data_parallel_degree = 3", "training.data_parallel_shard_degree", 3, False),
    ('training.fp8_linear = ""', "float8.enable_float8_linear", False, False),
    ('training.fp8_linear = "dynamic"', "float8.enable_float8_linear", True, False),
    ('training.dataset = "c4_mini"', "training.dataset", "c4_test", False),
    ('model.norm_type = "compiled_rmsnorm"', "model.norm_type", "rmsnorm", False),
    ("parallelism.disable_loss_parallel = true", "training.enable_loss_parallel", False, True),
    ("training.disable_loss_parallel = true", "training.enable_loss_parallel", False, True),
    ("parallelism.pipeline_parallel_microbatch_size = 2", f"{PIPELINE}_microbatches", 4, True),
    ("experimental.pipeline_parallel_microbatch_size = 4", f"{PIPELINE}_microbatches", 2, True),
    (
        'parallelism.pipeline_parallel_split_points = ["layers.1"]',
        f"{PIPELINE}_split_points",
        ["layers.1"],
        True,
    ),
    (
        'parallelism.module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1"], '
        '["layers.2", "norm"]]',
        f"{PIPELINE}_split_points",
        ["layers.1", "layers.2"],
        True,
    ),
    (
        'experimental.module_fqns_per_model_part = [["layers.0"], ["layers.1"]]',
        f"{PIPELINE}_split_points",
        ["layers.1"],
        True,
    ),
    ('model.hf_assets_path = "x"', "model.tokenizer_path", "x", True),
    ("metrics.disable_color_printing = true", "metrics.enable_color_printing", False, True),
    ("metrics.save_for_all_ranks = true", "metrics.rank_0_only", False, True),
    ("optimizer.fused = true", "optimizer.implementation", "fused", False),
    ("optimizer.fused = false", "optimizer.implementation", "foreach", False),
    ('model.converters = ["float8"]', "float8.enable_float8_linear", True, True),
    ('model.converters = ["quantize.linear.float8"]', "float8.enable_float8_linear", True, True),
    ('model.converters = ["quantize.linear.mx"]', "float8.enable_float8_linear", True, True),
    ('model.converters = "float8"', "float8.enable_float8_linear", True, True),
    ('model.converters = ""', "float8.enable_float8_linear", False, True),
    ('float8.filter_fqns = "output"', "float8.filter_fqns", ["output"], False),
    ('quantize.linear.float8.filter_fqns = "a.b, c"', "float8.filter_fqns", ["a.b", "c"], False),
    (
        'experimental.pipeline_parallel_split_points = "layers.1"',
        f"{PIPELINE}_split_points",
        ["layers.1"],
        False,
    ),
    (
        'checkpoint.exclude_from_loading = "a,b"',
        "checkpoint.exclude_from_loading",
        ["a", "b"],
        False,
    ),
    ("model.converters = []", "float8.enable_float8_linear", False, True),
    ('quantize.linear.float8.filter_fqns = ["output"]', "float8.filter_fqns", ["output"], False),
    ("lr_scheduler.lr_min = 0.1", "lr_scheduler.min_lr_factor", 0.1, False),
    ('activation_checkpoint.mode = "memory_budget"', "activation_checkpoint.mode", "budget", False),
    ("training.dataloader.prefetch_factor = 3", "data.prefetch", 3, False),
    (
        'parallelism.fsdp_reshard_after_forward = "never"',
        "training.reshard_after_forward",
        "never",
        False,
    ),
    (
        'training.fsdp_reshard_after_forward = "never"',
        "training.reshard_after_forward",
        "never",
        False,
    ),
    ("optimizer.weight_decay = 0.2", "optimizer.weight_decay", 0.2, False),
]


@pytest.mark.parametrize(("written", "key", "value", "implies"), ROWS)
def test_other_name_means_the_key_and_marks_the_file_only_where_an_older_one_exists(
    tmp_path, written, key, value, implies
):
    needed = "training.compile = true\n" if value == "budget" else ""
    (tmp_path / "run.toml").write_text(f"\n{written}\n{needed}")
    config = load_file(tmp_path / "run.toml")
    assert config.value(key) == value
    assert type(config.value(key)) is type(value)
    assert config.source(key).line == 2
    assert config.source(key).written == written.partition(" = ")[0]
    assert config.sections.job.dialect == ("2026" if implies else "2024")
    assert config.sections.checkpoint.keep_latest_k == (10 if implies else 0)


def test_every_other_name_is_one_of_a_key_and_each_conversion_has_a_row():
    rows = {written.partition(" = ")[0] for written, *_ in ROWS}
    # Those of a converter are in test_converters.py.
    names = {name for name, alias in ALIASES.items() if alias.conversion}
    assert {name for name in names if not name.startswith("quantize.linear.mx.")} <= rows
    assert {alias.key for alias in ALIASES.values()} <= set(keys())
    assert not set(ALIASES) & set(keys())


def written(tmp_path: Path, text: str, *flags: str) -> LoadedConfig:
    (tmp_path / "run.toml").write_text(text)
    return load_file(tmp_path / "run.toml", flags)


def refused(text: str) -> Problem:
    (problem,) = read_text(text, Path("run.toml"))[1]
    return problem


LATER = {
    "checkpoint.keep_latest_k": 10,
    "optimizer.implementation": "fused",
    "metrics.enable_color_printing": True,
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
    assert any(
        f"{tmp_path / 'run.toml'}:2" in note and "checkpoint.keep_latest_k" in note
        for note in config.notes
    )


@pytest.mark.parametrize("flags", [[], ["--training.local_batch_size", "4", "--checkpoint.enable"]])
def test_only_a_file_brings_later_defaults(flags):
    config = load(flags)
    assert [config.value(key) for key in LATER] == [0, None, None, None, "titan"]
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
    assert config.sections.metrics.enable_color_printing is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("training.batch_size = 4", "training.local_batch_size = 8"),
        ("training.enable_loss_parallel = true", "parallelism.disable_loss_parallel = true"),
        ("training.compile = false", "compile.enable = true"),
        ("float8.enable_float8_linear = false", 'model.converters = ["float8"]'),
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


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ('["a"]', "wrong-type"),
        ("[[]]", "out-of-range"),
        ('[["layers.1"], ["layers.0"]]', "unsupported"),
        ('[["layers.0"], ["layers.2"]]', "unsupported"),
    ],
)
def test_model_parts_must_be_lists_that_hold_all_layers_in_order(parts, code):
    problem = refused(f"[parallelism]\nmodule_fqns_per_model_part = {parts}\n")
    assert (problem.where, problem.code) == ("run.toml:2", code)


OTHERS = {bool: 7, str: "other", int: 77, float: 0.7, list: ["other"], dict: {"a": "b"}}


def test_unsupported_keys_are_accepted_switched_off_and_refused_otherwise():
    for name, key in UNSUPPORTED.items():
        for value in key.off:
            config, problems = read_text(f"{name} = {quote(value)}\n", Path("run.toml"))
            assert problems == [] and config.sections == Config(), name
        text = f"\n{name} = {quote(OTHERS[type(key.off[0])])}\n"
        # The table of a converter that is not named does not count.
        if (key.switch and key.switch not in keys()) or name.startswith("quantize.linear.mx."):
            continue
        if key.switch:
            text += switched_on(key.switch)
        problem = refused(text)
        assert (problem.where, problem.key, problem.code) == ("run.toml:2", name, "unsupported")
        assert key.reason in problem.message


def switched_on(switch: str) -> str:
    return f"{switch} = {quote(True if keys()[switch].default is False else 2)}\n"


def test_a_config_that_a_run_of_version_0_2_0_wrote_loads():
    # Run folders and checkpoints hold every key of their version, also those at their defaults.
    config = load_file(Path(__file__).with_name("of_0.2.0.toml"))
    assert config.value("training.steps") == 600


def test_unsupported_keys_of_a_feature_that_is_off_change_nothing_and_a_note_says_so():
    switched = {name: key for name, key in UNSUPPORTED.items() if key.switch}
    assert {"quantize.grouped_mm.float8.fqns", "fault_tolerance.sync_steps"} < set(switched)
    assert not UNSUPPORTED["fault_tolerance.enable"].switch
    for name, key in switched.items():
        value = OTHERS[type(key.off[0])]
        config, problems = read_text(f"{name} = {quote(value)}\n", Path("run.toml"))
        assert problems == [] and config.sections == Config(), name
        assert config.notes == (f"no effect, as their features are off: {name}",)


def test_an_unsupported_key_is_refused_where_any_layer_switches_its_feature_on(tmp_path):
    name = "parallelism.expert_tensor_parallel_degree"
    text = f"{name} = 8\n"
    assert written(tmp_path, text).notes
    assert not written(tmp_path, text, f"--{name}=1").notes
    with pytest.raises(ConfigError, match="8 is not supported: experts are not divided by tensor"):
        written(tmp_path, text, "--parallelism.expert_parallel_degree=2")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("quantize.grouped_mm.float8", "products of experts stay in high precision here"),
        ("quantize.grouped_mm.mx", "products of experts stay in high precision here"),
        ("mx", "that is torchtitan 0.1.0's name; the converter of 0.2.x is quantize.linear.mx"),
    ],
)
def test_a_converter_that_titanlite_lacks_is_refused_once_with_its_reason(name, reason):
    text = f'model.converters = ["float8", "{name}"]\n[quantize.linear.mx]\nfilter_fqns = ["a"]\n'
    problem = refused(text)
    assert (problem.key, problem.code) == ("model.converters", "unsupported")
    assert f"{name}: {reason}" in problem.message


def test_a_run_with_torchft_is_refused_once(tmp_path):
    text = """\
[job]
custom_config_module = "torchtitan.components.ft.config"
[fault_tolerance]
enable = true
sync_steps = 10
semi_sync_method = "diloco"
"""
    problem = refused(text)
    assert (problem.where, problem.key) == ("run.toml:4", "fault_tolerance.enable")
    config = written(tmp_path, text.replace("true", "false"))
    names = "fault_tolerance.sync_steps, fault_tolerance.semi_sync_method"
    assert config.notes == (f"no effect, as their features are off: {names}",)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("flux", "makes images, and titanlite trains on text"),
        ("vlm", "reads images, and titanlite trains on text"),
        ("deepseek_v2", "is a prototype of torchtitan 0.1.0 with a loop of its own"),
    ],
)
def test_a_file_for_a_model_of_something_else_is_refused_in_one_line(name, reason):
    text = f'[training]\nimg_size = 256\n[model]\nname = "{name}"\n[encoder]\nt5 = "x"\n'
    problem = refused(text)
    assert (problem.where, problem.key) == ("run.toml:4", "model.name")
    assert problem.code == "unsupported"
    assert f'"{name}" is not supported: it {reason}' in problem.message


@pytest.mark.parametrize(
    ("file", "text", "message", "hint"),
    [
        ("llama.py", "from torchtitan.trainer import Trainer\n", "broken TOML", "from-torchtitan"),
        ("run.toml", "steps = run()\n", "broken TOML", ""),
    ],
)
def test_a_python_config_is_refused_with_the_page_that_helps(file, text, message, hint):
    (problem,) = read_text(text, Path(file))[1]
    assert problem.where == file
    assert message in problem.message
    assert hint in problem.remedy
