"""The other ways of docs/sweep.md to run many points, as the page shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.contrib.lab.test_sweep import HEAD
from tests.support.processes import ROOT, environment
from titanlite.cli.main import main
from titanlite.resolve.load import check_config

PAGE = (ROOT / "docs" / "sweep.md").read_text(encoding="utf-8")
RATES = '"optimizer.lr" = [0.0001, 0.0003, 0.001, 0.003, 0.01]\n'


def blocks(language: str) -> list[str]:
    """The examples of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


#: In place of `titanlite`: it keeps its words, and writes the rate as the loss of a run.
STAND_IN = f"""#!{sys.executable}
import json, sys
from pathlib import Path
flags = dict(word[2:].split("=", 1) for word in sys.argv if "=" in word)
with open("words", "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
folder = Path(flags["job.dump_folder"])
folder.mkdir(parents=True)
loss = json.dumps({{"validation_loss": float(flags["optimizer.lr"])}})
(folder / "metrics.jsonl").write_text(loss)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with rates.toml and a command `titanlite` in bin/."""
    (tmp_path / "rates.toml").write_text(HEAD + RATES)
    own = tmp_path / "bin" / "titanlite"
    own.parent.mkdir()
    own.write_text(STAND_IN)
    own.chmod(0o755)
    return tmp_path


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = environment(**variables)
    own["PATH"] = f"{folder / 'bin'}:{own['PATH']}"
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_optuna_minimizes_the_validation_loss(folder):
    """A stand-in for Optuna, whose study tries the ends of a range."""
    (folder / "optuna.py").write_text(
        """
class Trial:
    def __init__(self, number):
        self.number = number

    def suggest_float(self, name, low, high, log):
        assert log
        self.params = {name: (low, high)[self.number]}
        return self.params[name]


class Study:
    def optimize(self, objective, n_trials, catch):
        trials = [Trial(number) for number in (0, 1)]
        self.best_value, number = min((objective(trial), trial.number) for trial in trials)
        self.best_params = trials[number].params


create_study = Study
"""
    )
    (folder / "search.py").write_text(blocks("python")[0])
    done = run(folder, sys.executable, "search.py", PYTHONPATH=f"{folder}:{ROOT}")
    assert done.stdout.splitlines()[-1] == "{'lr': 0.0001} 0.0001"


def test_an_agent_of_wandb_starts_a_run_of_its_own_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    text = (folder / "rates.toml").read_text()
    named = '[job]\ndump_folder = "outputs/${WANDB_RUN_ID}"\n'
    (folder / "rates.toml").write_text(text.replace("[job]\n", named))
    (page,) = blocks("yaml")
    command = yaml.safe_load(page)["command"]
    # As the agent replaces it.
    words = ["--optimizer.lr=0.003" if word == "${args}" else word for word in command]
    assert words[:2] == ["titanlite", "train"]
    _, found = check_config([f"--job.config_file={words[2]}", *words[3:]], 1)
    assert (found.optimizer.lr, found.job.dump_folder) == (0.003, "outputs/abc")


def test_a_task_of_the_array_trains_in_a_folder_of_a_sweep(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    run(folder, "bash", "-euc", blocks("bash")[0], SLURM_ARRAY_TASK_ID="2")
    assert main(["sweep", "rates.toml", "--folder", "outputs/rates-sweep", "--dry-run"]) == 0
    (made,) = (folder / "outputs" / "rates-sweep").iterdir()
    assert f"{made.relative_to(folder)}\n" in capsys.readouterr().out


def test_the_loop_writes_a_job_for_each_rate(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    run(folder, "bash", "-euc", blocks("bash")[1])
    words = [json.loads(line) for line in (folder / "words").read_text().splitlines()]
    assert len(words) == 5
    last = [word for word in words[-1] if word != "--submit"]
    more = ["--launch.nodes=2", "--launch.gpus_per_node=1", "--launch.cpu", "--dry-run"]
    assert main([*last, *more]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
