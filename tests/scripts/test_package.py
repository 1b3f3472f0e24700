import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT, python

LIGHT = """
import sys
before = set(sys.modules)
import titanlite
assert len(set(sys.modules) - before) < 30
from titanlite import Callback
import titanlite.models, titanlite.runs.record, titanlite.runs.rank_logs, titanlite.runs.lock
import titanlite.cli.main
import titanlite.cli.runs
from titanlite.resolve.load import check_config
titanlite.models.resolve_args("llama3", "8B")
check_config(["--job.config_file=debug_model.toml"], 2, training=False)
heavy = {"torch", "numpy", "tomlkit", "fsspec", "filelock"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""


def test_names_shapes_configs_and_records_need_no_torch():
    done = python("-c", LIGHT)
    assert done.stdout == "[]\n", done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel of this tree installs."""
    source = tmp_path_factory.mktemp("source")
    site = tmp_path_factory.mktemp("site")
    for name in ("titanlite", "train_configs", "deploy"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(site)], cwd=source, check=True, capture_output=True
    )
    (wheel,) = site.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_the_wheel_has_configs_schema_and_types(installed):
    ours = {path.name for path in (ROOT / "train_configs").iterdir()}
    assert {path.name for path in (installed / "titanlite" / "train_configs").iterdir()} == ours
    assert "titanlite.schema.json" in ours
    assert (installed / "titanlite" / "py.typed").is_file()
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    assert [(e.name, e.value) for e in distribution.entry_points] == [
        ("titanlite", "titanlite.cli.main:main")
    ]


def test_the_page_of_the_package_index_links_to_no_file(installed):
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    page = distribution.metadata["Description"]
    assert "pip install titanlite" in page
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert [target for target in targets if not target.startswith("https://")] == []


def test_the_wheel_writes_the_job_of_a_config_of_its_own(installed):
    empty = installed / "empty"  # nothing of ours is there
    empty.mkdir()
    words = ["-m", "titanlite", "launch", "slurm", "platforms/llama3_1_8b_g6e.toml", "--dry-run"]
    done = python(*words, cwd=empty, env={"PYTHONPATH": str(installed)})
    assert done.returncode == 0 and "#SBATCH --gpus-per-node=4" in done.stdout, done.stderr
    assert (installed / "titanlite" / "deploy" / "Dockerfile").is_file()
