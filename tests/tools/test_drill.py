"""`titanlite drill`: a working trainer passes, a broken one fails; the tiny copy keeps a config's
features.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from titanlite import exit_codes
from titanlite.config.errors import ConfigError
from titanlite.tools.cli import main
from titanlite.tools.drill.config import tiny_config
from titanlite.tools.drill.drill import SCENARIOS

#: `titanlite`, whose ranks start as those of other tests.
PRELOADED = """
import sys
from tests.support.preload import preload_more
from titanlite.tools.cli import main
preload_more()
sys.exit(main())
"""


def drill(
    *words: str, package: Path = ROOT, folder: Path | str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own.

    package: folder with titanlite. folder: for temporary files.
    """
    variables = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    variables |= {
        "PYTHONPATH": f"{package}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        **({"TMPDIR": str(folder)} if folder else {}),
    }
    command = [
        sys.executable,
        "-c",
        PRELOADED,
        "drill",
        str(ROOT / "train_configs" / "debug_model.toml"),
    ]
    return subprocess.run(
        [*command, *words], cwd=package, env=variables, capture_output=True, text=True, timeout=3000
    )


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--list"], exit_codes.DONE, "kill-shard"),
        (
            ["debug_model.toml", "--ranks", "1"],
            exit_codes.CONFIG,
            "--ranks: expected an integer >= 2",
        ),
        (["debug_model.toml", "--only", "flood"], exit_codes.CONFIG, "'flood'"),
        (["debug_model.toml", "--training.setps=3"], exit_codes.CONFIG, "training.setps"),
        (["debug_model.toml", "--training.seq_len=64"], exit_codes.CONFIG, "training.seq_len"),
    ],
)
def test_command_line(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["drill", *words]) == code
    except SystemExit as end:  # argparse's own
        assert end.code == code
    assert said in "".join(capsys.readouterr())


@pytest.mark.slow
def test_a_few_faults_pass_and_leave_nothing_behind(tmp_path: Path) -> None:
    names = ["kill-shard", "kill-purge", "dead-lock"]
    done = drill("--json", *only(*names), "--checkpoint.async_mode=async", folder=tmp_path)
    assert done.returncode == exit_codes.DONE, done.stderr
    result = json.loads(done.stdout)
    assert [(fault["name"], fault["passed"]) for fault in result["faults"]] == [
        (name, True) for name in names
    ]
    assert result["passed"]
    assert result["kept"] is None
    assert list(tmp_path.glob("titanlite*")) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    "flags", [[], ["--training.tensor_parallel_degree=2", "--checkpoint.async_mode=async"]]
)
def test_every_fault_passes(flags: list[str]) -> None:
    done = drill(*flags)
    assert done.returncode == exit_codes.DONE, done.stderr
    assert done.stdout == f"{len(SCENARIOS)} of {len(SCENARIOS)} passed\n"
    assert "FAIL" not in done.stderr


#: A fault of the trainer: file, a piece of the code, what replaces it; the scenario that finds it,
#: and what it tells.
BROKEN = [
    (
        "training/resume.py",
        "parts.loader.load_state_dict(data)",
        "pass",
        "resume",
        "steps [5, 6, 7, 8]",
    ),
    (
        "trainer.py",
        'state[f"{name}_owed"] = True',
        "pass",
        "sigterm-validation",
        "steps [6]",
    ),
    ("trainer.py", "if outcome.problem:", "if False:", "background-save", "not reported"),
    (
        "step.py",
        "(self.optimizer, ok, lr, divisor)",
        "(self.optimizer, ok | True, lr)",
        "nan-skip",
        f"{[exit_codes.GUARD] * 2}",
    ),
    (
        "training/resume.py",
        '"data": skip_to(data, fetched)',
        '"data": data',
        "nan-rollback",
        "steps [5, 6, 7, 8]",
    ),
]


def check_failures(folder: Path, faults: list[tuple[str, ...]], *words: str, **more: str) -> None:
    """Drill a copy of titanlite with these faults: their scenarios, and those of `more`, must fail
    with their texts.
    """
    package = folder / "broken"
    shutil.copytree(
        ROOT / "titanlite", package / "titanlite", ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "train_configs").symlink_to(ROOT / "train_configs")
    for name, right, wrong, *_ in faults:
        text = (package / "titanlite" / name).read_text()
        assert text.count(right) == 1, f"{name} has no {right!r}"
        (package / "titanlite" / name).write_text(text.replace(right, wrong))
    expected = {**{fault[3]: fault[4] for fault in faults}, **more}
    done = drill(*only(*expected), *words, package=package, folder=folder)
    failed = dict(re.findall(r"^FAIL +(\S+) +[\d.]+ s  (.*)", done.stderr, re.MULTILINE))
    assert done.returncode == exit_codes.ERROR and failed.keys() == expected.keys(), done.stderr
    assert all(expected[name] in told for name, told in failed.items()), failed
    (kept,) = re.findall(r"console.log: (\S+)", done.stderr)
    assert all((Path(kept) / name / "console.log").is_file() for name in expected)


@pytest.mark.slow
def test_a_trainer_that_does_not_restore_or_verify_fails(tmp_path: Path) -> None:
    flipped = {"flipped-bit": "resumed from step 4, not 2"}
    check_failures(tmp_path, BROKEN[:1], "--checkpoint.verify=size", **flipped)


@pytest.mark.slow
def test_each_other_fault_of_the_trainer_is_found(tmp_path: Path) -> None:
    check_failures(tmp_path, BROKEN[1:])


@pytest.mark.parametrize(
    "file",
    sorted({path.name for path in (ROOT / "train_configs").glob("*.toml")} - {"hf_debug.toml"}),
)
def test_every_shipped_config_has_a_tiny_copy(file: str) -> None:
    d = tiny_config(file, []).config
    assert (d.model.overrides["dim"], d.model.overrides["n_layers"], d.model.vocab_size) == (
        64,
        2,
        4096,
    )
    assert d.checkpoint.enable_checkpoint
    assert d.checkpoint.interval == 2
    assert d.training.steps == 8
    assert not d.training.compile
    assert not d.metrics.enable_tensorboard
    assert d.validation.enable


@pytest.mark.parametrize(
    ("ranks", "degrees", "shard", "lost"),
    [
        (None, (2, 2, 1), 1, "data_parallel_replicate"),
        (8, (2, 2, 2), 1, ""),
        (3, (1, 1, 1), 3, "tensor_parallel, pipeline_parallel, data_parallel_replicate"),
    ],
)
def test_parallelism_is_kept_at_degree_two_as_far_as_the_ranks_suffice(
    ranks: int | None, degrees: tuple[int, int, int], shard: int, lost: str
) -> None:
    flags = ["--training.tensor_parallel_degree=8", "--experimental.pipeline_parallel_degree=4"]
    flags += ["--training.data_parallel_replicate_degree=2", "--training.gradient_sync=last"]
    tiny = tiny_config("llama3_8b.toml", flags, ranks)
    d = tiny.config
    found = d.training.tensor_parallel_degree, d.experimental.pipeline_parallel_degree
    assert (*found, d.training.data_parallel_replicate_degree) == degrees
    assert tiny.ranks == (ranks or 4)
    assert tiny.notes[1].endswith(f"data_parallel_shard {shard}")
    assert (f"not tested on {tiny.ranks} ranks: {lost}" in tiny.notes) == bool(lost)


def test_features_stay_and_it_writes_only_in_its_own_folder(tmp_path: Path) -> None:
    flags = [
        "--checkpoint.async_mode=async",
        "--activation_checkpoint.mode=full",
        "--optimizer.name=Adam",
    ]
    flags += [
        "--float8.enable_float8_linear",
        "--guard.policy=rollback",
        "--checkpoint.milestones=[1, 5]",
    ]
    flags += [
        "--float8.filter_fqns=attention.wk,w2,layers.30.,auto_filter_small_kn",
        "--training.loss_chunks=500",
    ]
    flags += [
        f"--checkpoint.folder={tmp_path}/precious",
        "--metrics.enable_tensorboard",
        "--no-validation.enable",
    ]
    own = tmp_path / "mine.toml"
    own.write_text(
        f'[job]\nsave_config_file = "{tmp_path}/saved.toml"\n[checkpoint]\nfolder = '
        f'"{tmp_path}/precious"\n'
    )
    with pytest.raises(ConfigError, match="checkpoint.folder"):
        tiny_config("llama3_8b.toml", flags)
    d = tiny_config(
        str(own), [flag for flag in flags if "precious" not in flag and "tensorboard" not in flag]
    ).config
    assert d.checkpoint.async_mode == "async"
    assert d.activation_checkpoint.mode == "full"
    assert d.optimizer.name == "Adam"
    assert d.guard.policy == "rollback"
    assert d.validation.enable
    assert d.float8.enable_float8_linear
    assert d.float8.emulate
    assert d.float8.filter_fqns == ["attention.wk", "w2"]
    assert d.checkpoint.milestones == [] and d.training.loss_chunks == 2, (
        "they would not work, or change the scenarios"
    )
    assert str(tmp_path) not in re.sub(r"config_file=\['[^']*'\]", "", repr(d))
    heads = [
        tiny_config(file, []).config.model.overrides["n_kv_heads"]
        for file in ("llama3_8b.toml", "llama2_7b.toml")
    ]
    assert heads == [2, 4], "of 4 heads: grouped ones stay grouped"


def test_compile_stays_only_with_the_flag() -> None:
    flags = ["--training.compile", "--activation_checkpoint.mode=budget"]
    off, on = (
        tiny_config("debug_model.toml", flags, compiled=compiled).config
        for compiled in (False, True)
    )
    assert (off.training.compile, off.activation_checkpoint.mode) == (False, "full")
    assert (on.training.compile, on.activation_checkpoint.mode) == (True, "budget")


def test_a_drill_sends_no_metrics_to_services(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[metrics]\nenable_wandb = true\ntrackers = ["mlflow", "comet"]\n')
    assert tiny_config(str(config), []).config.metrics.tracker_names == []
