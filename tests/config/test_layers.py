"""Defaults < extends < file < command line, and every form of a flag."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from titanlite.config.errors import ConfigError
from titanlite.config.keys import keys
from titanlite.config.load import find_config, load, load_file
from titanlite.config.toml import loads
from titanlite.resolve.load import resolve

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_each_layer_wins_over_the_one_below_and_says_so():
    Path("one.toml").write_text("[training]\nsteps = 1\nbatch_size = 1\nseq_len = 1\ngc_freq = 1\n")
    Path("two.toml").write_text("[training]\nbatch_size = 2\nseq_len = 2\ngc_freq = 2\n")
    Path("run.toml").write_text(
        '[job]\nextends = ["one.toml", "two.toml"]\n[training]\nseq_len = 3\ngc_freq = 3\n'
    )
    config = load(["--job.config_file", "run.toml", "--training.gc_freq", "4"])
    t = config.sections.training
    assert (t.max_norm, t.steps, t.batch_size, t.seq_len, t.gc_freq) == (1.0, 1, 2, 3, 4)
    fields = ("max_norm", "steps", "batch_size", "seq_len", "gc_freq")
    sources = [str(config.source(f"training.{field}")) for field in fields]
    assert sources == ["default", "one.toml:2", "two.toml:2", "run.toml:4", "command line"]
    assert config.files == ("one.toml", "two.toml", "run.toml")


def test_extends_looks_where_the_command_line_does():
    Path("mine").mkdir()
    Path("mine/run.toml").write_text('[job]\nextends = ["llama3_8b.toml"]\n')
    flavor = load_file("llama3_8b.toml").sections.model.flavor
    assert load_file("mine/run.toml").sections.model.flavor == flavor
    Path("mine/llama3_8b.toml").write_text("[training]\nseq_len = 3\n")
    assert load_file("mine/run.toml").sections.training.seq_len == 3


def test_extends_takes_no_file_outside_the_folders_of_configs():
    Path("train_configs").mkdir()
    Path("base.toml").write_text("[training]\nsteps = 7\n")
    Path("mine/deeper").mkdir(parents=True)
    Path("mine/deeper/run.toml").write_text('[job]\nextends = ["../base.toml"]\n')
    with pytest.raises(ConfigError, match=r'cannot read "../base.toml"'):
        load_file("mine/deeper/run.toml")


def test_one_base_reached_twice_is_no_circle():
    Path("base.toml").write_text("[training]\nsteps = 7\n")
    for name in ("x", "y"):
        Path(f"{name}.toml").write_text('[job]\nextends = ["base.toml"]\n')
    Path("run.toml").write_text('[job]\nextends = ["x.toml", "y.toml"]\n')
    assert load_file("run.toml").sections.training.steps == 7


def test_tables_merge_entry_by_entry():
    Path("base.toml").write_text("[model.overrides]\nn_layers = 2\ndim = 64\n")
    Path("run.toml").write_text(
        '[job]\nextends = ["base.toml"]\n[model.overrides]\ndim = 128\nrope_theta = 1e4\n'
    )
    for flags in (
        ["--model.overrides.n_layers", "3", "--model.overrides.tied", "true"],
        ["--model.overrides={n_layers = 3, tied = true}"],
        ["--model.overrides", '{"n_layers": 3, "tied": true}'],
    ):
        config = load_file("run.toml", flags)
        wanted = {"n_layers": 3, "dim": 128, "rope_theta": 1e4, "tied": True}
        assert config.sections.model.overrides == wanted
        assert config.source("model.overrides.dim").line == 4
        assert str(config.source("model.overrides.n_layers")) == "command line"


MEANS = (Path(__file__).parent / "means.txt").read_text().splitlines()


@pytest.mark.parametrize("row", [row for row in MEANS if row.startswith("--")])
def test_every_form_of_a_flag(row):
    flags, _, meant = row.partition(" => ")
    key = meant.partition(" = ")[0]
    (value,) = loads(meant)[key.partition(".")[0]].values()
    config = load(shlex.split(flags))
    assert config.value(key) == value
    assert type(config.value(key)) is type(value)
    assert str(config.source(key)) == "command line"


def test_none_takes_the_value_of_a_file_away():
    Path("run.toml").write_text("[training]\ntokens = 3\n")
    # The toolkits of SageMaker pass null as an empty word.
    for word in ("none", ""):
        config = load_file("run.toml", ["--training.tokens", word])
        assert config.sections.training.tokens is None


def test_bare_name_is_looked_up_in_train_configs():
    repository = find_config("debug_model.toml")
    assert repository is not None
    assert repository.parent.name == "train_configs"
    Path("train_configs").mkdir()
    Path("train_configs/debug_model.toml").write_text("[training]\nsteps = 3\n")
    assert load_file("debug_model.toml").sections.training.steps == 3
    Path("debug_model.toml").write_text("[training]\nsteps = 4\n")
    assert load_file("debug_model.toml").sections.training.steps == 4
    Path("mine").mkdir()
    Path("mine/run_a.toml").touch()
    with pytest.raises(ConfigError, match="nearest: mine/run_a.toml"):
        load_file("mine/run_b.toml")


def test_later_layer_replaces_another_way_of_saying_it():
    Path("run.toml").write_text("[training]\nsteps = 3\nwarmup_steps = 1\n")
    config = load_file("run.toml", ["--training.tokens", "100", "--lr_scheduler.warmup_ratio=0.5"])
    assert config.sections.training.tokens == 100
    assert not config.is_given("training.steps")
    assert any("replaces training.steps = 3" in note.text for note in config.notes)
    config = load_file("run.toml", ["--training.tokens", "none"])
    assert config.sections.training.steps == 3


def test_byte_order_mark_and_windows_line_ends():
    Path("run.toml").write_bytes(b"\xef\xbb\xbf[training]\r\n\r\nsteps = 3\r\n")
    config = load_file("run.toml")
    assert (config.sections.training.steps, config.source("training.steps").line) == (3, 3)


def test_written_out_config_loads_to_the_same_values():
    config = load(
        [
            "--training.tokens=100000",
            "--lr_scheduler.warmup_ratio=0.1",
            "--model.overrides.n_layers=2",
            '--job.description=say "hi"\n\\ é \x07 \U000e0067',
            "--optimizer.lr=1e-7",
            '--optimizer.groups=[{pattern = "norm", lr = 0.0}]',
            "--model.rope_scaling={factor = 8}",
        ]
    )
    Path("saved.toml").write_text(config.to_toml())
    again = load_file("saved.toml")
    for key in keys():
        if key != "job.config_file":
            assert again.value(key) == config.value(key), key
    assert "tokens = 100000  # command line" in config.to_toml()


def test_a_leading_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("base.toml").write_text('[training]\ndataset_path = "~/text"\n')
    Path("run.toml").write_text(
        '[job]\nextends = ["~/base.toml"]\ndump_folder = "~/runs"\nsave_config_file = "~/a.toml"\n'
        '[checkpoint]\nenable_checkpoint = true\nfolder = "~/kept"\n'
        'initial_load_path = "s3://~/x"\n'
    )
    flags = ["--job.config_file=~/run.toml", "--model.tokenizer_path=~/a~/t.model"]
    run = resolve(load(flags), 1)[1]
    found = (run.job.dump_folder, run.checkpoint.folder, run.training.dataset_path)
    assert found == tuple(f"{tmp_path}/{name}" for name in ("runs", "kept", "text"))
    assert run.checkpoint.initial_load_path == "s3://~/x"
    assert run.model.tokenizer_path == f"{tmp_path}/a~/t.model"
    assert run.job.save_config_file == f"{tmp_path}/a.toml"
    assert f'dump_folder = "{tmp_path}/runs"' in run.toml


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.flavor=8B"],
        ["--model.name=mixtral"],
        ["--job.config_file", "base.toml", "over.toml"],
        ["--job.config_file=extending.toml"],
    ],
)
def test_another_flavor_or_family_drops_the_overrides_of_the_layers_below(flags):
    Path("base.toml").write_text("[model.overrides]\nn_layers = 6\n")
    Path("over.toml").write_text('[model]\nflavor = "8B"\n[model.overrides]\ndim = 64\n')
    Path("extending.toml").write_text(
        '[job]\nextends = ["base.toml"]\n[model]\nflavor = "8B"\n[model.overrides]\ndim = 64\n'
    )
    if "--job.config_file" not in flags[0]:
        flags = ["--job.config_file=base.toml", *flags, "--model.overrides.dim=64"]
    config = load(flags)
    assert config.sections.model.overrides == {"dim": 64}
    assert config.sections.model.title.endswith(" with dim = 64")
    (note,) = config.notes
    assert note.text.endswith(": model.overrides.n_layers = 6 (base.toml:2)")


def test_the_same_flavor_again_keeps_the_overrides():
    Path("run.toml").write_text("[model.overrides]\nn_layers = 6\n")
    config = load_file("run.toml", ["--model.flavor=debugmodel", "--model.name=llama3"])
    assert config.sections.model.overrides == {"n_layers": 6}
    assert not config.notes
