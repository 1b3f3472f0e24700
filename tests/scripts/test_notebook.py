"""examples/first_run.ipynb: kept without outputs, public names alone, a small run of all cells."""

from __future__ import annotations

import ast
import json
import shutil
from typing import Any

import pytest

import titanlite
from tests.support.processes import ROOT, environment

NOTEBOOK = ROOT / "examples" / "first_run.ipynb"
BATCH = '"--training.batch_size=8"'
SMALLER = {
    "STEPS = 150": "STEPS = 6",
    'read("train")': 'read("validation")',
    BATCH: f'{BATCH}, "--model.overrides.n_layers=2", "--validation.steps=2"',
}


def read_cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return cells


def test_the_notebook_is_kept_without_outputs():
    code = [cell for cell in read_cells() if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_notebook_imports_public_names_alone():
    code = "\n".join("".join(cell["source"]) for cell in read_cells() if "outputs" in cell)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("titanlite") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("titanlite"):
            assert node.module == "titanlite"
            assert {alias.name for alias in node.names} <= set(titanlite.__all__)


@pytest.mark.slow
def test_all_cells_run_in_one_process(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    examples = tmp_path / "examples"
    examples.mkdir()
    shutil.copy(ROOT / "examples" / "own_tokenizer.py", examples)
    for folder in ("benchmarks", "titanlite"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    # The kernel's own files stay out of the home folder.
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for large, small in SMALLER.items():
        assert any(large in cell.source for cell in notebook.cells)
        for cell in notebook.cells:
            cell.source = cell.source.replace(large, small)
    place = {"metadata": {"path": str(examples)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()

    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    shown = "".join(one.get("text", "") for one in outputs)
    assert "training done at step 6" in shown
    assert "nats per token of held-out text" in shown
    run = tmp_path / "outputs" / "first_run" / "run"
    assert (run / "checkpoint" / "step-6").is_dir()
    assert sum("image/png" in one.get("data", {}) for one in outputs) == 1
    assert "It was a" in notebook.cells[-1].outputs[-1]["text"]
