"""`titanlite config`: what its commands print, how they end, how long they take.

The prose is in tests/config/snapshots, a file per command.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

import titanlite
from tests.support.processes import python
from titanlite.cli.main import main
from titanlite.config.keys import keys
from titanlite.resolve.load import check_config

SNAPSHOTS = Path(__file__).parent / "snapshots"

pytestmark = pytest.mark.usefixtures("elsewhere")

FILES = {
    "run.toml": """\
[training]
steps = 20
seq_len = 100
batch_size = 2
global_batch_size = 16
[model.overrides]
n_layers = 2
""",
    "later.toml": """\
# from the hub
[training]
local_batch_size = 4  # per GPU
[metrics]
disable_color_printing = true
[fault_tolerance]
enable = false
""",
}
COMMAND_LINES = {
    "check": ["check", "run.toml", "--world-size", "4", "--model.tokenizer_path", "no.model"],
    "explain_key": ["explain", "metrics.disable_color_printing", "later.toml"],
    "show": ["show", "later.toml", "--changed"],
}


def output(words: list[str]) -> str:
    """What a command prints in a folder with FILES, and its exit code."""
    for name, text in FILES.items():
        Path(name).write_text(text)
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = main(["config", *words])
    shown = " ".join(f"'{word}'" if " " in word else word for word in words)
    return (
        f"$ titanlite config {shown}\n{out.getvalue()}--- standard error ---\n{err.getvalue()}--- "
        f"exit code {code}\n"
    )


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = main(words)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_command_prints_its_snapshot(name):
    snapshot = (SNAPSHOTS / f"{name}.txt").read_text()
    assert output(COMMAND_LINES[name]) == snapshot, "run: python scripts/generate.py"


def test_check_counts_the_parameters_of_a_named_size_and_is_strict_if_asked(capsys):
    words = ("config", "check", "--model.flavor", "8B", "--model.tokenizer_path", "no.model")
    assert "8,030,261,248" in run(capsys, *words)[1]
    assert run(capsys, *words, "--strict")[0] == 2


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        (
            "--float8.enable_float8_linear --float8.enable_fsdp_float8_all_gather "
            "--float8.emulate --training.compile --activation_checkpoint.selective_ac_option=op",
            "bfloat16, float8 tensorwise gathered in float8, compiled, activation checkpointing "
            "selective op",
        ),
        (
            "--training.mixed_precision_param=float32 --activation_checkpoint.mode=none",
            "float32",
        ),
    ],
)
def test_check_names_what_decides_speed_and_rounding(flags, row, capsys):
    assert f"\n  precision      {row}\n" in run(capsys, "config", "check", *flags.split())[1]


def test_world_size_comes_from_the_flag_or_what_fits(capsys):
    flags = ("config", "check", "--training.data_parallel_shard_degree", "3")
    assert "3 (the fewest that fit" in run(capsys, *flags)[1]
    assert "3 (--world-size)" in run(capsys, *flags, "--world-size", "3")[1]
    assert run(capsys, *flags, "--world-size", "6")[0] == 2
    with pytest.raises(SystemExit):
        main([*flags, "--world-size", "0"])


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        ("--checkpoint.interval=5 --checkpoint.folder=a", "checkpoint.folder, checkpoint.interval"),
        ("--no-metrics.rank_0_only", "metrics.rank_0_only"),
        ("--no-metrics.rank_0_only --metrics.enable_tensorboard", ""),
        ("--data.lanes=2 --data.streaming=false", "data.lanes"),
        ("--data.lanes=2", ""),
        ("--optimizer.compensation_dtype=float32", "optimizer.compensation_dtype"),
        ("--lora.adapter=a", "lora.adapter"),
        # It turns checkpoints off two lines above their interval.
        ("--job.config_file=debug_model.toml", ""),
    ],
)
def test_settings_of_a_feature_that_is_off_are_named(flags, idle):
    notes = check_config(flags.split(), training=False)[1].notes
    found = [note.text for note in notes if "no effect" in note.text]
    assert len(found) == bool(idle)
    assert all(note.endswith(idle) for note in found)


#: Weights in their order: numbers, work that may be lost, speed, keys without effect.
NOTED = {
    "--float8.emulate": "warning: float8 is disabled",
    "--training.dataset=c4_mini": "note: command line: c4_mini is not bundled",
    "--checkpoint.interval=5": "note: no effect, as their features are off: checkpoint.interval",
    "--training.prefetch=2": "warning: training.prefetch = 2 has no effect",
    "--activation_checkpoint.memory_budget=0.3": "note: no effect, as their features are off: act",
    "--metrics.rank_0_only=false": "note: no effect, as their features are off: metrics.",
}


def test_check_shows_the_five_gravest_notes_and_all_if_asked(capsys):
    words = ["config", "check", *reversed(NOTED)]
    lines = run(capsys, *words)[1].splitlines()
    *shown, last = lines[lines.index("  files          none: all defaults") + 1 :]
    for line, text in zip(shown, [*NOTED.values()][:5], strict=True):
        assert line.startswith(f"  {text}")
    assert last == "  1 more note: --all shows every note"
    lines = run(capsys, *words, "--all")[1].splitlines()
    assert lines[-1].startswith(f"  {NOTED['--metrics.rank_0_only=false']}")
    assert lines[-6:-1] == shown


def test_a_narrow_terminal_shows_all_that_a_file_gets(capsys, monkeypatch):
    flags = ["--job.dump_folder", f"a b/{'some/' * 30}", *NOTED]
    commands = [["check", *flags], ["explain", *flags, "--all"], ["explain", "training.dataset"]]
    whole = [run(capsys, "config", *words)[1].split() for words in commands]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    assert [run(capsys, "config", *words)[1].split() for words in commands] == whole


def test_explain_shows_every_key_with_value_source_and_meaning(capsys):
    Path("run.toml").write_text("[training]\nlocal_batch_size = 3\n[model.overrides]\ndim = 64\n")
    words = ("config", "explain", "run.toml", "--training.steps=5")
    given = run(capsys, *words)[1]
    assert "  batch_size = 3  run.toml:2, as training.local_batch_size\n" in given
    assert "seq_len" not in given
    lines = run(capsys, *words, "--all")[1].splitlines()
    for key in keys().values():
        assert any(line.startswith(f"  {key.field} = ") for line in lines), key.name
        assert any(key.description in line and key.expected in line for line in lines), key.name
    for line in (
        "  seq_len = 2048  default",
        '  keep_latest_k = 10  default of dialect "2026" (run.toml:2)',
    ):
        assert line in lines


def test_explain_knows_keys_without_effect_and_refuses_others(capsys):
    assert 'accepted  "default"' in run(capsys, "config", "explain", "comm.mode")[1]
    section = run(capsys, "config", "explain", "[quantize.linear.float8]")[1]
    assert "float8.filter_fqns  (quantize.linear.float8.filter_fqns is another name of" in section
    assert "lora" not in section
    status, _, err = run(capsys, "config", "explain", "training.btach_size")
    assert status == 2
    assert "training.batch_size" in err
    assert run(capsys, "config", "explain", "a.toml", "b.toml")[0] == 2


def test_a_value_may_begin_with_a_minus(capsys):
    flag = ["--training.data_parallel_shard_degree", "-1"]
    # As run_llama_train.sh does it: options of the command come behind the flags.
    status, out, _ = run(capsys, "config", "check", "debug_model.toml", *flag, "--world-size", "2")
    assert status == 0
    assert "2 (--world-size), data_parallel_shard 2" in out
    assert run(capsys, "config", "explain", "--lr_scheduler.min_lr_factor", "-0.5", *flag)[0] == 2


def test_version(capsys):
    torch = re.escape(metadata.version("torch"))
    versions = rf"titanlite {titanlite.__version__}, torch {torch}, python 3\.\d+\.\d+\n"
    assert re.fullmatch(versions, run(capsys, "--version")[1])


_TIMED = """
import sys
from titanlite.cli.main import main
main(sys.argv[1:])
heavy = ("torch", "pydantic", "numpy", "titanlite.runs.read", "titanlite.runs.record")
print([name for name in heavy if name in sys.modules])
"""


def test_a_check_is_quick_and_imports_little():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("-c", _TIMED, "config", "check", "llama3_8b.toml")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    # Processor time, with room for a busy machine: a quiet one takes 0.1 to 0.25 s, and with torch
    # 2 s.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


if __name__ == "__main__" and "--write" in sys.argv:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for _name, _words in COMMAND_LINES.items():
            (SNAPSHOTS / f"{_name}.txt").write_text(output(_words))
