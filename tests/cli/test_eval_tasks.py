"""`titanlite eval`: lm-evaluation-harness gets the numbers that its own backend computes of the
same weights.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.support.hf import hf_folder
from titanlite import exit_codes
from titanlite.cli.main import main

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: `titanlite eval` is NOT tested",
)
_COMMON = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {file}\ntest_split: test\n"
TASKS = {
    "tiny_choice": "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: ['a "
    "cat', ' dogs, and on']\n"
    "doc_to_target: 0\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "tiny_rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: "
    "'{{text}}'\n"
    "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]\n",
}


def _tasks(folder: Path) -> Path:
    file = folder / "texts.jsonl"
    texts = ["The first of all", "", "Some words that go on " * 12, "Naïve – 日本", "a b c"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, lines in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{_COMMON.format(file=file)}{lines}")
    return folder


@needs_harness
@pytest.mark.slow
def test_every_kind_of_request_equals_the_harness_own_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = hf_folder(tmp_path / "model")
    tasks = _tasks(tmp_path)
    words = ["--tasks", ",".join(TASKS), "--include-path", str(tasks), "--device=cpu", "--json"]
    assert main(["eval", str(folder), *words, "--batch-size=2"]) == 0
    ours = json.loads(capsys.readouterr().out)["results"]
    theirs = lm_eval.simple_evaluate(
        HFLM(
            pretrained=str(folder), device="cpu", add_bos_token=True, dtype="float32", max_length=96
        ),
        tasks=list(TASKS),
        # Without the thousands of tasks that the harness ships.
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["results"]
    for name in TASKS:
        numbers = {key: value for key, value in theirs[name].items() if isinstance(value, float)}
        assert numbers and {key: ours[name][key] for key in numbers} == pytest.approx(
            numbers, rel=1e-5
        ), name
    assert main(["eval", str(folder), "--tasks=no_such_task"]) == exit_codes.CONFIG
    assert "the harness has no task 'no_such_task'" in capsys.readouterr().err


def test_a_missing_harness_is_named_with_its_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (tmp_path / "model.safetensors").touch()
    assert main(["eval", str(tmp_path), "--tasks=x"]) == exit_codes.CONFIG
    assert "pip install 'titanlite[eval]'" in capsys.readouterr().err
