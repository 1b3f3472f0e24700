"""Values that look like code of a shell, of YAML or of Jinja stay values in every
rendered job.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from titanlite.cli.launch import prepare
from titanlite.config.errors import ConfigError
from titanlite.config.load import load_file
from titanlite.config.toml import loads
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
HOSTILE = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=6).map("".join)
#: Slurm reads no backslash in a folder, and ends the name of a folder of a container at a comma or
#: a colon.
FOLDER = HOSTILE.filter(lambda text: not set(text) & set("\\,:/"))
CONTROL = [
    "\n",
    "\r",
    "\t",
    "\0",
    "\x1b",
    "\x7f",
    "\x85",
    "\u2028",
    "\u2029",
    "\u202e",
    "\u2066",
    "\u200f",
]
#: The stand-in for Python and srun: what they were given, word by word.
RECORD = 'printf "%s\\0" "$PROBE" "$@" >"$RECORD"\n'
SRUN = 'while [ "$1" != bash ]; do shift; done\nexec "$@"\n'
PROPERTY = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[
        Phase.explicit,
        Phase.generate,
    ],  # each example starts programs: a failure is not made smaller
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


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
    for name, body in {
        "python": RECORD,
        "srun": SRUN,
        "scontrol": node,
        "squeue": "",
        "sleep": "",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}")
        (programs / name).chmod(0o755)
    shutil.copy(programs / "python", here / 'py"th`on`')
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "executable", str(here / 'py"th`on`'))
    return tmp_path


def _quoted(value: Any) -> str:
    """Return a value as TOML has it; no variable of it is one to replace."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{_quoted(name)} = {_quoted(item)}" for name, item in value.items())
            + "}"
        )
    if isinstance(value, str):
        codes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
        codes |= {c: f"\\u{ord(c):04x}" for c in CONTROL if c not in codes}
        return '"' + "".join(codes.get(c, c) for c in value).replace("${", "$${") + '"'
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    path = f"{place / 'programs'}:/usr/bin:/bin"
    env = {
        "PATH": path,
        "PWNED": str(pwned),
        "RECORD": str(record),
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "0",
    }
    env |= {
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": "1",
    }
    env |= {"HOSTNAME": "x-worker-0", "HOME": "/root"}
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
    for line in (line for line in script.splitlines() if line.startswith("#SBATCH ")):
        word = ""
        quote = ""
        escaped = False
        for c in line.removeprefix("#SBATCH "):
            if escaped:
                word = word + c
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


def _shape(value: Any) -> Any:
    """Return a YAML document with its texts left out."""
    if isinstance(value, dict):
        return {name: _shape(item) for name, item in value.items()}
    return [_shape(item) for item in value] if isinstance(value, list) else type(value)


def _walk(value: Any, name: str) -> Iterator[Any]:
    """Yield the values of a name at any depth."""
    if isinstance(value, dict):
        yield from (value[name],) if name in value else ()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from _walk(item, name)


@PROPERTY
@given(HOSTILE, FOLDER)
def test_a_script_for_this_machine_starts_python_with_the_values(
    place: Path, value: str, folder: str
) -> None:
    run = place / f"x{folder}"
    script = launch_local.files(_job(place, {"environment": {"PROBE": value}}, str(run)))[
        launch_local.FILE
    ]
    words = _run(place, script)
    config = str(Path(os.path.abspath(run)) / "launch" / "config.toml")
    assert words == [value, "-m", "titanlite", "train", config, "--nproc", "1"]


@PROPERTY
@given(HOSTILE, FOLDER)
def test_a_script_for_slurm_has_its_options_and_starts_python_with_the_values(
    place: Path, value: str, folder: str
) -> None:
    run = Path(os.path.abspath(place / f"x{folder}"))
    run.joinpath("launch").mkdir(parents=True, exist_ok=True)
    launch = {"environment": {"PROBE": value}, "queue": value, "shared_dir": str(place)}
    script = launch_slurm.files(_job(place, launch, str(run)))[launch_slurm.FILE]
    options = _slurm_options(script)
    assert options["partition"] == value
    assert options["chdir"] == os.getcwd()
    assert options["output"] == str(run).replace("%", "%%") + "/launch/slurm-%j.log"
    words = _run(place, script)
    assert words[:3] == [value, "-m", "titanlite.torchrun"]
    assert words[-3:] == ["titanlite", "train", f"{run}/launch/config.toml"]


@PROPERTY
@given(HOSTILE)
def test_a_script_for_slurm_gives_a_container_its_values(place: Path, value: str) -> None:
    launch = {"environment": {"PROBE": value}, "image": value, "shared_dir": str(place)}
    script = launch_slurm.files(_job(place, launch, f"{place}/run"))[launch_slurm.FILE]
    script = script.replace(
        'srun "${options[@]}"', 'printf "%s\\n" "${options[@]}" >"$OPTIONS"; srun', 1
    )
    (place / "run" / "launch").mkdir(parents=True, exist_ok=True)
    _run(place, f"export OPTIONS={place}/options\n{script}")
    options = (place / "options").read_text().splitlines()
    assert f"--container-image={value}" in options
    assert f"--container-workdir={os.getcwd()}" in options


def test_slurm_itself_reads_the_options(place: Path) -> None:
    """As `sbatch -vvv` prints them before it looks for a controller."""
    if shutil.which("sbatch") is None:
        pytest.skip("no Slurm here")
    value, run = """a\\b 'c' "d" # e""", f"{place}/it's %j # x"
    script = place / "job.sbatch"
    script.write_text(
        launch_slurm.files(_job(place, {"queue": value}, run, f"--launch.shared_dir={place}"))[
            script.name
        ]
    )
    config = place / "slurm.conf"
    config.write_text("ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\n")
    env = {**os.environ, "SLURM_CONF": str(config)}
    process = subprocess.Popen(
        ["sbatch", "-vvv", script], env=env, stderr=subprocess.PIPE, text=True
    )
    said = []
    try:
        assert process.stderr
        for line in process.stderr:
            said.append(line)
            if "end of defined options" in line:
                break
    finally:
        process.kill()
        process.communicate()
    if not any("defined options" in line for line in said):
        pytest.skip(f"sbatch does not start here: {''.join(said)}")
    options = dict(
        line.removeprefix("sbatch: ").rstrip("\n").split(" : ", 1) for line in said if " : " in line
    )
    options = {name.strip(): text.strip() for name, text in options.items()}
    assert options["partition"] == value
    assert options["chdir"] == os.getcwd()
    assert options["output"] == f"{place}/it's %%j # x/launch/slurm-%j.log"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(HOSTILE, FOLDER)
def test_manifests_for_kubernetes_have_the_values(
    place: Path, kind: str, value: str, folder: str
) -> None:
    def manifests(text: str, name: str) -> tuple[list[Any], Path]:
        run = Path(os.path.abspath(place / "fsx" / f"x{name}"))
        texts = {"image": text, "queue": text, "namespace": text, "token_secret": text}
        volumes = {"claim": str(place / "fsx")}
        job = _job(
            place,
            {**texts, "kind": kind, "environment": {"PROBE": text}, "volumes": volumes},
            str(run),
        )
        files = launch_kubernetes.files(job)
        # The C loader where it is there: it is ten times as fast.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return [one for file in files.values() for one in yaml.load_all(file, loader) if one], run

    found, run = manifests(value, folder)
    harmless, _ = manifests("plain", "plain")
    assert _shape(found) == _shape(harmless)
    assert {*_walk(found, "image")} == {value}
    assert {*_walk(found, "namespace")} == {value}
    assert {one.get("kueue.x-k8s.io/queue-name", value) for one in _walk(found, "labels")} == {
        value
    }
    env = [one for variables in _walk(found, "env") for one in variables]
    assert {_as_pod(one["value"]) for one in env if one["name"] == "PROBE"} == {value}
    assert {
        one["valueFrom"]["secretKeyRef"]["name"] for one in env if one["name"] == "HF_TOKEN"
    } == {value}
    config = loads(next(_walk(found, "config.toml")))
    assert config["launch"]["environment"]["PROBE"].replace("$${", "${") == value
    assert config["job"]["dump_folder"].replace("$${", "${") == str(place / "fsx" / f"x{folder}")
    if kind == "PyTorchJob":
        arguments = next(_walk(found, "args"))
        _run(place, _as_pod(arguments[2]), *arguments[4:])
        assert (run / "launch" / "starts.log").read_text() == "start after \n"
        shutil.rmtree(run)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("system", ["local", "slurm", "kubernetes"])
@pytest.mark.parametrize(
    "key", ["job.dump_folder", "launch.queue", "launch.environment.PROBE", "launch.image"]
)
def test_a_control_character_is_refused_with_its_key(place: Path, system: str, key: str) -> None:
    make = {
        "local": launch_local,
        "slurm": launch_slurm,
        "kubernetes": launch_kubernetes,
    }
    for character in CONTROL:
        if key == "job.dump_folder" and character == "\0":
            continue  # no folder of any name has one: refused long before
        hostile = f"x{character}touch $PWNED"
        folder = f"{place}/fsx/{hostile if key == 'job.dump_folder' else 'run'}"
        launch: dict[str, Any] = {
            "image": "i",
            "volumes": {"claim": f"{place}/fsx"},
            "shared_dir": str(place),
        }
        name = key.split(".")[1]
        if key.startswith("launch."):
            launch[name] = {"PROBE": hostile} if name == "environment" else hostile
        job = _job(
            place,
            launch,
            folder,
            "--checkpoint.folder=s3://bucket/run",
            "--no-checkpoint.enable_checkpoint",
        )
        with pytest.raises(ConfigError) as refused:
            make[system].files(job)
        code = f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
        assert f"{key}: has the control character {code}" in str(refused.value)


@pytest.mark.parametrize("name", ["A; touch x; B", "1A", "A B", "", "A\nB", "É"])
def test_a_name_that_no_shell_can_set_is_refused(place: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a name of a variable has letters, digits and _"):
        _job(place, {"environment": {name: "1"}}, f"{place}/run")


def test_a_working_folder_with_a_line_end_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place / "a\ntouch pwned"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"the working folder: has the control character \\x0a"):
        launch_local.files(_job(place, {}, f"{place}/run"))


def test_a_folder_that_slurm_cannot_use_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.dump_folder: .* has a backslash"):
        launch_slurm.files(_job(place, {"shared_dir": str(place)}, f"{place}/a\\b"))
    launch = {"shared_dir": f"{place}/a,/:/host", "image": "i"}
    with pytest.raises(ConfigError, match="cannot be mounted in a container"):
        launch_slurm.files(_job(place, launch, f"{place}/a,/:/host/run"))


def test_a_file_name_with_a_line_end_adds_no_key_to_the_kept_config(place: Path) -> None:
    texts = []
    for name in ("plain.toml", "a\nb = 5  # .toml"):
        (place / name).write_text("[training]\nsteps = 3\n")
        texts.append(loads(load_file(place / name).to_toml()))
    assert texts[0] == texts[1]
    assert texts[0]["training"]["steps"] == 3
