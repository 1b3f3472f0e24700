"""Values that look like code of a shell, of YAML or of Jinja stay values in every
rendered job.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from titanlite.cli.launch import prepare
from titanlite.config.errors import ConfigError
from titanlite.config.load import load_file
from titanlite.config.toml import loads, quote
from titanlite.launch import kubernetes as launch_kubernetes
from titanlite.launch import local as launch_local
from titanlite.launch import slurm as launch_slurm
from titanlite.launch.job import Job

KINDS = ("PyTorchJob", "TrainJob")
#: Each of them ends or begins something in one of the languages; `touch` tells when a shell obeys
#: one.
FRAGMENTS = [
    "'",
    '"',
    '"""',
    "`touch $PWNED`",
    '$(touch "$PWNED")',
    "; touch $PWNED #",
    "&& touch $PWNED",
    "$HOME",
    "${HOME}",
    "$$",
    "$(POD_IP)",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "{# no #}",
    "%j",
    "%",
    "#",
    " # ",
    ": ",
    "- ",
    "---",
    "|",
    ">",
    "&a",
    "*a",
    "!!python/object:os.system",
    "[",
    "{",
    "<",
    "\\",
    "\\n",
    "null",
    "é",
    "😀",
    " ",
]
#: Each fragment stands in one of the first three; what begins or is a value of YAML stands alone.
TEXTS = [*("".join(FRAGMENTS[first::3]) for first in range(3)), "null", "- ", "&a", "!!map", "\\"]
#: The stand-in for Python and srun: what they were given, word by word.
RECORD = 'printf "%s\\0" "$PROBE" "$@" >"$RECORD"\n'
SRUN = 'while [ "$1" != bash ]; do shift; done\nexec "$@"\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder and a Python whose names are hostile, and programs of Slurm that only tell
    their words.
    """
    here = tmp_path / "it's $(touch $PWNED) #"
    programs = tmp_path / "programs"
    for folder in (here, programs):
        folder.mkdir()
    node = "echo NodeList=node1 NodeAddr=10.0.0.1\n"
    bodies = {"python": RECORD, "srun": SRUN, "scontrol": node, "squeue": "", "sleep": ""}
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}")
        (programs / name).chmod(0o755)
    python = shutil.copy(programs / "python", here / 'py"th`on`')
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "executable", str(python))
    return tmp_path


def _folder(text: str) -> str:
    """Return a name of a folder. Slurm reads no backslash in it, and a container's ends at a comma
    or a colon.
    """
    return "x" + re.sub(r"[\\,:/]", "", text)


def _quoted(value: Any) -> str:
    """Return a value as TOML has it; no variable of it is one to replace."""
    return quote(value).replace("${", "$${")


def _job(place: Path, launch: dict[str, Any], dump_folder: str, *flags: str) -> Job:
    file = place / "run.toml"
    lines = [f"{name} = {_quoted(value)}" for name, value in launch.items()]
    text = f"[job]\ndump_folder = {_quoted(dump_folder)}\n[launch]\ncpu = true\ngpus_per_node = 1\n"
    file.write_text("\n".join([text, *lines]), encoding="utf-8")
    return prepare([f"--job.config_file={file}", *flags])


def _run(place: Path, script: str, *more: str) -> list[str]:
    """Run a script with the stand-ins; return the words of Python. It must obey nothing else."""
    file = place / "script"
    record = place / "record"
    pwned = place / "pwned"
    file.write_text(script, encoding="utf-8")
    record.unlink(missing_ok=True)
    env = {
        "PATH": f"{place / 'programs'}:/usr/bin:/bin",
        "PWNED": str(pwned),
        "RECORD": str(record),
        "HOME": "/root",
        "HOSTNAME": "x-worker-0",
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_STEP_NODELIST": "node1",
    }
    done = subprocess.run(
        ["bash", file, *more], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not pwned.exists()
    return record.read_text().split("\0")[:-1]


def _slurm_options(script: str) -> dict[str, str]:
    """Return the options of `#SBATCH` lines by the rules of Slurm: quotes, and backslashes within
    them.
    """
    found = {}
    for line in re.findall("^#SBATCH (.*)", script, re.M):
        word = ""
        quote = ""
        escaped = False
        for c in line:
            if escaped:
                word += c
                escaped = False
            elif c == "\\":
                escaped = True
            elif c == quote:
                quote = ""
            elif not quote and c in "'\"":
                quote = c
            elif not quote and c in " #":
                break
            else:
                word += c
        assert not quote and not escaped, line
        name, _, value = word.removeprefix("--").partition("=")
        found[name] = value
    return found


def _as_pod(text: str) -> str:
    """Return what a container gets of an argument or a variable: two dollars are one, a known
    `$(NAME)` its value.
    """

    def value(match: re.Match[str]) -> str:
        assert match[1] not in ("POD_IP", "HOME"), f"{match[0]} is replaced in {text}"
        return "$" if match[0] == "$$" else match[0]

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def _read(value: Any, text: str) -> Any:
    """Return a document as pods get it, with a text in place of "plain"."""
    if isinstance(value, dict):
        if value.get("name") == "PROBE":
            value = {**value, "value": _as_pod(value["value"])}
        return {name: _read(item, text) for name, item in value.items()}
    if isinstance(value, list):
        return [_read(item, text) for item in value]
    return text if value == "plain" else value


@pytest.mark.parametrize("value", TEXTS)
def test_a_script_for_this_machine_starts_python_with_the_values(place, value):
    run = place / _folder(value)
    job = _job(place, {"environment": {"PROBE": value}}, str(run))
    words = _run(place, launch_local.files(job)[launch_local.FILE])
    config = f"{os.path.abspath(run)}/launch/config.toml"
    assert words == [value, "-m", "titanlite", "train", config, "--nproc", "1"]


@pytest.mark.parametrize("value", TEXTS)
def test_a_script_for_slurm_has_its_options_and_starts_python_with_the_values(place, value):
    run = Path(os.path.abspath(place / _folder(value)))
    run.joinpath("launch").mkdir(parents=True, exist_ok=True)
    launch = {"queue": value, "image": value, "shared_dir": str(place)}
    job = _job(place, {**launch, "environment": {"PROBE": value}}, str(run))
    script = launch_slurm.files(job)[launch_slurm.FILE]
    options = _slurm_options(script)
    assert options["partition"] == value
    assert options["chdir"] == os.getcwd()
    assert options["output"] == str(run).replace("%", "%%") + "/launch/slurm-%j.log"
    script = script.replace(
        'srun "${options[@]}"', 'printf "%s\\n" "${options[@]}" >"$OPTIONS"; srun', 1
    )
    words = _run(place, f"export OPTIONS={place}/options\n{script}")
    assert words[:3] == [value, "-m", "titanlite.torchrun"]
    assert words[-3:] == ["titanlite", "train", f"{run}/launch/config.toml"]
    of_srun = (place / "options").read_text().splitlines()
    assert f"--container-image={value}" in of_srun
    assert f"--container-workdir={os.getcwd()}" in of_srun


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", TEXTS)
def test_manifests_for_kubernetes_have_the_values(place, kind, value):
    run = Path(os.path.abspath(place / "fsx" / _folder(value)))

    def manifests(text):
        launch = dict.fromkeys(("image", "queue", "namespace", "token_secret"), text)
        launch |= {"environment": {"PROBE": text}, "volumes": {"claim": f"{place}/fsx"}}
        files = launch_kubernetes.files(_job(place, {**launch, "kind": kind}, str(run)))
        # The C loader where it is there: it is ten times as fast.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return [one for file in files.values() for one in yaml.load_all(file, loader) if one]

    found, harmless = manifests(value), manifests("plain")
    configs = [loads(one[0]["data"].pop("config.toml")) for one in (found, harmless)]
    assert _read(found, "") == _read(harmless, value)
    assert configs[0]["launch"]["environment"]["PROBE"].replace("$${", "${") == value
    assert configs[0]["job"]["dump_folder"].replace("$${", "${") == str(run)
    if kind == "PyTorchJob":
        worker = found[1]["spec"]["pytorchReplicaSpecs"]["Worker"]
        arguments = worker["template"]["spec"]["containers"][0]["args"]
        _run(place, _as_pod(arguments[2]), *arguments[4:])
        assert (run / "launch" / "starts.log").read_text() == "start after \n"


@pytest.mark.parametrize("character", ["\n", "\u202e"])
def test_a_control_character_is_refused_with_its_key(place, character):
    hostile = f"x{character}touch $PWNED"
    launch = {
        "queue": hostile,
        "environment": {"PROBE": hostile},
        "image": hostile,
        "volumes": {"claim": f"{place}/fsx"},
        "shared_dir": str(place),
    }
    code = f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
    job = _job(place, launch, f"{place}/fsx/{hostile}", "--no-checkpoint.enable_checkpoint")
    for system in (launch_local, launch_slurm, launch_kubernetes):
        with pytest.raises(ConfigError) as refused:
            system.files(job)  # type: ignore[attr-defined]
        for key in ("job.dump_folder", "launch.queue", "launch.environment.PROBE", "launch.image"):
            assert f"{key}: has the control character {code}" in str(refused.value)


@pytest.mark.parametrize("name", ["A; touch x; B", "1A", "É"])
def test_a_name_that_no_shell_can_set_is_refused(place, name):
    with pytest.raises(ConfigError, match="a name of a variable has letters, digits and _"):
        _job(place, {"environment": {name: "1"}}, f"{place}/run")


def test_a_working_folder_with_a_line_end_is_named(place, monkeypatch):
    folder = place / "a\ntouch pwned"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"the working folder: has the control character \\x0a"):
        launch_local.files(_job(place, {}, f"{place}/run"))


def test_a_folder_that_slurm_cannot_use_is_refused(place):
    with pytest.raises(ConfigError, match=r"job\.dump_folder: .* has a backslash"):
        launch_slurm.files(_job(place, {"shared_dir": str(place)}, f"{place}/a\\b"))
    launch = {"shared_dir": f"{place}/a,/:/host", "image": "i"}
    with pytest.raises(ConfigError, match="cannot be mounted in a container"):
        launch_slurm.files(_job(place, launch, f"{place}/a,/:/host/run"))


def test_a_file_name_with_a_line_end_adds_no_key_to_the_kept_config(place):
    texts = []
    for name in ("plain.toml", "a\nb = 5  # .toml"):
        (place / name).write_text("[training]\nsteps = 3\n")
        texts.append(loads(load_file(place / name).to_toml()))
    assert texts[0] == texts[1]
    assert texts[0]["training"]["steps"] == 3
