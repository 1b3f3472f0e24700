"""The two commands, with stand-ins for Python, pip and torchrun: what is installed when, what is said when it fails."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = [
    "bash",
    "sed",
    "head",
    "cat",
    "cmp",
    "grep",
    "tail",
    "cut",
    "dirname",
    "mkdir",
    "mv",
    "rm",
    "find",
    "sleep",
    "wc",
    "flock",
    "tr",
    "env",
    "rmdir",
    "chmod",
    "mktemp",
]

# Answers as an interpreter of $FAKE_VERSION would, and writes what it was asked to $CALLS.
PYTHON = r"""#!/usr/bin/env bash
case "$1 $2" in
    "-c "*ensurepip*) echo "${FAKE_VERSION:-3.11} ${FAKE_VENV:-ok}" ;;
    "-c "*find_spec*)
        case "$0" in
            */has/*) echo "asked: ${*:3}" >>"$CALLS"; echo "${FAKE_MISSING:-}" ;;
            *) echo "titanlite torch" ;;
        esac ;;
    "-c "*titanlite.cli*)
        echo "check: ${*:3}" >>"$CALLS"
        [ "${FAKE_CHECK:-0}" = 0 ] || echo "debug.toml:3: training.stepz: unknown key"
        exit "${FAKE_CHECK:-0}" ;;
    "-c import titanlite, torch"*) echo import >>"$CALLS" ;;
    "-m venv")
        echo "venv" >>"$CALLS"
        mkdir -p "$3/bin"
        cat "$0" >"$3/bin/python"
        chmod +x "$3/bin/python"
        printf 'home = x\nversion = %s.1\n' "${FAKE_VERSION:-3.11}" >"$3/pyvenv.cfg" ;;
    "-m pip")
        [ "$3" = --version ] && exit 0
        echo "pip: ${*: -1}" >>"$CALLS"
        sleep "${FAKE_PIP_SECONDS:-0}"
        [ -z "${FAKE_PIP_FAIL:-}" ] && exit 0
        echo "ERROR: No matching distribution found for torch==2.13.0"
        exit 1 ;;
    "-m titanlite.torchrun")
        echo "torchrun: OMP=${OMP_NUM_THREADS:-} ${*:3}" >>"$CALLS"
        exit "${FAKE_TRAIN:-0}" ;;
    *) echo "other: $*" >>"$CALLS" ;;
esac
"""


class Machine:
    """A copy of the scripts on a machine that has only the stand-ins."""

    def __init__(self, tmp: Path) -> None:
        self.root, self.bin, self.log = tmp / "a repo", tmp / "bin", tmp / "calls"
        (self.root / "scripts").mkdir(parents=True)
        (self.root / ".ci").mkdir()
        (self.root / "train_configs").mkdir()
        (self.root / "train_configs" / "debug_model.toml").write_text("")
        for name in (
            "run_tests.sh",
            "run_llama_train.sh",
            "scripts/setup_env.sh",
            ".ci/run",
            "pyproject.toml",
            "constraints.txt",
        ):
            shutil.copy(ROOT / name, self.root / name)
        self.bin.mkdir()
        for name in TOOLS:
            if path := shutil.which(name):
                (self.bin / name).symlink_to(path)
        self.env = {"PATH": str(self.bin), "CALLS": str(self.log), "HOME": str(tmp), "TMPDIR": str(tmp)}

    def python(self, name: str = "python3", folder: Path | None = None, **settings: str) -> Path:
        """Put a stand-in interpreter in place; `settings` (FAKE_...) hold for it alone."""
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(f'export {key}="{value}"\n' for key, value in settings.items())
        path.write_text(PYTHON.replace("#!/usr/bin/env bash\n", f"#!/usr/bin/env bash\n{lines}", 1))
        path.chmod(0o755)
        return path

    def run(
        self, script: str, *arguments: str, stdout: int = subprocess.PIPE, **env: str
    ) -> subprocess.CompletedProcess[str]:
        self.log.unlink(missing_ok=True)
        return subprocess.run(
            [str(self.root / script), *arguments],
            env={**self.env, **env},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def installs(self) -> list[str]:
        return [call for call in self.calls() if call.startswith(("venv", "pip"))]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_bare_machine_installs_once_then_reuses_in_well_under_a_second(machine: Machine) -> None:
    machine.python()
    first = machine.run("run_llama_train.sh")
    assert first.returncode == 0, first.stderr
    assert machine.installs() == ["venv", "pip: setuptools", "pip: ."]
    for stage in ("[1/3]", "[2/3]", "[3/3]", "ready after"):
        assert stage in first.stderr
    began = time.perf_counter()
    second = machine.run("run_llama_train.sh")
    assert time.perf_counter() - began < 0.8
    assert machine.installs() == [] and second.stderr == ""
    assert [call.split(":")[0] for call in machine.calls()] == ["check", "torchrun"]


def test_the_tests_need_more_and_training_then_keeps_it(machine: Machine) -> None:
    machine.python()
    machine.run("run_llama_train.sh")
    machine.run("run_tests.sh")
    assert machine.installs() == ["pip: setuptools", "pip: .[dev]"]
    machine.run("run_llama_train.sh")
    assert machine.installs() == []
    (machine.root / "constraints.txt").write_text("torch==2.14.0\n")
    machine.run("run_llama_train.sh")
    assert machine.installs() == ["pip: setuptools", "pip: .[dev]"]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_inputs_bring_the_environment_up_to_date(machine: Machine, name: str) -> None:
    machine.python()
    machine.run("run_llama_train.sh")
    with open(machine.root / name, "a") as file:
        file.write("\n# changed\n")
    again = machine.run("run_llama_train.sh")
    assert machine.installs() == ["pip: setuptools", "pip: ."] and "up to date" in again.stderr


def test_a_repository_that_moved_is_installed_again(machine: Machine) -> None:
    machine.python()
    machine.run("run_llama_train.sh")
    machine.root = machine.root.rename(machine.root.parent / "elsewhere")
    machine.run("run_llama_train.sh")
    assert "pip: ." in machine.installs()


def test_a_failed_install_shows_the_error_and_does_not_count(machine: Machine) -> None:
    machine.python()
    failed = machine.run("run_llama_train.sh", FAKE_PIP_FAIL="1")
    assert failed.returncode == 1
    assert "ERROR: No matching distribution found for torch==2.13.0" in failed.stderr
    assert ".venv/install.log" in failed.stderr and "run the same command again" in failed.stderr
    assert not any(call.startswith("torchrun") for call in machine.calls())
    again = machine.run("run_llama_train.sh")
    assert again.returncode == 0 and "did not finish" in again.stderr
    assert machine.installs() == ["venv", "pip: setuptools", "pip: ."]


def test_an_interrupted_install_starts_over_cleanly(machine: Machine) -> None:
    machine.python()
    process = subprocess.Popen(
        [str(machine.root / "run_llama_train.sh")],
        env={**machine.env, "FAKE_PIP_SECONDS": "30"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 20
    while "pip: setuptools" not in machine.calls() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (machine.root / ".venv" / "half-written").touch()
    again = machine.run("run_llama_train.sh")
    assert again.returncode == 0 and "did not finish" in again.stderr
    assert "venv" in machine.installs() and not (machine.root / ".venv" / "half-written").exists()


def test_an_environment_that_somebody_else_made_is_kept(machine: Machine) -> None:
    machine.python()
    machine.python("python", machine.root / ".venv" / "bin")
    (machine.root / ".venv" / "pyvenv.cfg").write_text("version = 3.11.1\n")
    (machine.root / ".venv" / "theirs").touch()
    assert machine.run("run_llama_train.sh").returncode == 0
    assert machine.installs() == ["pip: setuptools", "pip: ."] and (machine.root / ".venv" / "theirs").exists()


@pytest.mark.parametrize("version", ["3.9", "3.14"])
def test_an_unfit_python_is_named_with_what_is_needed(machine: Machine, version: str) -> None:
    machine.python(FAKE_VERSION=version)
    refused = machine.run("run_tests.sh")
    assert refused.returncode == 1
    assert f"python3 is {version}" in refused.stderr and "3.10 to 3.13" in refused.stderr
    assert machine.installs() == []


def test_no_python_at_all(machine: Machine) -> None:
    refused = machine.run("run_llama_train.sh")
    assert refused.returncode == 1 and "no usable Python" in refused.stderr and "PYTHON=" in refused.stderr


def test_a_fit_python_beside_an_old_default_is_found(machine: Machine) -> None:
    machine.python(FAKE_VERSION="3.9")
    machine.python("python3.12", FAKE_VERSION="3.12")
    found = machine.run("run_llama_train.sh")
    assert found.returncode == 0 and "python3.12 (3.12)" in found.stderr


def test_a_shim_that_does_not_run_is_passed_over(machine: Machine) -> None:
    machine.python("python3.12")
    (machine.bin / "python3.13").write_text("#!/usr/bin/env bash\necho 'command not found' >&2\nexit 127\n")
    (machine.bin / "python3.13").chmod(0o755)
    assert "python3.12 (3.11)" in machine.run("run_llama_train.sh").stderr


def test_debians_missing_venv_package_is_named(machine: Machine) -> None:
    machine.python(FAKE_VENV="no-venv")
    refused = machine.run("run_llama_train.sh")
    assert refused.returncode == 1 and "apt install python3.11-venv" in refused.stderr


def test_an_explicit_python_of_another_version_replaces_the_environment(machine: Machine) -> None:
    machine.python()
    machine.run("run_llama_train.sh")
    other = machine.python("python3.12", FAKE_VERSION="3.12")
    changed = machine.run("run_llama_train.sh", PYTHON=str(other))
    assert machine.installs()[0] == "venv" and "PYTHON=" in changed.stderr
    machine.run("run_llama_train.sh", PYTHON=str(other))
    assert machine.installs() == []
    assert machine.run("run_llama_train.sh", PYTHON="no-such-python").returncode == 1


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX", None])
def test_an_active_environment_with_titanlite_is_used(machine: Machine, tmp_path: Path, variable: str | None) -> None:
    machine.python()
    active = tmp_path / "has"
    machine.python("python", active / "bin")
    env = {variable: str(active)} if variable else {"PATH": f"{active}/bin:{machine.bin}"}
    used = machine.run("run_llama_train.sh", **env)
    assert used.returncode == 0 and f"{active}/bin/python" in used.stderr
    assert machine.installs() == [] and not (machine.root / ".venv").exists()


def test_an_active_environment_without_the_test_tools_says_so(machine: Machine, tmp_path: Path) -> None:
    machine.python()
    machine.python("python", tmp_path / "has" / "bin")
    used = machine.run("run_tests.sh", VIRTUAL_ENV=str(tmp_path / "has"), FAKE_MISSING="pytest ruff")
    assert "but not: pytest ruff" in used.stderr and "pip: .[dev]" in machine.installs()


def test_an_active_environment_must_have_all_that_is_imported(machine: Machine, tmp_path: Path) -> None:
    machine.python("python", tmp_path / "has" / "bin")
    run = "asked: titanlite torch torchao datasets numpy pydantic tiktoken sentencepiece rich tensorboard"
    machine.run("run_llama_train.sh", VIRTUAL_ENV=str(tmp_path / "has"))
    assert machine.calls()[0] == run
    machine.run("run_tests.sh", VIRTUAL_ENV=str(tmp_path / "has"))
    tools = "pytest ruff mypy hypothesis pyte transformers tokenizers matplotlib s3fs moto flask_cors"
    assert machine.calls()[0] == f"{run} {tools}"


def test_an_active_environment_without_titanlite_is_left_alone(machine: Machine, tmp_path: Path) -> None:
    machine.python()
    machine.python("python", tmp_path / "plain" / "bin")
    machine.run("run_llama_train.sh", VIRTUAL_ENV=str(tmp_path / "plain"))
    assert machine.installs() == ["venv", "pip: setuptools", "pip: ."] and (machine.root / ".venv").exists()


def test_two_runs_at_once_install_once(machine: Machine) -> None:
    machine.python()
    start = [str(machine.root / "run_llama_train.sh")]
    env = {**machine.env, "FAKE_PIP_SECONDS": "0.7"}
    both = [subprocess.Popen(start, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert machine.installs() == ["venv", "pip: setuptools", "pip: ."]
    assert sum("waiting for it" in text for text in said) == 1


def test_the_lock_works_without_flock(machine: Machine) -> None:
    (machine.bin / "flock").unlink()
    machine.python()
    lock = machine.root / ".venv" / "titanlite.lock.d"
    lock.mkdir(parents=True)
    dead = subprocess.Popen(["true"])
    dead.wait()
    (lock / "pid").write_text(str(dead.pid))
    assert machine.run("run_llama_train.sh").returncode == 0
    assert machine.installs()[-1] == "pip: ." and not lock.exists()


def test_a_wrong_config_starts_no_worker(machine: Machine) -> None:
    machine.python()
    refused = machine.run("run_llama_train.sh", "--training.stepz", "3", FAKE_CHECK="2")
    assert refused.returncode == 2 and "training.stepz: unknown key" in refused.stderr
    assert [call.split(":")[0] for call in machine.calls() if call[:4] in ("chec", "torc")] == ["check"]


def test_what_torchrun_is_given(machine: Machine) -> None:
    machine.python()
    done = machine.run("run_llama_train.sh", "--job.description", "two words", NGPU="3", LOG_RANK="0,2", FAKE_TRAIN="7")
    assert done.returncode == 7
    check, launch = machine.calls()[-2:]
    config = f"{machine.root}/train_configs/debug_model.toml"
    assert check == f"check: config check {config} --job.description two words --strict --world-size 3"
    for part in (
        "torchrun: OMP=1 ",
        "--nproc_per_node 3 ",
        "--rdzv_backend c10d ",
        "--rdzv_endpoint localhost:0 ",
        "--local-ranks-filter 0,2 ",
        f"train.py --job.config_file {config} --job.description two words",
    ):
        assert part in launch


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"NGPU": "3"}, "--local-ranks-filter 0 --redirects 1:3,2:3 --log-dir "),
        ({"NGPU": "1"}, "--local-ranks-filter 0 "),
        ({"NGPU": "10"}, "--redirects 1:3,2:3,3:3,4:3,5:3,6:3,7:3,8:3,9:3 "),
        ({"NGPU": "11"}, "--local-ranks-filter 0 --role rank --tee 3 --log-dir "),
        ({"NGPU": "3", "LOG_RANK": "0,1"}, "--local-ranks-filter 0,1 --role rank --tee 3 "),
        ({"NGPU": "3", "LOG_RANK": "1"}, "--local-ranks-filter 1 --role rank --tee 3 "),
    ],
)
def test_rank_0_alone_has_the_terminal_to_itself(machine: Machine, settings: dict[str, str], said: str) -> None:
    machine.python()
    terminal, end = os.openpty()
    try:
        machine.run("run_llama_train.sh", stdout=end, **settings)
    finally:
        os.close(end)
        os.close(terminal)
    launch = machine.calls()[-1]
    assert said in launch and ("--tee" in launch) is ("--tee" in said)
    assert ("--log-dir" in launch) is (settings["NGPU"] != "1"), "what the others print can be found"
    for folder in re.findall(r"--log-dir (\S+)", launch):
        assert Path(folder).is_dir() and Path(folder).match("titanlite-*") and folder.startswith(machine.env["TMPDIR"])


def test_one_worker_per_visible_gpu(machine: Machine) -> None:
    machine.python()
    (machine.bin / "nvidia-smi").write_text('#!/usr/bin/env bash\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA"; done\n')
    (machine.bin / "nvidia-smi").chmod(0o755)
    machine.run("run_llama_train.sh")
    assert "--nproc_per_node 4 " in machine.calls()[-1] and "OMP= " in machine.calls()[-1]
    machine.run("run_llama_train.sh", CUDA_VISIBLE_DEVICES="1,3")
    assert "--nproc_per_node 2 " in machine.calls()[-1]
    many = machine.run("run_llama_train.sh", NGPU="5")
    assert many.returncode == 2 and "4 GPU(s)" in many.stderr and machine.calls() == []


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("NGPU", "two", "NGPU"),
        ("NGPU", "0", "NGPU"),
        ("LOG_RANK", "2", "no rank 2 among 2 workers"),
        ("LOG_RANK", "x", "LOG_RANK"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_installed(
    machine: Machine, name: str, value: str, text: str
) -> None:
    refused = machine.run("run_llama_train.sh", **{name: value})
    assert refused.returncode == 2 and text in refused.stderr and not (machine.root / ".venv").exists()


@pytest.mark.parametrize("script", ["run_llama_train.sh", "run_tests.sh"])
def test_help_needs_no_installation(machine: Machine, script: str) -> None:
    done = machine.run(script, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage:") and not (machine.root / ".venv").exists()


def test_the_tiers_of_the_tests(machine: Machine) -> None:
    machine.python()
    machine.run("run_tests.sh", "tests/config", "-k", "a b")
    quick = [call for call in machine.calls() if call.startswith("other")]
    assert [call.split()[2] for call in quick] == ["ruff", "ruff", "mypy", "pytest"]
    assert "-m not slow" in quick[-1] and quick[-1].endswith("tests/config -k a b")
    for script, arguments in (("run_tests.sh", ["--full"]), (".ci/run", [])):
        machine.run(script, *arguments)
        assert "-m pytest" in machine.calls()[-1]
        assert "slow" not in machine.calls()[-1] and "--full" not in machine.calls()[-1]


def test_a_failing_stage_fails_the_whole_but_the_tests_still_run(machine: Machine) -> None:
    machine.python()
    machine.run("run_tests.sh")
    stand_in = machine.root / ".venv" / "bin" / "python"
    stand_in.write_text('#!/usr/bin/env bash\necho "ran $2"; case "$2" in mypy) exit 1 ;; esac\n')
    done = machine.run("run_tests.sh")
    assert done.returncode == 1 and "-- mypy: FAILED (1)" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1] == "ran pytest"
    stand_in.write_text('#!/usr/bin/env bash\ncase "$2" in pytest) exit 5 ;; esac\n')
    assert machine.run("run_tests.sh").returncode == 5
