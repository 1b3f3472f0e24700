"""What goes up beside weights: the card and the config, and what they leave out."""

from __future__ import annotations

import argparse
import json
import uuid
from pathlib import Path

import pytest
import yaml

from tests.support.checkpoints import MANIFEST
from titanlite.checkpoint.store_paths import StorePath
from titanlite.config.toml import loads, quote
from titanlite.contrib.hub.card import MARK, files_beside, shown_config
from titanlite.contrib.hub.command import export
from titanlite.contrib.hub.push_source import Weights, find_weights
from titanlite.runs.read import Run

PLACE = ("ada/tiny", "main")


def test_weights_that_a_run_exported_to_a_store_are_fetched(tmp_path):
    folder = StorePath(f"memory://{uuid.uuid4().hex}/step-8-hf")
    files = {"config.json": b"{}", "model.safetensors": b"weights"}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    found = export(find_weights(folder), tmp_path / "weights", argparse.Namespace())
    assert {path.name: path.read_bytes() for path in found.iterdir()} == files


def test_a_config_for_everybody_has_no_secret_no_private_path_and_no_job():
    toml = """[job]
dump_folder = "/home/ada/secret-project/run"  # /home/ada/mine.toml:3
description = "a run"  # /home/ada/mine.toml:4

[launch]
queue = "gpu-of-ada"
environment.HF_TOKEN = "hf_planted"

[[launch.volumes]]
name = "volume-of-ada"

[training]
dataset_path = ["~/texts/a.jsonl", 's3://bucket-of-ada/b.jsonl', "https://u:p@host/c.jsonl?k=1"]
steps = 8

[checkpoint]
interval = 4
hub = "lab/tiny"
"""
    shown = shown_config(toml)
    values = loads(shown)
    assert values["job"] == {"dump_folder": "…/run", "description": "a run"}
    assert "launch" not in values
    assert values["checkpoint"] == {"interval": 4}
    assert values["training"]["steps"] == 8
    assert values["training"]["dataset_path"][:2] == ["…/a.jsonl", "…/b.jsonl"]
    for secret in ("ada", "planted", "u:p", "k=1"):
        assert secret not in shown


@pytest.mark.parametrize(
    "path",
    [
        "/home/ada/o'brien's/x.jsonl",
        "/home/ada/back\\slash/x.jsonl",
        "$HOME/../ada/x.jsonl",
        "file:///home/ada/x.jsonl",
        "\\\\server-of-ada\\x.jsonl",
        "C:/Users/ada/x.jsonl",
    ],
)
def test_private_folders_are_left_out_however_they_are_written(path):
    written = quote(path)
    toml = f'[training]\ndataset_path = {written}  # /home/ada/o\'brien "x".toml:3\nsteps = 8\n'
    toml += f"[model.overrides]\n{written} = [{written}, 'a # b', {{path = {written}}}]\n"
    shown = shown_config(toml)
    assert "ada" not in shown
    assert "brien" not in shown
    values = loads(shown)
    assert values["training"] == {"dataset_path": "…/x.jsonl", "steps": 8}
    expected = ["…/x.jsonl", "a # b", {"path": "…/x.jsonl"}]
    assert values["model"]["overrides"] == {"…/x.jsonl": expected}


def test_public_places_and_other_texts_stay():
    texts = ["hf://datasets/me/web", "https://host/c.jsonl", "data/x", "50% / 50%", "a#b", ""]
    shown = shown_config(f"[x]\ny = {quote(texts)}")
    assert loads(shown) == {"x": {"y": texts}}


def _weights(rows: tuple[dict[str, float], ...] = ()) -> Weights:
    return Weights(Path("/nowhere/step-5"), MANIFEST, Run(Path("/nowhere"), rows=rows))


def test_the_card_has_the_figures_of_its_step_and_data_that_the_hub_reads(tmp_path):
    rows = (
        {"step": 5, "loss": 2.0, "tokens_seen": 1234, "validation_loss": 2.25},
        {"step": 5, "eval/quiz/acc": 0.625, "eval/a/b/f1": 0.5},
        {"step": 6, "eval/quiz/acc": 0.75},
    )
    text = files_beside(_weights(rows), tmp_path, ("ada/tiny", "step-5"), "mit")["README.md"]
    _, head, body = text.decode().split("---\n", 2)
    data = yaml.safe_load(head)
    assert data["license"] == "mit"
    assert data["library_name"] == "transformers"
    for line in (
        "# tiny",
        "| step | 5 |",
        "| eval/quiz/acc | 0.6250 |",
        "| eval/a/b/f1 | 0.5000 |",
        "```python",
        'model = AutoModelForCausalLM.from_pretrained("ada/tiny", revision="step-5")',
    ):
        assert line in body.splitlines()
    assert body.rstrip().endswith(MARK)


def test_adapters_tell_the_id_of_their_base_and_not_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "llama").mkdir(parents=True)
    bases = {"/home/ada/llama": "llama", "mine/llama": "llama", "meta/llama": "meta/llama"}
    for base, shown in bases.items():
        config = {"r": 8, "base_model_name_or_path": base}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        files = files_beside(_weights(), tmp_path, PLACE, None)
        assert json.loads(files["adapter_config.json"]) == {
            **config,
            "base_model_name_or_path": shown,
        }
        data = yaml.safe_load(files["README.md"].decode().split("---\n")[1])
        assert data["library_name"] == "peft"
        assert data.get("base_model") == (base if shown == base else None)
