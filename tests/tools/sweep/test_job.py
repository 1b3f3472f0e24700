"""The pods of a sweep's indexed Job, as processes: each trains the run of its number."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.processes import ROOT, titanlite
from tests.tools.sweep.sweeps import CONFIG, rows
from titanlite import exit_codes
from titanlite.config.errors import ConfigError
from titanlite.tools.launch import kubernetes
from titanlite.tools.sweep.job import prepare_sweep

TABLE = 'optimizer.lr = [1e-3, 1e-2]\n"job.description" = ["it\'s \\"one\\"", "$(two)"]\n'

_LAUNCH = ["--launch.cpu", "--launch.gpus_per_node=1", "--launch.image=none"]


def test_a_login_in_the_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "texts.toml"
    debug = ROOT / "train_configs" / "debug_model.toml"
    table = '"training.dataset_path" = ["https://bob:hunter2@example.com/a.jsonl"]'
    file.write_text(f"job.extends = ['{debug}']\n[sweep]\n{table}\n")
    with pytest.raises(ConfigError, match="would see the login") as caught:
        prepare_sweep([f"--job.config_file={file}", *_LAUNCH], None)
    assert "hunter2" not in str(caught.value)


@pytest.mark.slow
def test_pods_train_the_runs_of_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "rates.toml"
    debug = ROOT / "train_configs" / "debug_model.toml"
    file.write_text(f"job.extends = ['{debug}']\n[sweep]\n{TABLE}")
    config = [word for word in CONFIG if not word.startswith("--job.config_file")]
    volume = f'--launch.volumes={{"claim" = "{tmp_path}"}}'
    folder = f"--job.dump_folder={tmp_path / 'run'}"
    job = prepare_sweep([f"--job.config_file={file}", *config, *_LAUNCH, volume, folder], None)
    configs, manifest = (yaml.safe_load(text) for text in kubernetes.files(job).values())
    mounted = tmp_path / "config.toml"
    mounted.write_text(configs["data"]["config.toml"])
    assert manifest["spec"]["completions"] == 4
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    python_word, *words = container["args"]
    assert python_word == "python"
    variables = {one["name"]: one["value"] for one in container["env"]}
    for number in (0, 3):
        own = [str(mounted) if word.endswith("config.toml") else word for word in words]
        own = [word.replace("$(JOB_COMPLETION_INDEX)", str(number)) for word in own]
        assert own[:2] == ["-m", "titanlite"]
        done = titanlite(*own[2:], env=variables)
        assert done.returncode == 0, done.stderr
    local = titanlite("sweep", file, *config, "--folder", tmp_path / "local")
    assert local.returncode == 0, local.stderr
    names = [job.array.names[0], job.array.names[3]] if job.array else []
    assert len(names) == 2
    for name in names:
        assert rows(tmp_path / "run-sweep" / name) == rows(tmp_path / "local" / name)
    shown = titanlite("sweep", "--show", tmp_path / "run-sweep")
    assert shown.returncode == exit_codes.ERROR
    assert "2 of 4 runs are not finished" in shown.stdout
