"""docs/config.md shows what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import titanlite
from tests.support.processes import ROOT
from titanlite.cli.main import main

PAGE = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")


def test_error_examples_are_what_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, errors = re.findall(r"```toml\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)[0]
    Path("run.toml").write_text(text)
    assert main(["config", "check", "run.toml"]) == 2
    assert capsys.readouterr().err == errors
    (second,) = re.findall(r"what would work:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    flags = ["--training.batch_size=1", "--training.global_batch_size=30", "--world-size", "8"]
    assert main(["config", "check", *flags]) == 2
    assert capsys.readouterr().err == second


def test_python_example_runs(capsys):
    example = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    exec(compile(example, "docs/config.md", "exec"), {})
    assert "is shortened to 5" in capsys.readouterr().out


def test_every_code_of_a_problem_is_listed():
    codes = {"wrong-type", "out-of-range", "unknown-value", "missing", "unknown-key"}
    for path in Path(titanlite.__file__).parent.rglob("*.py"):
        codes.update(re.findall(r'(?:\bProblem\(\s*|\bcode=)"([a-z-]+)"', path.read_text()))
    rows = re.findall(r"^\| (`[a-z0-9-]+`(?:, `[a-z0-9-]+`)*) \|", PAGE, re.MULTILINE)
    assert codes == set(re.findall(r"`([a-z0-9-]+)`", " ".join(rows)))


def test_the_examples_of_errors_and_of_explain_are_what_is_printed(capsys):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    explained = r"```\n\$ titanlite config explain (\S+) (\S+)\n(.*?)```"
    *words, shown = re.findall(explained, PAGE, re.DOTALL)[0]
    assert main(["config", "explain", *words]) == 0
    assert capsys.readouterr().out == shown
    refused = r"```\n\$ ./run_llama_train.sh (--training.setps 40 --optimizer.lr) .*?\n(.*?)```"
    flags, errors = re.findall(refused, readme, re.DOTALL)[0]
    assert main(["config", "check", *flags.split(), '"3e-4"']) == 2
    assert capsys.readouterr().err == errors
