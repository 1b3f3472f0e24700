"""No command runs code, reads a variable or another file because a file of somebody else names it.

`SHOWS`, `MODEL` and `REASONS` have every command. One that reads foreign files runs on poisoned
ones here; the others have the reason.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest

from tests.cli.poison import (
    CODE,
    SAYS,
    SECRET,
    VARIABLE,
    Evil,
    Pickled,
    code_config,
    forget,
    make_evil,
    poison,
    poison_hf,
    run_folder,
)
from tests.support.commands import commands
from tests.support.golden_run import MORE, GoldenRun
from tests.support.hub_server import HubServer
from titanlite import exit_codes
from titanlite.checkpoint.manifest import read_manifest
from titanlite.cli.command_table import make_parser
from titanlite.cli.eval_losses import config_of, evaluate_rank, read_texts
from titanlite.cli.loading import load_model
from titanlite.cli.main import main, split_flags
from titanlite.config import trust
from titanlite.config.errors import ConfigError
from titanlite.config.load import read_text
from titanlite.data import DataError

ROOT = Path(__file__).resolve().parents[2] / "titanlite"
OWN = "reads no file but TOML files that the user names, which are the user's own"
#: Command → its words, with the path of a poisoned run or checkpoint.
#: {step}: the checkpoint, {run}: the run, {out}: a path that is free.
SHOWS = {
    "checkpoint ls": ["{run}"],
    "checkpoint verify": ["{step}"],
    "checkpoint diff": ["{step}", "{step}"],
    "runs": ["{run}"],
}
#: Commands that take the model's family from the manifest.
MODEL = {
    "export": ["{step}", "{out}"],
    "sample": ["{step}", "text", "--max-tokens=1", "--device=cpu"],
    "eval": ["{step}", "--tasks=none", "--device=cpu"],
}
#: Keys of a kept config whose code `eval` would run.
KEYS = ["model.name", "training.loss", "validation.dataset"]
#: Command → why it reads neither a run nor a checkpoint, or which test covers it.
REASONS = {
    "prove": f"{OWN}; --run: reads configs as foreign ones, and numbers",
    "parity": "exports as `export` does, and reads folders as its comparison does",
    "push": "exports as `export` does, with the same flag",
    "train": "test_training_from_a_poisoned_checkpoint_runs_none_of_its_code",
    "launch": OWN,
    "doctor": "examines the machine, and reads no checkpoint",
    "plan": f"{OWN}; hf_config: test_a_hugging_face_folder_runs_no_code",
    "config check": f"{OWN}; hf_config: test_a_hugging_face_folder_runs_no_code",
    "config explain": OWN,
    "config show": OWN,
    "data peek": OWN,
    "data prepare": (
        "reads texts; test_a_chain_of_urls_is_refused, templates: tests/data/test_chat.py"
    ),
    "sweep": f"{OWN}; compares configs of earlier runs as foreign ones",
    "ladder": f"{OWN}; compares configs of earlier runs as foreign ones; points are numbers",
    "mup check": OWN,
}


def test_every_command_is_judged():
    assert {*SHOWS, *MODEL, *REASONS} == set(commands(make_parser()))


def test_commands_that_could_refuse_have_the_flag_and_explain_it():
    for name, parser in commands(make_parser()).items():
        assert (trust.FLAG in parser.format_help()) == (name in {*MODEL, "push"}), name


# Runs and checkpoints


@dataclass
class Poisoned:
    """A copy of a run whose files name evil code."""

    run: Path
    step: Path
    evil: Evil
    out: Path
    capsys: pytest.CaptureFixture[str]

    def call(self, command: str, words: list[str], *more: str) -> tuple[int, str]:
        """Run a command; return its exit code, and what it printed."""
        places = {"run": self.run, "step": self.step, "out": self.out}
        shown = [word.format(**places) for word in words]
        self.capsys.readouterr()
        code = _start([*command.split(), *shown, *more])
        out, err = self.capsys.readouterr()
        return code, err + out


def _start(words: list[str]) -> int:
    """Run a command.

    Tasks need a package that is not installed: their model is loaded as it would be. A rank would
    end this process.
    """
    if words[0] != "eval":
        return main(words)
    ours, flags = split_flags(words)
    arguments = make_parser("eval").parse_args(ours)
    arguments.flags = flags
    try:
        if arguments.tasks is None:
            return evaluate_rank(arguments)
        load_model(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return exit_codes.DONE


@pytest.fixture
def poisoned(
    golden: GoldenRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Poisoned]:
    """A run that is not poisoned yet.

    The working directory holds the evil code, and Python looks there.
    """
    run = tmp_path / "run"
    step = run_folder(golden, run)
    evil = make_evil(run)
    shutil.copy(evil.file, step)  # "./" is anchored beside the file that names it
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(str(run))
    monkeypatch.setenv(VARIABLE, SECRET)
    monkeypatch.setattr("titanlite.dist.dist_env.connect_store", _started)
    yield Poisoned(run, step, evil, tmp_path / "out", capsys)
    forget(evil)


def _started() -> NoReturn:
    """Stand in for what a rank does with a config that was taken."""
    raise DataError("started")


@pytest.mark.parametrize("command", sorted(SHOWS))
def test_what_is_only_shown_is_not_run(poisoned, command):
    poison(poisoned.step, code_config(poisoned.evil, "beside"), poisoned.evil.named("SPEC"))
    code, said = poisoned.call(command, SHOWS[command])
    assert code == exit_codes.DONE, said
    assert not poisoned.evil.ran
    assert SAYS not in said
    assert SECRET not in said


@pytest.mark.parametrize("command", sorted(MODEL))
def test_a_model_that_the_manifest_names_is_not_imported(poisoned, command):
    path = poisoned.evil.named("SPEC", "beside" if command == "sample" else "file")
    poison(poisoned.step, family=path)
    code, said = poisoned.call(command, MODEL[command])
    assert not poisoned.evil.ran
    assert not poisoned.out.exists()
    assert code == exit_codes.CONFIG
    _names(said, poisoned.step / "manifest.json", "config.model.family", path)
    _, said = poisoned.call(command, MODEL[command], trust.FLAG)
    _is_announced(said, poisoned.evil, path)


@pytest.mark.parametrize("way", ["file", "beside", "module"])
def test_code_that_a_kept_config_names_is_not_imported(poisoned, way):
    poison(poisoned.step, code_config(poisoned.evil, way))
    code, said = poisoned.call("eval", ["{step}"])
    assert code == exit_codes.CONFIG
    assert not poisoned.evil.ran
    for key in KEYS:
        _names(said, "manifest.json", key, poisoned.evil.named(CODE[key], way))
    assert said.count(trust.FLAG) == len(KEYS)
    _, said = poisoned.call("eval", ["{step}"], trust.FLAG)
    for key in KEYS:
        _is_announced(said, poisoned.evil, f'{key} = "{poisoned.evil.named(CODE[key], way)}"')
    assert "started" in said


def test_variables_and_other_files_that_a_kept_config_names_are_read_with_the_flag_alone(poisoned):
    other = poisoned.run / "other.toml"
    other.write_text(f'[model]\nname = "{poisoned.evil.named("SPEC")}"\n')
    with HubServer(poisoned.run) as server:
        key, url = "validation.dataset_path", f"{server.url}/${{{VARIABLE}}}.jsonl"
        poison(poisoned.step, {"job.extends": [str(other)], key: url})
        code, said = poisoned.call("eval", ["{step}"])
        assert code == exit_codes.CONFIG
        assert not poisoned.evil.ran
        assert SECRET not in said
        assert not server.requests
        _names(said, "manifest.json", key, f"${{{VARIABLE}}}")
        _names(said, "manifest.json", "job.extends", str(other))
        poison(poisoned.step, {"job.extends": [], key: url})
        _, said = poisoned.call("eval", ["{step}", trust.FLAG])
        assert f"reads the environment variable {VARIABLE}" in said
        manifest = read_manifest(poisoned.step)
        run = config_of(poisoned.step, manifest, None, [], 1, trust_code=True)
        with suppress(DataError):
            read_texts(run, poisoned.step, manifest)
        assert any(SECRET in request.path for request in server.requests), said


def test_a_flag_of_the_user_replaces_what_the_checkpoint_names(poisoned):
    poison(poisoned.step, {"validation.dataset": poisoned.evil.named("texts")})
    _, said = poisoned.call("eval", ["{step}"], "--validation.dataset=c4_test")
    assert "started" in said
    assert trust.FLAG not in said
    assert not poisoned.evil.ran


def test_claims_are_of_the_values_in_effect_alone():
    text = (
        '[[data.source]]\nname = "evil:texts"\n[[data.source]]\nname = "c4"\n'
        '[[validation.sources]]\nname = "evil:held_out"\n'
        '[optimizer]\nname = "evil:Optimizer"\n[compile]\ncache_dir = "/evil"\n'
    )
    file = Path("run/config.toml")
    config, problems = read_text(text, file, origin=trust.Origin.FOREIGN)
    assert not problems
    assert {claim.key: claim.value for claim in config.claims} == {
        "data.source": "evil:texts",
        "validation.sources": "evil:held_out",
        "optimizer.name": "evil:Optimizer",
        "compile.cache_dir": "/evil",
    }
    flags = [
        "--data.source=[]",
        "--validation.sources=[]",
        "--optimizer.name=AdamW",
        "--compile.cache_dir=own",
    ]
    assert not read_text(text, file, flags, trust.Origin.FOREIGN)[0].claims
    assert not read_text(text, file)[0].claims


def test_the_code_of_ones_own_config_needs_no_flag(poisoned):
    own = poisoned.run / "own.toml"
    own.write_text(f'[model]\nname = "./{poisoned.evil.file.name}:SPEC"\nflavor = "debugmodel"\n')
    code, said = poisoned.call("config check", [str(own)])
    assert code == 0 and poisoned.evil.ran, said


def _names(said: str, file: object, key: str, value: str) -> None:
    """Check that a refusal names the value, the file it is from, and the flag."""
    for line, after in pairwise(said.splitlines()):
        if str(file) in line and key in line and value in line:
            assert trust.FLAG in after
            return
    pytest.fail(f"{file}: {key} = {value} is not named:\n{said}")


def _is_announced(said: str, evil: Evil, value: str) -> None:
    """Check that the code ran, and was named before."""
    assert evil.ran, said
    before, ran, _ = said.partition(SAYS)
    lines = [line for line in before.splitlines() if trust.FLAG in line and value in line]
    assert ran and len(lines) == 1, said
    assert "imports the file" in lines[0] or "imports the module" in lines[0]


# Files of weights, folders of Hugging Face's, tokens


def test_a_hugging_face_folder_runs_no_code(poisoned, tmp_path):
    from tests.support.hf import hf_folder

    folder = hf_folder(tmp_path / "hf")
    poison_hf(folder, poisoned.evil)
    calls = {
        "export": [str(folder), "{out}"],
        "sample": [str(folder), "text", "--max-tokens=1", "--device=cpu"],
        "config check": [
            "--model.name=hf",
            f"--model.hf_config={folder}",
            "--training.seq_len=64",
        ],
    }
    for command, words in calls.items():
        code, said = poisoned.call(command, words)
        assert code == 0, said
        assert not poisoned.evil.ran
        assert SAYS not in said
    code, said = poisoned.call("sample", [str(folder), "text", "--chat", "--device=cpu"])
    assert code == exit_codes.CONFIG
    assert not poisoned.evil.ran
    assert "SecurityError" in said or "refuses it" in said


def test_tokens_with_objects_are_refused(poisoned, tmp_path):
    import numpy as np

    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.array([Pickled(poisoned.evil.mark)], dtype=object), allow_pickle=True)
    code, said = poisoned.call("data peek", [f"--training.dataset_path={tokens}"])
    assert code == exit_codes.CONFIG and not poisoned.evil.ran, said
    assert str(tokens) in said
    with open(tokens, "rb") as stream:  # the file holds what would make the mark
        np.load(stream, allow_pickle=True)
    assert poisoned.evil.ran


def test_a_chain_of_urls_is_refused(tmp_path):
    """fsspec follows the chain, and renders templates in the file at its end: older versions
    without a sandbox.
    """
    import fsspec

    from titanlite.config.urls import chain_problem
    from titanlite.data.listing import Place
    from titanlite.data.remote import open_file
    from titanlite.data.stream_files import url_text

    references = tmp_path / "references.json"
    references.write_text(json.dumps({"version": 1, "refs": {"x": "another text"}}))
    url = f"reference://x::file://{references}"
    assert fsspec.open(url).open().read() == b"another text"
    with pytest.raises(DataError, match="chain of URLs"):
        url_text(Place(url))
    with pytest.raises(DataError, match="chain of URLs"):
        open_file(url).read()
    assert chain_problem("http://[::1]:8000/text.jsonl") == ""


# Training


@pytest.mark.slow
def test_training_from_a_poisoned_checkpoint_runs_none_of_its_code(poisoned, tmp_path):
    """The user's own config names the code; the manifest's record is only compared."""
    from tests.support.golden_run import FLAGS
    from tests.support.ranks import train
    from tests.support.tiny import TWENTY_STEPS

    values = code_config(poisoned.evil, "beside")
    poison(poisoned.step, values, poisoned.evil.named("SPEC"), same_text=True)
    flags = ["--job.config_file=debug_model.toml", *TWENTY_STEPS, *FLAGS]
    resumed = [*flags, f"--training.steps={MORE + 1}", f"--job.dump_folder={poisoned.run}"]
    codes, said = train(resumed, 2, tmp_path / "console")
    assert codes == [0, 0] and f"resumed from step {MORE}" in said, said
    initial = [*flags, "--training.steps=1", f"--checkpoint.initial_load_path={poisoned.step}"]
    initial += [f"--job.dump_folder={tmp_path}/new"]
    codes, said = train(initial, 2, tmp_path / "console")
    assert codes == [exit_codes.CONFIG] * 2 and "is code that its author names" in said, said
    codes, said = train([*initial, '--checkpoint.allow_changes=["model"]'], 2, tmp_path / "console")
    assert codes == [0, 0], said
    assert not poisoned.evil.ran


# The code


def _files_with(pattern: str) -> set[str]:
    """Return the files of the library whose code or text matches."""
    files = {file: file.read_text() for file in ROOT.rglob("*.py")}
    return {str(file.relative_to(ROOT)) for file, text in files.items() if re.search(pattern, text)}


def test_code_is_imported_by_name_in_known_places_alone():
    """A new place must ask `titanlite.config.trust` first, and be added here."""
    assert _files_with(r"(?<![\w.`])(__import__|eval|exec|compile)\(") == set()
    assert _files_with(r"config import import_objects|config\.import_objects|load_callbacks\(") == {
        "assembly/build.py",
        "assembly/own_callbacks.py",
        "config/own_functions.py",
        "main.py",
        # The names of a fixed list, and one that is only shown.
        "models/families.py",
        "callbacks.py",
    }
    assert _files_with(r"(import_module|exec_module)\(") == {
        "__init__.py",
        "config/import_objects.py",
        # The name is one of a fixed list.
        "models/families.py",
        "models/spec.py",
        "dist/rendezvous_end.py",
        # The names of a fixed list, and entry points of packages that the user has installed.
        "doors.py",
        "checkpoint/foreign_formats.py",
        "cli/launch.py",
        "cli/plan/plan.py",
    }


def test_every_record_of_a_model_and_every_text_of_a_config_says_whose_it_is():
    call = r"(?<![\w.])(?<!def )(from_record|read_text)\("
    assert _files_with(call) == {
        "checkpoint/choice.py",
        "cli/eval_losses.py",
        "cli/hub/export_weights.py",
        "contrib/evidence/check_records.py",
        "contrib/hub/data_statement.py",
        "contrib/lab/members.py",
    }
    assert not _files_with(call + r"(?![^\n]*\b(origin|trust\.))")
