"""docs/recipes: the commands of each page are there, and a small run of the whole page works."""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.processes import ROOT, environment
from titanlite.cli.command_table import make_parser
from titanlite.cli.main import main, split_flags

PAGES = ROOT / "docs" / "recipes"
NAMES = sorted(page.stem for page in PAGES.glob("*.md"))
#: What a checkout has and the commands of the pages read.
LINKS = ("benchmarks", "examples", "titanlite", "train_configs")


class Done(NamedTuple):
    """A command that ended: its output, with that of standard error, and its exit code."""

    output: str
    code: int


def lay_out(name: str, folder: Path, smaller: Mapping[str, str]) -> list[str]:
    """Write the files of a page into `folder`; return the commands that it runs, in order.

    smaller: text of the page → what replaces it in files and commands; each must be there.
    """
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    files = re.findall(r"`([\w.]+)`:\n\n```(?:toml|python)\n(.*?)```", text, re.DOTALL)
    commands = re.findall(r"^\$ .*$", text, re.MULTILINE)
    for large in smaller:
        assert any(large in part for part in (*commands, *dict(files).values())), large

    def small(part: str) -> str:
        return functools.reduce(lambda done, pair: done.replace(*pair), smaller.items(), part)

    for link in LINKS:
        (folder / link).symlink_to(ROOT / link)
    for file, content in files:
        (folder / file).write_text(small(content), encoding="utf-8")
    return [small(command[2:]) for command in commands]


def follow(commands: list[str], folder: Path) -> dict[str, Done]:
    """Run commands one after the other in one shell; return how each ended."""
    interpreter = shlex.quote(sys.executable)
    script = [
        f'titanlite() {{ {interpreter} -m titanlite "$@"; }}',
        f'python() {{ {interpreter} "$@"; }}',
    ]
    for command in commands:
        script += [command, "printf '\\n@@ %s\\n' $?"]
    ended = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=environment(COLUMNS="200", TMPDIR=str(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=900,
    )
    parts = re.split(r"\n@@ (\d+)\n", ended.stdout)
    assert len(parts) == 2 * len(commands) + 1, ended.stdout
    return {
        command: Done(output, int(code))
        for command, output, code in zip(commands, parts[::2], parts[1::2], strict=False)
    }


def titanlite_words(name: str) -> list[list[str]]:
    """The words of each `titanlite` command on a page, also of those that need a cluster."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    shown = "".join(block for language, block in blocks if not language)
    lines = re.findall(r"^(?:\$ )?titanlite (.*)$", shown, re.MULTILINE)
    return [shlex.split(re.split(r" [|>&;]", line)[0], comments=True) for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_each_command_of_a_recipe_parses(name, capsys):
    found = titanlite_words(name)
    assert len(found) >= 4
    for words in found:
        ours, flags = split_flags(words)
        make_parser(words[0]).parse_args(ours)
        for flag in flags:
            if flag.startswith("--"):
                key = flag.removeprefix("--").partition("=")[0]
                assert main(["config", "explain", key]) == 0, key
    capsys.readouterr()


def test_the_configs_that_no_run_reads_are_right(tmp_path, monkeypatch, capsys):
    lay_out("8b-on-a-cluster", tmp_path, {})
    monkeypatch.chdir(tmp_path)
    for file, ranks in {
        "8b.toml": 16,
        "rehearsal.toml": 2,
        "examples/small_to_big.toml": 1,
    }.items():
        assert main(["config", "check", file, f"--world-size={ranks}"]) == 0
    capsys.readouterr()


def refuse_failures(done: Mapping[str, Done], but: str = "") -> None:
    """Assert that each command ended with 0, and the command `but` with 1."""
    wrong = {command: end for command, end in done.items() if end.code != (command == but)}
    assert not wrong, "\n".join(f"$ {command}\n{end.output}" for command, end in wrong.items())


@pytest.mark.soak
def test_from_scratch(tmp_path):
    smaller = {
        "assets/train/*.gz": "assets/validation/*.gz",
        "steps = 600": "steps = 12",
        "interval = 200": "interval = 6",
        '"./own/held-out-tokens"': '"./own/held-out-tokens"\nfreq = 6\nsteps = 2',
        "[training]": "[model.overrides]\nn_layers = 2\n\n[training]",
    }
    done = follow(lay_out("from-scratch", tmp_path, smaller), tmp_path)
    refuse_failures(done)
    by_word = {command.split()[1]: end.output for command, end in done.items()}
    assert "2,048 ids, from 121 documents" in by_word["examples/own_tokenizer.py"]
    assert "training done at step 12" in by_word["train"]
    assert "validation at 12: " in by_word["train"]
    assert "held-out-tokens" in by_word["eval"]
    # The smaller text is its own held-out text: the bigram has seen each pair.
    figures = re.findall(r"^(\w+) +([\d.]+) nats", by_word["benchmarks/bigram_baseline.py"], re.M)
    nats = {name: float(number) for name, number in figures}
    assert 1 < nats["bigram"] < nats["uniform"]
    assert "It was a truth" in by_word["sample"]


@pytest.mark.soak
def test_continue_hugging_face(tmp_path):
    pytest.importorskip("transformers")
    smaller = {
        "steps = 400": "steps = 40",
        "freq = 100": "freq = 20",
        "interval = 100": "interval = 20",
    }
    done = follow(lay_out("continue-hugging-face", tmp_path, smaller), tmp_path)
    refuse_failures(done)
    run = done["titanlite train chat.toml"].output
    losses = [float(loss) for loss in re.findall(r"validation at \d+: loss ([\d.]+)", run)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 2
    assert "they are equal" in done["titanlite export outputs/chat exported/chat"].output
    # transformers answers with the text of `titanlite sample`, token by token.
    sample = next(
        end.output for command, end in done.items() if command.startswith("titanlite sample")
    )
    answer = done["python load_exported.py"].output.strip().splitlines()[-1]
    assert re.search(rf"^{re.escape(answer)}$", sample, re.MULTILINE)


@pytest.mark.soak
def test_long_context(tmp_path):
    pytest.importorskip("transformers")
    smaller = {
        "steps = 200": "steps = 8",
        "freq = 200": "freq = 8",
        "steps = 20": "steps = 3",
        "freq = 20": "freq = 3",
    }
    done = follow(lay_out("long-context", tmp_path, smaller), tmp_path)
    refuse_failures(done)
    run = done["titanlite train long.toml"].output
    assert re.findall(r"validation at (\d+): loss ", run) == ["0", "3"]
    export = done["titanlite export outputs/long exported/long"].output
    assert "compared with those of transformers: they differ by" in export
    config = json.loads((tmp_path / "exported" / "long" / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["max_position_embeddings"] == 4096


@pytest.mark.soak
def test_8b_on_a_cluster(tmp_path):
    pytest.importorskip("transformers")
    done = follow(lay_out("8b-on-a-cluster", tmp_path, {}), tmp_path)
    # The tokenizer of the 8B is not there.
    refuse_failures(done, but="titanlite doctor 8b.toml")
    assert "on 16 x h100-80g fits" in done["titanlite plan 8b.toml"].output
    assert "#SBATCH --nodes=2" in done["titanlite launch slurm 8b.toml --dry-run"].output
    assert "running" in done["titanlite runs outputs"].output
    assert "ended with 5" in next(end.output for command, end in done.items() if "kill" in command)
    attempts = done["titanlite runs outputs --attempts"].output
    assert re.search(r"^ +1 .* preempted +5 .* 0$", attempts, re.MULTILINE)
    assert re.search(r"^ +2 .* done +0 +400 +400 +0$", attempts, re.MULTILINE)
    assert "resume verified" in done['grep -E "resumed|verified" resumed.log'].output
