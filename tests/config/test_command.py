"""`titanlite config check` and `titanlite config explain`: what they print, how they end, how long they take."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import titanlite
from titanlite.config.keys import keys
from titanlite.config.load import find_config
from titanlite.tools.cli import main, split_flags

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("WORLD_SIZE", "NGPU"):
        monkeypatch.delenv(name, raising=False)


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = main(words)
    out, err = capsys.readouterr()
    return status, out, err


def test_check_shows_what_a_run_would_do(capsys, tmp_path):
    (tmp_path / "run.toml").write_text(
        "[training]\nsteps = 20\nseq_len = 100\nbatch_size = 2\nglobal_batch_size = 16\n"
        "[experimental]\nenable_compiled_autograd = true\n"
    )
    status, out, err = run(capsys, "config", "check", str(tmp_path / "run.toml"), "--world-size", "4")
    assert (status, err) == (0, "")
    assert out.startswith("OK\n")
    for text in (
        "16 sequences of 100 tokens, 2 micro-batches of 2 per rank",
        "20, 32,000 tokens",
        "4 (--world-size), data_parallel_shard 4",
        "accumulation = 2 micro-batches: global_batch_size 16 / (batch_size 2 * 4 data-parallel ranks)",
        "warning: the warm-up of 200 steps is shortened to 20",
        f"training will refuse: {tmp_path / 'run.toml'}:7: experimental.enable_compiled_autograd = true",
    ):
        assert text in out
    assert "\x1b[" not in out


def test_check_counts_the_parameters_of_a_named_size(capsys):
    assert "llama3 8B, 8,030,261,248 parameters" in run(capsys, "config", "check", "--model.flavor", "8B")[1]


def test_check_of_a_wrong_file_prints_all_and_exits_2(capsys, tmp_path):
    (tmp_path / "run.toml").write_text('[training]\nstep = 20\n[optimizer]\nlr = "1"\n')
    status, out, err = run(capsys, "config", "check", str(tmp_path / "run.toml"))
    assert (status, out) == (2, "")
    assert err.startswith("2 problems in the config:\n")
    assert f"{tmp_path / 'run.toml'}:2: training.step: unknown key\n      nearest: training.steps" in err


def test_check_strict_fails_for_what_would_stop_training(capsys, tmp_path):
    assert run(capsys, "config", "check", "--experimental.enable_compiled_autograd")[0] == 0
    status, _, err = run(capsys, "config", "check", "--strict", "--experimental.enable_compiled_autograd")
    assert status == 2 and "not built yet" in err
    flag = f"--model.tokenizer_path={tmp_path / 'no.model'}"
    status, out, _ = run(capsys, "config", "check", flag)
    assert status == 0 and "no file or folder" in out
    status, _, err = run(capsys, "config", "check", flag, "--strict")
    assert status == 2 and f'model.tokenizer_path: no file or folder "{tmp_path / "no.model"}"' in err


def test_world_size_comes_from_the_flag_the_environment_or_what_fits(capsys, monkeypatch):
    flags = ("config", "check", "--training.data_parallel_shard_degree", "3")
    assert "3 (the fewest that fit" in run(capsys, *flags)[1]
    monkeypatch.setenv("NGPU", "6")
    status, _, err = run(capsys, *flags)
    assert status == 2 and "data_parallel_shard 3 = 3, which is not the world size 6" in err
    assert "3 (--world-size)" in run(capsys, *flags, "--world-size", "3")[1]
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "3 (WORLD_SIZE of the environment)" in run(capsys, *flags)[1]
    assert run(capsys, *flags, "--world-size", "0")[0] == 2


def test_check_shows_copies_of_the_weights(capsys):
    flags = ("--training.data_parallel_replicate_degree=2", "--world-size", "4")
    assert (
        "4 (--world-size), data_parallel_replicate 2, data_parallel_shard 2"
        in run(capsys, "config", "check", *flags)[1]
    )


def test_check_reports_wrong_keys_and_wrong_names_at_once(capsys):
    status, out, err = run(capsys, "config", "check", "--training.setps", "3", "--model.flavor", "debugmodle")
    assert (status, out) == (2, "")
    assert err.startswith("2 problems in the config:\n")
    assert "training.setps: unknown key" in err and 'no flavor "debugmodle"' in err


def test_check_strict_reports_unbuilt_features_and_missing_files_at_once(capsys):
    flags = ("--experimental.enable_compiled_autograd", "--model.tokenizer_path", "/nope/t.model")
    status, _, err = run(capsys, "config", "check", "--strict", *flags)
    assert status == 2 and err.startswith("2 problems in the config:\n")
    assert "compiled autograd" in err and 'no file or folder "/nope/t.model"' in err


def test_check_refuses_numbers_that_make_no_decoder(capsys):
    status, _, err = run(capsys, "config", "check", "--model.overrides.n_heads", "7")
    assert status == 2 and "n_heads = 7 does not divide dim = 256" in err


def test_settings_of_what_is_off_are_named(capsys):
    out = run(capsys, "config", "check", "--checkpoint.interval=5", "--validation.freq=3")[1]
    assert "note: no effect, as what they belong to is off: validation.freq, checkpoint.interval" in out
    # The shipped file says itself, two lines above, that checkpoints are off; and a path's text may have a name.
    assert "no effect" not in run(capsys, "config", "check", "debug_model.toml")[1]
    assert "no effect" not in run(capsys, "config", "check", "llama3_8b.toml")[1]
    out = run(capsys, "config", "check", "--no-metrics.rank_0_only")[1]
    assert "no effect, as what they belong to is off: metrics.rank_0_only" in out
    assert (
        "no effect" not in run(capsys, "config", "check", "--no-metrics.rank_0_only", "--metrics.enable_tensorboard")[1]
    )


@pytest.mark.parametrize("path", sorted((REPOSITORY / "train_configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_config_is_right(capsys, path):
    assert run(capsys, "config", "check", str(path))[0] == 0


def test_explain_shows_every_key_with_value_source_and_meaning(capsys, tmp_path):
    (tmp_path / "run.toml").write_text("[training]\nlocal_batch_size = 3\n[model.overrides]\ndim = 64\n")
    status, out, _ = run(capsys, "config", "explain", str(tmp_path / "run.toml"), "--training.steps=5")
    assert status == 0
    lines = out.splitlines()
    for key in keys().values():
        assert any(line.startswith(f"  {key.field} = ") for line in lines), key.name
        assert any(key.description in line and key.expected in line for line in lines), key.name
    assert f"  batch_size = 3  {tmp_path / 'run.toml'}:2, as training.local_batch_size" in lines
    assert "  steps = 5  command line" in lines
    assert "  seq_len = 2048  default" in lines
    assert f"  overrides = {{dim = 64}}  dim: {tmp_path / 'run.toml'}:4" in lines
    assert f'  keep_latest_k = 10  default of dialect "2026" ({tmp_path / "run.toml"}:2)' in lines


def test_explain_one_key_in_depth(capsys):
    out = run(capsys, "config", "explain", "metrics.disable_color_printing", "--metrics.disable_color_printing")[1]
    for text in (
        "metrics.enable_color_printing  (metrics.disable_color_printing is another name of it)",
        "false  from command line, as metrics.disable_color_printing",
        "true or false",
        "default true, for a file that says so",
        "metrics.disable_color_printing (inverted)",
    ):
        assert text in out
    assert "otherwise refused" in run(capsys, "config", "explain", "comm.mode")[1]
    explained = run(capsys, "config", "explain", "experimental.enable_compiled_autograd")[1]
    assert "not built yet compiled autograd" in explained
    assert "  lr = 0.0008  default" in run(capsys, "config", "explain", "optimizer")[1]
    status, _, err = run(capsys, "config", "explain", "training.btach_size")
    assert status == 2 and "nearest: training.batch_size" in err


def test_colours_are_for_terminals_only(capsys, monkeypatch):
    assert "\x1b[" not in run(capsys, "config", "explain", "training")[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "\x1b[1m[training]\x1b[0m" in run(capsys, "config", "explain", "training")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in run(capsys, "config", "explain", "training")[1]


def test_flags_and_their_words_are_kept_from_argparse():
    words = ["config", "check", "run.toml", "--training.steps", "5", "--strict", "--no-data.shuffle", "--a.b", "x", "y"]
    ours, flags = split_flags(words)
    assert ours == ["config", "check", "run.toml", "--strict"]
    assert flags == ["--training.steps", "5", "--no-data.shuffle", "--a.b", "x", "y"]


def test_a_value_may_begin_with_a_minus(capsys):
    flag = ["--training.data_parallel_shard_degree", "-1"]
    config = "debug_model.toml"
    # As run_llama_train.sh does it: options of the command come behind the flags.
    status, out, _ = run(capsys, "config", "check", config, *flag, "--world-size", "2")
    assert status == 0 and "2 (--world-size), data_parallel_shard 2" in out
    out = run(capsys, "config", "explain", config, "--lr_scheduler.min_lr_factor", "-0.5", *flag)[2]
    assert "min_lr_factor: expected a number >= 0 and <= 1, got -0.5" in out
    out = run(capsys, "config", "explain", config, *flag)[1]
    assert "data_parallel_shard_degree = -1  command line" in out
    # Each gets as far as its own check of names.
    assert "there is no fault 'x'" in run(capsys, "drill", config, *flag, "--only", "x")[2]
    assert "--skip x: unknown level" in run(capsys, "benchmark", config, *flag, "--skip", "x")[2]
    with pytest.raises(SystemExit):
        main(["config", "check", config, *flag, "-h"])
    assert "usage: titanlite config check" in capsys.readouterr().out


def test_help_names_the_commands(capsys):
    for words in (["--help"], ["config", "--help"], ["config", "check", "-h"], ["config", "explain", "-h"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
    assert "KEY|FILE" in capsys.readouterr().out


def test_without_a_command_it_helps_and_tells_its_version(capsys):
    status, out, err = run(capsys)
    assert (status, err) == (0, "") and out.startswith("usage: titanlite ")
    assert all(f"\n    {name}" in out for name in ("train", "config", "runs", "checkpoint", "drill"))
    assert run(capsys, "checkpoint")[1].startswith("usage: titanlite checkpoint ")
    assert "migrate" in run(capsys, "config")[1]
    done = subprocess.run([sys.executable, "-m", "titanlite", "--version"], capture_output=True, text=True)
    versions = rf"titanlite {titanlite.__version__}, torch {re.escape(metadata.version('torch'))}, python 3\.\d+\.\d+\n"
    assert done.returncode == 0 and re.fullmatch(versions, done.stdout)


def test_ranks_that_cannot_be_started_are_refused(capsys, monkeypatch):
    train = ["train", "debug_model.toml", "--nproc-per-node"]
    assert run(capsys, *train, "0")[::2] == (2, ERROR.format("expected an integer >= 1, got 0"))
    refused = run(capsys, *train, "3", "--training.data_parallel_shard_degree", "2")
    assert refused[0] == 2 and "which is not the world size 3" in refused[2]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert run(capsys, *train, "2")[::2] == (2, ERROR.format("torchrun has started this process already"))


ERROR = "1 problem in the config:\n  command line: --nproc-per-node: {}\n"

_TIMED = "import sys; from titanlite.tools.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"


@pytest.mark.parametrize(
    "words",
    [
        ["check", "llama3_8b.toml"],
        ["explain", "llama3_8b.toml"],
        ["explain", "training.steps"],
        ["diff", "llama3_8b.toml", "llama3_70b.toml", "--plans"],
        ["migrate", "llama3_8b.toml"],
        ["migrate", "--aws-fsdp", "--max_steps=3"],
        ["schema"],
        ["template"],
        ["template", "--markdown"],
    ],
)
def test_config_commands_take_under_a_second_and_import_no_torch(words):
    assert find_config("llama3_8b.toml") is not None
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", _TIMED, "config", *words], capture_output=True, text=True, cwd=REPOSITORY
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "training" in done.stdout or "steps" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
    # Processor time: what other processes take of the machine is not our doing. A quiet one takes as long.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
