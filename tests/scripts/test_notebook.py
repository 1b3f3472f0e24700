"""examples/first_run.ipynb: a small run of all cells."""

from __future__ import annotations

import shutil

import pytest

from tests.support.processes import ROOT, environment

NOTEBOOK = ROOT / "examples" / "first_run.ipynb"
BATCH = '"--training.batch_size=8"'
SMALLER = {
    "STEPS = 150": "STEPS = 6",
    'read("train")': 'read("validation")',
    BATCH: f'{BATCH}, "--model.overrides.n_layers=2", "--validation.steps=2"',
}


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
