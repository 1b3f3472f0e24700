"""`${NAME}` in values: replaced on load, kept for other machines by launchers, and always loaded
back to the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlite.assembly.error_exit import tell_sagemaker
from titanlite.assembly.folders import show_config
from titanlite.cli.main import main
from titanlite.config.errors import ConfigError
from titanlite.config.load import load, load_file, read, read_text
from titanlite.config.run_sections import Job

TEXT = """\
[job]
description = "costs $${PRICE} and $$${TWO}"
[model]
tokenizer_path = "${ROOT}/tokenizer.model"
[float8]
filter_fqns = ["${ROOT}", "output"]
[[data.source]]
path = "${ROOT}/a-${PART}.jsonl"
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ROOT", "/data")
    monkeypatch.setenv("PART", "7")
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(TEXT)
    return Path("run.toml")


def _wanted(root, part):
    price = "costs ${PRICE} and $${TWO}"
    return (price, f"{root}/tokenizer.model", [root, "output"], f"{root}/a-{part}.jsonl")


def _values(config):
    d = config.sections
    return (d.job.description, d.model.tokenizer_path, d.float8.filter_fqns, d.data.source[0].path)


def test_variables_are_replaced_in_strings_lists_and_tables_and_named_with_the_source(
    file, monkeypatch
):
    config = load_file(file)
    assert _values(config) == _wanted("/data", 7)
    assert str(config.source("model.tokenizer_path")) == "run.toml:4 with ${ROOT}"
    assert str(config.source("data.source")) == "run.toml:7 with ${ROOT}, ${PART}"
    monkeypatch.delenv("ROOT")
    again, problems = read_text(config.to_toml(), Path("config.toml"))
    assert not problems
    assert _values(again) == _values(config), "a written config needs no variables"


def test_flags_and_extended_files_have_variables_too(file, monkeypatch):
    monkeypatch.setenv("BASE", "run")
    Path("more.toml").write_text('[job]\nextends = ["${BASE}.toml"]\n')
    config = load(["--config_file", "${BASE}.toml", "--job.dump_folder", "${ROOT}/out"])
    assert config.sections.job.dump_folder == "/data/out"
    assert str(config.source("job.dump_folder")) == "command line with ${ROOT}"
    assert load_file("more.toml").sections.model.tokenizer_path == "/data/tokenizer.model"


def test_an_unset_variable_is_named_with_file_line_and_key(file, monkeypatch):
    monkeypatch.delenv("PART")
    with pytest.raises(ConfigError) as error:
        load_file(file, ["--job.description=${", "--model.hf_config=${1}"])
    found = {(p.where, p.key): p.message for p in error.value.problems}
    assert found == {
        ("run.toml:8", "data.source[0].path"): "the environment variable PART is not set",
        ("command line", "job.description"): "has ${ without the NAME} of a variable",
        ("command line", "model.hf_config"): "has ${ without the NAME} of a variable",
    }
    assert {p.code for p in error.value.problems} == {"variable"}


def test_a_launcher_leaves_variables_to_the_machines_of_the_job(file, monkeypatch):
    monkeypatch.delenv("PART")
    config, problems = read(
        [f"--config_file={file}", "--launch.image=${ROOT}", "--job.dump_folder=${ROOT}/x"],
        defer=True,
    )
    text = config.to_toml()
    assert not problems
    assert 'path = "${ROOT}/a-${PART}.jsonl"' in text.replace("'", '"')
    assert 'image = "/data"' in text
    assert 'dump_folder = "/data/x"' in text
    monkeypatch.setenv("ROOT", "/there")
    monkeypatch.setenv("PART", "8")
    there, problems = read_text(text, Path("config.toml"))
    assert not problems
    assert _values(there) == _wanted("/there", 8)
    monkeypatch.delenv("ROOT")
    _, problems = read(["--launch.image=${ROOT}", "--job.dump_folder=${ROOT}/x"], defer=True)
    assert [p.key for p in problems] == ["launch.image", "job.dump_folder"]


def test_secrets_that_variables_bring_are_not_shown(monkeypatch, capsys):
    monkeypatch.setenv("SECRET", "hidden")
    flags = [
        "--launch.environment.API_KEY=${SECRET}",
        "--data.chat_template=https://me:${SECRET}@host/a",
    ]
    assert main(["config", "explain", "launch.environment", *flags]) == 0
    assert main(["config", "explain", "launch", *flags]) == 0
    config = load(flags)
    show_config(Job(print_config=True), config.to_toml())
    said = capsys.readouterr().out
    assert "hidden" in config.to_toml()
    assert "hidden" not in said
    assert "https://(removed)@host" in said


def test_the_first_cause_of_the_last_attempt_is_told_to_sagemaker(monkeypatch, tmp_path):
    monkeypatch.setenv("SM_OUTPUT_DIR", str(tmp_path))
    for attempt, code, message, told in (
        ("0", 7, "lost", "lost"),
        ("0", 2, "cause", "cause"),
        ("0", 1, "b", "cause"),
        ("1", 7, "c", "c"),
    ):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        tell_sagemaker(message, code)
        assert (tmp_path / "failure").read_text().strip() == told
