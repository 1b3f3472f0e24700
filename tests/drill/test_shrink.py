"""The toy of a config: which of its features are left, and what is refused before anything starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite import exit_codes
from titanlite.config.errors import ConfigError
from titanlite.drill import shrink as room
from titanlite.drill.faults import REHEARSALS
from titanlite.drill.shrink import Toy
from titanlite.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "pyproject.toml"  # any file: nobody reads it here


def shrink(config: str, flags: list[str], ranks: int | None = None, compiled: bool = False) -> Toy:
    return room.shrink(config, flags, TEXT, ranks, compiled)


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "train_configs").glob("*.toml")))
def test_every_shipped_config_has_a_toy(file: str) -> None:
    toy = shrink(file, [])
    model = dict(toy.plans.model.overrides)
    assert (model["dim"], model["n_layers"], toy.plans.model.vocab_size) == (64, 2, 4096)
    assert toy.plans.checkpoint.enable and toy.plans.checkpoint.interval == 2 and toy.plans.train.steps == 8
    assert not toy.plans.compile.model and not toy.plans.observe.tensorboard_folder


def test_kinds_of_parallelism_are_kept_at_degree_two_as_far_as_ranks_go() -> None:
    degrees = ["--training.tensor_parallel_degree=8", "--experimental.pipeline_parallel_degree=4"]
    degrees += ["--training.data_parallel_replicate_degree=2", "--training.gradient_sync=last"]
    four = shrink("llama3_8b.toml", degrees)
    mesh = four.plans.mesh
    assert (four.ranks, mesh.tensor, mesh.pipeline, mesh.dp_replicate, mesh.dp_shard) == (4, 2, 2, 1, 1)
    assert "not rehearsed on 4 ranks: replicate_parallel" in four.notes
    eight = shrink("llama3_8b.toml", degrees, ranks=8).plans.mesh
    assert (eight.tensor, eight.pipeline, eight.dp_replicate, eight.dp_shard) == (2, 2, 2, 1)
    three = shrink("llama3_8b.toml", [], ranks=3).plans
    assert three.mesh.dp_shard == 3 and three.batch.global_batch_size == 6
    alone = shrink("llama3_8b.toml", degrees, ranks=1).plans.mesh
    assert (alone.tensor, alone.pipeline, alone.dp_replicate) == (1, 1, 1)


def test_features_stay_as_they_are() -> None:
    flags = ["--checkpoint.async_mode=async", "--activation_checkpoint.mode=full", "--optimizer.name=Adam"]
    flags += ["--training.gradient_sync=every", "--float8.enable_float8_linear", "--guard.policy=rollback"]
    flags += ["--checkpoint.milestones=[1, 5]"]
    flags += ["--float8.filter_fqns=attention.wk,w2,layers.30.,auto_filter_small_kn"]
    toy = shrink("llama3_8b.toml", flags).plans
    assert toy.checkpoint.async_mode == "async" and toy.activations.mode == "full" and toy.optimizer.name == "Adam"
    assert toy.shard.gradient_sync == "every" and toy.guard.policy == "rollback"
    assert toy.float8.keep == ("attention.wk", "w2") and not toy.float8.skip_small
    assert toy.checkpoint.milestones == ()
    assert toy.float8.enable and toy.float8.emulate and toy.shard.param_dtype == "bfloat16"
    grouped = dict(toy.model.overrides)
    assert (grouped["n_heads"], grouped["n_kv_heads"]) == (4, 2)
    plain = dict(shrink("llama2_7b.toml", []).plans.model.overrides)
    assert (plain["n_heads"], plain["n_kv_heads"]) == (4, 4)


def test_compile_stays_only_when_it_is_asked_for() -> None:
    flags = ["--training.compile", "--activation_checkpoint.mode=budget"]
    off = shrink("debug_model.toml", flags)
    assert not off.plans.compile.model and off.plans.activations.mode == "full"
    assert any("a budget needs the compiler" in note for note in off.notes)
    on = shrink("debug_model.toml", flags, compiled=True).plans
    assert on.compile.model and on.activations.mode == "budget"


def test_a_toy_writes_nowhere_but_in_its_folder(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(
        f'[job]\nsave_config_file = "{tmp_path}/saved.toml"\n[checkpoint]\nfolder = "{tmp_path}/precious"\n'
        "keep_latest_k = 1\n[metrics]\nenable_tensorboard = true\n[profiling]\nenable_profiling = true\n"
    )
    plans = shrink(str(own), []).plans
    assert plans.checkpoint.folder.endswith("outputs/checkpoint") and plans.checkpoint.keep_latest_k == 3
    assert plans.observe.save_config_file is None and plans.observe.tensorboard_folder is None
    assert str(tmp_path) not in re.sub(r"#.*", "", plans.config_toml)
    assert plans.data.path == str(TEXT)


def test_what_the_drill_decides_is_refused_as_a_flag() -> None:
    with pytest.raises(ConfigError, match="training.seq_len: is not to be set here"):
        shrink("debug_model.toml", ["--training.seq_len=64"])
    with pytest.raises(ConfigError, match=r"job.dump_folder"):
        shrink("debug_model.toml", ["--job.dump_folder=here"])
    with pytest.raises(ConfigError, match=r"training.epochs"):
        shrink("debug_model.toml", ["--training.epochs=2"])


def test_the_command_without_torch_lists_faults_and_refuses_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from titanlite.tools.cli import main; main(['drill', '--list']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*(one.name for one in REHEARSALS), "False"]
    for words, said in [
        (["nosuch.toml"], "nosuch.toml"),
        (["debug_model.toml", "--only", "flood"], "there is no fault 'flood'"),
        (["debug_model.toml", "--only", "kill-rank", "--ranks", "1"], "kill-rank needs 2 ranks, there is 1"),
        (["debug_model.toml", "--ranks", "0"], "expected an integer >= 1"),
        (["debug_model.toml", "--training.setps=3"], "training.setps"),
        ([], "name a TOML file"),
    ]:
        assert main(["drill", *words]) == exit_codes.CONFIG, words
        assert said in capsys.readouterr().err, words


def test_there_is_a_validation_for_a_signal_to_come_in() -> None:
    toy = shrink("llama3_8b.toml", ["--no-validation.enable"])
    assert toy.plans.validation.enable and any(line.startswith("validation is on") for line in toy.notes)
