"""The table [sweep]: which points it makes, their names and flags, and what is wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlite.config.errors import ConfigError
from titanlite.config.load import load, read
from titanlite.tools.sweep.members import Member, check_members
from titanlite.tools.sweep.points import Sweep, spread, sweep_of, to_toml

HEAD = "job.extends = ['debug_model.toml']\n[sweep]\n"


def sweep(tmp_path: Path, text: str, *flags: str, head: str = HEAD) -> Sweep:
    """The sweep of a file with this table."""
    file = tmp_path / "sweep.toml"
    file.write_text(head.replace("debug_model.toml", str(debug_model())) + text)
    config, problems = read([f"--job.config_file={file}", *flags])
    assert not problems
    return sweep_of(config, flags)


def debug_model() -> Path:
    return Path(__file__).parents[3] / "train_configs" / "debug_model.toml"


def refused(tmp_path: Path, text: str, *flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        sweep(tmp_path, text, *flags)
    return str(error.value).replace(str(tmp_path), "")


def test_a_grid_is_the_product_of_its_lists_and_seeds_are_innermost(tmp_path: Path) -> None:
    found = sweep(
        tmp_path,
        '"training.seed" = [0, 1]\n"optimizer.lr" = [1e-3, 3e-3]\n"training.max_norm" = [1.0]\n',
    )
    assert found.keys == ["optimizer.lr", "training.max_norm", "training.seed"]
    assert [member.name for member in found.members] == [
        "lr=0.001,max_norm=1,seed=0",
        "lr=0.001,max_norm=1,seed=1",
        "lr=0.003,max_norm=1,seed=0",
        "lr=0.003,max_norm=1,seed=1",
    ]
    assert found.members[2] == Member(
        "lr=0.003,max_norm=1,seed=0",
        ["--optimizer.lr=0.003", "--training.max_norm=1.0", "--training.seed=0"],
    )
    assert found.points[0].without_seed == found.points[1].without_seed
    assert found.points[1].without_seed != found.points[2].without_seed


def test_keys_without_quotes_and_names_of_torchtitan_are_the_same_keys(tmp_path: Path) -> None:
    found = sweep(tmp_path, "optimizer.lr = [1e-3]\ntraining.local_batch_size = [2, 4]\n")
    assert found.keys == ["optimizer.lr", "training.batch_size"]
    assert found.members[1].flags == ["--optimizer.lr=0.001", "--training.local_batch_size=4"]
    assert found.points[1].values == {"optimizer.lr": 1e-3, "training.batch_size": 4}


def test_points_change_keys_together_and_are_combined_with_the_other_keys(tmp_path: Path) -> None:
    found = sweep(
        tmp_path,
        """optimizer.lr = [1e-3, 3e-3]
[[sweep.points]]
model.overrides.dim = 32
model.overrides.n_heads = 2
[[sweep.points]]
"model.overrides.dim" = 64
"model.overrides.n_heads" = 4
""",
    )
    assert [tuple(point.values.values()) for point in found.points] == [
        (32, 2, 1e-3),
        (32, 2, 3e-3),
        (64, 4, 1e-3),
        (64, 4, 3e-3),
    ]


def test_ranges_keep_their_ends_and_have_equal_distances() -> None:
    assert spread("log", 1e-4, 1e-2, 3, False) == [1e-4, 1e-3, 1e-2]
    assert spread("log", 1e-4, 1e-2, 5, False) == [1e-4, 0.000316228, 1e-3, 0.00316228, 1e-2]
    assert spread("linear", 0, 1, 5, False) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert spread("log", 1 / 3, 2 / 3, 2, False) == [1 / 3, 2 / 3]
    assert spread("log", 64, 1024, 5, True) == [64, 128, 256, 512, 1024]
    assert spread("linear", 1, 3, 5, True) == [1, 2, 3]


def test_a_range_of_a_key_of_integers_has_integers(tmp_path: Path) -> None:
    found = sweep(tmp_path, "training.batch_size = { log = [1, 16], n = 5 }\n")
    assert [member.flags[0] for member in found.members] == [
        f"--training.batch_size={size}" for size in (1, 2, 4, 8, 16)
    ]


def test_a_range_with_fewer_integers_than_values_is_refused(tmp_path: Path) -> None:
    message = r"n = 5 gives 4 different integers: \[1, 2, 3, 4\]"
    with pytest.raises(ConfigError, match=message) as error:
        sweep(tmp_path, "training.batch_size = { log = [1, 4], n = 5 }\n")
    assert "set n = 4 or less, or give a list" in str(error.value)
    found = sweep(tmp_path, "training.batch_size = { log = [1, 4], n = 4 }\n")
    assert [point.values["training.batch_size"] for point in found.points] == [1, 2, 3, 4]


def test_lists_texts_switches_and_tables_reach_the_run_as_they_were_written(
    tmp_path: Path,
) -> None:
    found = sweep(
        tmp_path,
        """"metrics.enable_progress" = [true, false]
"training.dataset" = ["c4_test", "c4_validation"]
"checkpoint.exclude_from_loading" = [["optimizer"], ["optimizer", "rng"]]
"model.overrides.rope_scaling" = [{ factor = 8.0 }, "none"]
""",
    )
    assert len({member.name for member in found.members}) == 16
    for point in found.points:
        config, problems = read([*point.member.flags])
        assert not problems
        assert config.value("metrics.enable_progress") is point.values["metrics.enable_progress"]
        assert config.value("training.dataset") == point.values["training.dataset"]
        excluded = config.value("checkpoint.exclude_from_loading")
        assert excluded == point.values["checkpoint.exclude_from_loading"]
        scaling = config.value("model.overrides")["rope_scaling"]
        assert scaling == point.values["model.overrides.rope_scaling"]


def test_names_of_hostile_values_are_plain_and_differ(tmp_path: Path) -> None:
    found = sweep(tmp_path, f'"job.description" = ["a/../b", "a b", "a;b", "{"x" * 300}"]\n')
    names = [member.name for member in found.members]
    assert names[0] == "description=a_.._b"
    assert names[1] == "description=a_b"
    assert names[2].startswith("description=a_b-")
    assert len(names[3]) < 60
    check_members(found.members, [f"--job.config_file={debug_model()}"], tmp_path, 1)


def test_the_last_file_with_a_table_counts(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[sweep]\noptimizer.lr = [1e-3]\n")
    (tmp_path / "top.toml").write_text(
        "job.extends = ['base.toml']\n[sweep]\ntraining.steps = [1, 2]\n"
    )
    config, _ = read([f"--job.config_file={tmp_path / 'top.toml'}"])
    assert sweep_of(config).keys == ["training.steps"]
    (tmp_path / "plain.toml").write_text("job.extends = ['base.toml']\n")
    config, _ = read([f"--job.config_file={tmp_path / 'plain.toml'}"])
    assert sweep_of(config).keys == ["optimizer.lr"]


def test_a_table_written_again_makes_the_same_points(tmp_path: Path) -> None:
    text = """metric = "training_loss"
"optimizer.lr" = { log = [1e-3, 1e-2], n = 3 }
"job.description" = ["a \\"quoted\\" text", "b"]
[[sweep.points]]
"model.overrides.dim" = 32
[[sweep.points]]
"model.overrides.dim" = 64
"""
    first = sweep(tmp_path, text)
    config, _ = read([f"--job.config_file={tmp_path / 'sweep.toml'}"])
    assert config.sweep is not None
    again = sweep(tmp_path, "", head=to_toml(config.sweep))
    assert again == first


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ":2: [sweep]: names no key to vary"),
        ("optimizer.lrr = [1]\n", ":3: [sweep] optimizer.lrr: unknown key\n      nearest: opti"),
        ("lr = [1]\n", "[sweep] lr: unknown key outside any section\n      lr belongs to another"),
        ('"optimizer.lr" = 1e-3\n', "expected a list of values, { log = [LOW, HIGH], n = N }"),
        ('"optimizer.lr" = []\n', ':3: [sweep] "optimizer.lr": has no values'),
        ('"optimizer.lr" = [1e-3, 0.001]\n', "0.001 is given twice"),
        ('"optimizer.lr" = [1e-3, -1]\n', ':3: [sweep] "optimizer.lr": expected a number >= 0'),
        ('"optimizer.lr" = { log = [0, 1], n = 3 }\n', "log: expected two different numbers above"),
        ('"optimizer.lr" = { log = [1, 2], n = 1 }\n', "n: expected an integer from 2 to 10,000"),
        ('"optimizer.lr" = { log = [1, 2] }\n', "got {log = [1, 2]}"),
        ('"optimizer.lr" = { linear = [1, nan], n = 3 }\n', "two different numbers, got [1, nan]"),
        ('"optimizer.lr" = { logs = [1, 2], n = 3 }\n', "got {logs = [1, 2], n = 3}"),
        ('"job.dump_folder" = ["a", "b"]\n', "each run has its own folder; --folder names"),
        ('"job.config_file" = [["a"]]\n', "a point cannot name another file"),
        ('"launch.nodes" = [1, 2]\n', "all runs of a sweep are launched in the same way"),
        ('"training.seed" = { linear = [0, 20000], n = 10000 }\n"training.steps" = [1, 2]\n', ""),
        ('metric = "loss"\n"training.steps" = [1]\n', "[sweep] metric: expected one of"),
        ('"training.batch_size" = [1]\n"training.local_batch_size" = [2]\n', "is varied twice"),
        ("points = 3\n", "[sweep] points: expected tables, got 3"),
        ("[[sweep.points]]\n", "points[0]: sets no key"),
        (
            "[[sweep.points]]\noptimizer.lr = 1\n[[sweep.points]]\noptimizer.lr = 1\n",
            ":5: [sweep] points[1]: is a point that stands above already",
        ),
        (
            "[[sweep.points]]\noptimizer.lr = 1\n[[sweep.points]]\ntraining.steps = 1\n",
            "all points must set the same keys; the first one differs in optimizer.lr, training.st",
        ),
        (
            "optimizer.lr = [1]\n[[sweep.points]]\noptimizer.lr = 2\n",
            "optimizer.lr is varied twice: alone and in points",
        ),
        (
            "[[sweep.points]]\noptimizer.lr = [1, 2]\n",
            ":4: [sweep] points[0].optimizer.lr: expected a number",
        ),
    ],
)
def test_what_is_wrong_in_a_table_is_told_with_its_line(
    text: str, wanted: str, tmp_path: Path
) -> None:
    wanted = wanted or "10000 x 2 = 20,000 runs; at most 10,000 are taken"
    assert wanted in refused(tmp_path, text)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = refused(tmp_path, "optimizer.lrr = [1]\ntraining.steps = []\nmetric = 3\n")
    assert text.startswith("3 problems in the config:")


def test_a_flag_of_a_key_that_varies_is_refused(tmp_path: Path) -> None:
    text = refused(tmp_path, "optimizer.lr = [1e-3]\n", "--optimizer.lr=1")
    assert "command line: --optimizer.lr: optimizer.lr cannot be set here" in text
    assert sweep(tmp_path, "optimizer.lr = [1e-3]\n", "--training.steps=5").points


def test_a_file_without_a_table_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"debug_model.toml: \[sweep\]: there is no table"):
        sweep_of(load(["--job.config_file=debug_model.toml"]))


def test_a_run_of_a_file_with_a_table_has_the_files_own_values(tmp_path: Path) -> None:
    sweep(tmp_path, "optimizer.lr = [1e-3]\n")
    config = load([f"--job.config_file={tmp_path / 'sweep.toml'}"])
    assert config.value("optimizer.lr") == 3e-3
    (note,) = config.notes
    assert note.endswith(
        "sweep.toml:2: [sweep] is for `titanlite sweep`; this run has the values of the files and "
        "of the command line"
    )
    assert "[sweep]" not in config.to_toml()
    assert not load(["--job.config_file=debug_model.toml"]).notes


def test_a_value_named_sweep_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("sweep = 3\n")
    _, problems = read([f"--job.config_file={tmp_path / 'a.toml'}"])
    assert [str(problem).rpartition("/")[2] for problem in problems] == [
        "a.toml:1: sweep: is a section, not a value; got 3"
    ]
