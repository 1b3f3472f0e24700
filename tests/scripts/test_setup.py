"""The two commands, with stand-ins for Python, uv, pip and torchrun: what is installed when, and
what is said.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import ROOT

TOOLS = re.findall(
    r"\w+", "bash sed grep cat cmp tr find dirname env mkdir mktemp mv rm chmod sleep timeout"
)
#: What makes a new environment, and what updates one.
MADE = ["venv", "pip: uv", "uv: setuptools", "uv: ."]
UPDATED = MADE[1:]

# Answers as an interpreter of $FAKE_VERSION would, and writes what it was asked to $CALLS. The lock
# is real, and so are pip's settings, where a test gives any.
PYTHON = r"""#!/usr/bin/env bash
case "$1 $2" in
    "-c "*fcntl*) exec "$REAL_PYTHON" -S "$@" ;;
    "-c " | "-c import torch, titanlite.trainer") ;;
    "-c "*ensurepip*) echo "${FAKE_VERSION:-3.11} ${FAKE_STATE:-fits}" ;;
    "-c "*find_spec*)
        case "$0" in
            */has/*) echo "asked: ${*:3}" >>"$CALLS"; echo "${FAKE_MISSING:-}" ;;
            *) echo "titanlite torch" ;;
        esac ;;
    "-m venv")
        echo "venv" >>"$CALLS"
        [ ! -L "$3" ] || exit 1 # as the real one
        mkdir -p "$3/bin"
        cat "$0" >"$3/bin/python"
        chmod +x "$3/bin/python"
        printf 'home = x\nversion = %s.1\n' "${FAKE_VERSION:-3.11}" >"$3/pyvenv.cfg" ;;
    "-m pip")
        if [ "$3" = config ]; then [ -z "${PIP_CONFIG_FILE:-}" ] || exec "$REAL_PYTHON" "$@"
            exit 0; fi
        echo "pip: ${*: -1}" >>"$CALLS"
        while [ -e "${FAKE_HOLD:-}" ]; do sleep 0.05; done
        case " ${FAKE_FAIL:-} " in
            *" ${*: -1} "*) echo "ERROR: No matching distribution found for ${*: -1}"; exit 1 ;;
        esac
        if [ "${*: -1}" = uv ]; then cat "$UV" >"$(dirname "$0")/uv"
            chmod +x "$(dirname "$0")/uv"; fi ;;
    "-m titanlite")
        echo "titanlite: ${*:3}" >>"$CALLS"
        exit "${FAKE_TRAIN:-0}" ;;
    *) echo "other: $*" >>"$CALLS" ;;
esac
"""
# Writes down the settings that it would hold to, too.
UV = r"""#!/usr/bin/env bash
echo "uv: ${*: -1}" >>"$CALLS"
env | grep ^UV_ >"$CALLS.uv"
exit "${FAKE_UV:-0}"
"""


class Machine:
    """A copy of the scripts on a machine that has only the stand-ins."""

    def __init__(self, tmp: Path) -> None:
        self.root = tmp / "a repo"
        self.bin = tmp / "bin"
        self.log = tmp / "calls"
        for folder in ("scripts", ".ci", "train_configs"):
            (self.root / folder).mkdir(parents=True)
        (self.root / "train_configs" / "debug_model.toml").write_text("")
        scripts = ["run_tests.sh", "run_llama_train.sh", "scripts/setup_env.sh", ".ci/run"]
        for name in (*scripts, "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.bin.mkdir()
        for name in TOOLS:
            if path := shutil.which(name):
                (self.bin / name).symlink_to(path)
        self.env = {
            "PATH": str(self.bin),
            "CALLS": str(self.log),
            "HOME": str(tmp),
            "TMPDIR": str(tmp),
        }
        self.env |= {"REAL_PYTHON": sys.executable, "UV": str(self.executable(tmp / "uv", UV))}

    def executable(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, name: str = "python3", folder: Path | None = None, **settings: str) -> Path:
        """Put a stand-in interpreter in place; `settings` (FAKE_...) hold for it alone."""
        lines = "".join(f'export {key}="{value}"\n' for key, value in settings.items())
        text = PYTHON.replace("#!/usr/bin/env bash\n", f"#!/usr/bin/env bash\n{lines}", 1)
        return self.executable((folder or self.bin) / name, text)

    def run(self, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        self.log.unlink(missing_ok=True)
        return subprocess.run(
            [str(self.root / script), *arguments],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def installs(self) -> list[str]:
        return [call for call in self.calls() if call.startswith(("venv", "pip", "uv"))]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_bare_machine_installs_once_then_reuses_in_well_under_a_second(machine):
    machine.python()
    first = machine.run("run_llama_train.sh")
    assert first.returncode == 0, first.stderr
    assert machine.installs() == MADE
    assert "ready after" in first.stderr
    second = machine.run("run_llama_train.sh")
    assert machine.installs() == []
    assert second.stderr == ""
    config = machine.root / "train_configs" / "debug_model.toml"
    assert machine.calls() == [f"titanlite: train {config}"]


@pytest.mark.slow
def test_changed_inputs_and_another_place_bring_the_environment_up_to_date(machine):
    machine.python()
    machine.run("run_llama_train.sh")
    with open(machine.root / "pyproject.toml", "a") as file:
        file.write("\n# changed\n")
    for _ in range(2):
        again = machine.run("run_llama_train.sh")
        assert machine.installs() == UPDATED
        assert "up to date" in again.stderr
        machine.root = machine.root.rename(machine.root.parent / "elsewhere")


@pytest.mark.slow
def test_an_interrupted_install_starts_over_cleanly(machine):
    machine.python()
    hold = machine.root / "hold"
    hold.touch()
    process = subprocess.Popen(
        [str(machine.root / "run_llama_train.sh")],
        env={**machine.env, "FAKE_HOLD": str(hold)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while "pip: uv" not in machine.calls():  # which FAKE_HOLD holds
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (machine.root / ".venv" / "half-written").touch()
    assert machine.run("run_llama_train.sh").returncode == 0
    assert machine.installs() == MADE
    assert not (machine.root / ".venv" / "half-written").exists()


@pytest.mark.slow
def test_an_environment_that_somebody_else_made_is_kept(machine):
    machine.python()
    machine.python("python", machine.root / ".venv" / "bin")
    (machine.root / ".venv" / "pyvenv.cfg").write_text("version = 3.11.1\n")
    (machine.root / ".venv" / "theirs").touch()
    other = machine.run(
        "run_llama_train.sh", PYTHON=str(machine.python("python3.12", FAKE_VERSION="3.12"))
    )
    assert other.returncode == 1
    assert "somebody else made it" in other.stderr
    assert machine.installs() == []
    assert machine.run("run_llama_train.sh").returncode == 0
    assert machine.installs() == UPDATED
    assert (machine.root / ".venv" / "theirs").exists()


@pytest.mark.slow
def test_an_active_environment_is_used_if_it_has_all_that_is_needed(machine, tmp_path):
    machine.python()
    for folder in ("has", "without"):
        machine.python("python", tmp_path / folder / "bin")
    active = str(tmp_path / "has")
    for env in ({"VIRTUAL_ENV": active}, {"PATH": f"{active}/bin:{machine.bin}"}):
        used = machine.run("run_llama_train.sh", **env)
        assert used.returncode == 0
        assert f"{active}/bin/python" in used.stderr
        assert machine.installs() == []
    for folder, words in (("has", "lacks pytest ruff"), ("without", "making .venv")):
        shutil.rmtree(machine.root / ".venv", ignore_errors=True)
        env = {"VIRTUAL_ENV": str(tmp_path / folder), "FAKE_MISSING": "pytest ruff"}
        assert words in machine.run("run_tests.sh", **env).stderr
        assert machine.installs() == [*MADE[:-1], "uv: .[dev]"]


def test_what_the_command_is_given(machine):
    machine.python()
    done = machine.run("run_llama_train.sh", "--job.description", "two words", FAKE_TRAIN="7")
    assert done.returncode == 7
    config = f"{machine.root}/train_configs/debug_model.toml"
    assert machine.calls()[-1] == f"titanlite: train {config} --job.description two words"
    (machine.root / "of_root.toml").write_text("")
    machine.run("run_llama_train.sh", "--training.steps=3", CONFIG_FILE="of_root.toml")
    assert machine.calls()[-1] == f"titanlite: train {machine.root}/of_root.toml --training.steps=3"
    machine.run("run_llama_train.sh", "a.toml", "b.toml")
    assert machine.calls()[-1] == "titanlite: train a.toml b.toml"


def test_the_tiers_of_the_tests(machine):
    machine.python()
    machine.run("run_tests.sh", "tests/config", "-k", "a b")
    quick = [call for call in machine.calls() if call.startswith("other")]
    assert [call.split()[2] for call in quick] == ["ruff", "ruff", "mypy", "pytest"]
    assert "-m not slow" in quick[-1]
    assert quick[-1].endswith("tests/config -k a b")
    for words in (["run_tests.sh", "--full"], [".ci/run"]):
        machine.run(*words)
        last = machine.calls()[-1]
        assert "-m pytest" in last and "slow" not in last and "--full" not in last


def test_a_failing_stage_fails_the_whole_but_the_tests_still_run(machine):
    machine.python()
    machine.run("run_tests.sh")
    stand_in = machine.root / ".venv" / "bin" / "python"
    stand_in.write_text('#!/usr/bin/env bash\necho "ran $2"; case "$2" in mypy) exit 1 ;; esac\n')
    done = machine.run("run_tests.sh")
    assert done.returncode == 1
    assert "-- mypy: FAILED (1)" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1] == "ran pytest"
    stand_in.write_text('#!/usr/bin/env bash\ncase "$2" in pytest) exit 5 ;; esac\n')
    assert machine.run("run_tests.sh").returncode == 5
