"""`model.flavor = "from_folder"`: the shape of a folder's model; and the comparison with a folder
before any text.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.refusals import refusal
from tests.support.tiny import KEPT_TOKENS
from titanlite import build
from titanlite.assembly.datasets import read_datasets
from titanlite.checkpoint.manifest import read_manifest
from titanlite.cli.hub.export_weights import convert
from titanlite.config.errors import ConfigError
from titanlite.dist.dist_env import DistEnv
from titanlite.models import SPECS, get_spec
from titanlite.models.argument_fields import deciding
from titanlite.resolve.load import check_config
from titanlite.trainer import Trainer

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2304,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: `model.name` → what a config.json of that family says beside `SMALL`. Each differs from every
#: flavor.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA_3},
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "llama4": {
        "model_type": "llama4_text",
        "head_dim": 16,
        "intermediate_size_mlp": 80,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 12,
        "floor_scale": 8,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True,
    },
}
FLAGS = [
    "--model.flavor=from_folder",
    "--training.seq_len=32",
    "--training.batch_size=2",
    "--training.global_batch_size=2",
    "--training.warmup_steps=1",
    "--lr_scheduler.total_steps=4",
    "--training.mixed_precision_param=float32",
    "--no-validation.enable",
    "--checkpoint.enable_checkpoint",
    KEPT_TOKENS,
]


def written(folder: Path, name: str, **changes: Any) -> Path:
    """A folder with the config.json of a family."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SMALL, **FAMILIES[name], **changes}))
    return folder


def published(folder: Path, name: str) -> None:
    """A folder as `transformers` saves a model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**SMALL, **FAMILIES[name])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def of(name: str, folder: Path, *flags: str) -> list[str]:
    return [*FLAGS, f"--model.name={name}", f"--checkpoint.initial_load_path={folder}", *flags]


def _train(world: DistEnv, out: str, *flags: str) -> int:
    run = check_config([*flags, f"--job.dump_folder={out}"], world.size)[1]
    trainer = Trainer(build(run, world, read_datasets(run)))
    trainer.train()
    return trainer.step


def test_a_checkpoint_needs_the_folder_no_more(pool, tmp_path):
    """Its run is resumed, checked and exported after the folder is gone; the config that it holds
    has the shape.
    """
    published(tmp_path / "source", "qwen3")
    out = tmp_path / "out"
    flags = of("qwen3", tmp_path / "source")
    assert pool(1).run(_train, str(out), *flags, "--training.steps=1")[0] == 1
    shutil.rmtree(tmp_path / "source")
    manifest = read_manifest(out / "checkpoint" / "step-1")
    record = manifest.config["model"]
    assert record == {**record, "dim": 64, "head_dim": 24, "n_layers": 2, "tied": True}
    kept = tmp_path / "kept.toml"
    kept.write_text(manifest.config["toml"])
    elsewhere = [f"--job.config_file={kept}", f"--job.dump_folder={tmp_path / 'elsewhere'}"]
    assert check_config(elsewhere, 1, training=False)[1].model_args().head_dim == 24
    assert pool(1).run(_train, str(out), *flags, "--training.steps=2")[0] == 2
    folder = convert(out, tmp_path / "hf", "hf")
    assert json.loads((folder / "config.json").read_bytes())["head_dim"] == 24  # type: ignore[operator]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_check_takes_the_shape_and_needs_no_weights(tmp_path, name):
    folder = written(tmp_path / "source", name)
    config, run = check_config(of(name, folder), 1)
    args = run.model_args()
    expected = run.spec.args_from_hf({**SMALL, **FAMILIES[name]})
    assert deciding(args) == deciding(expected)
    assert args.max_seq_len == 32, "sequences have the length of the run's"
    # What a run keeps says it all by itself, also when it is read with the same flags again.
    (tmp_path / "kept.toml").write_text(run.toml)
    shutil.rmtree(folder)
    again = check_config([f"--job.config_file={tmp_path / 'kept.toml'}"], 1, training=False)[1]
    assert again.model_args() == args


def test_the_shape_alone_comes_from_hf_config_and_overrides_win(tmp_path):
    folder = written(tmp_path / "source", "llama3")
    flags = [*FLAGS, f"--model.hf_config={folder}"]
    for path in (folder, folder / "config.json"):
        args = check_config(
            [*FLAGS, f"--model.hf_config={path}", "--model.overrides.n_layers=3"], 1
        )[1].model_args()
        assert (args.dim, args.n_layers, args.rope_scaling.original_context) == (64, 3, 64)
    args = check_config([*flags, "--model.rope_scaling=none", "--model.vocab_size=4096"], 1)[
        1
    ].model_args()
    assert (args.rope_scaling, args.vocab_size) == (None, 4096)


@pytest.mark.parametrize(
    ("flags", "key", "words"),
    [
        (
            ["--model.name=llama3"],
            "model.name",
            'of the family "mixtral" set model.name = "mixtral"',
        ),
        (["--model.overrides.n_expert=2"], "model.overrides.n_expert", "nearest: n_experts"),
    ],
)
def test_a_folder_that_gives_no_shape(tmp_path, flags, key, words):
    found = refusal([*of("mixtral", written(tmp_path / "source", "mixtral")), *flags])
    assert found.key == key
    assert words in f"{found.message} {found.remedy}"


def test_another_model_is_named_by_our_keys_before_anything_is_read(tmp_path):
    """The folder has no weights at all, so nothing else can tell."""
    folder = written(tmp_path / "source", "mixtral")
    changes = ("--model.overrides.n_experts=8", "--model.overrides.top_k=3")
    given = of("mixtral", folder, *changes)
    found = refusal(given)
    assert (found.key, found.code) == ("checkpoint.initial_load_path", "model")
    assert "its config.json:" in found.message and "download" not in str(found)
    assert {*found.message.split("\n  ")[1:]} == {
        "model.overrides.n_experts is 8 here, 4 there",
        "model.overrides.top_k is 3 here, 2 there",
    }
    with pytest.raises(ConfigError):
        check_config(given, 1, training=False)
    check_config([*given, "--checkpoint.allow_changes=model"], 1)


def test_a_vocabulary_of_the_tokenizers_is_compared_before_any_text(tmp_path, monkeypatch):
    shape = replace(SPECS["llama3"].flavors["debugmodel"], vocab_size=4096)
    (tmp_path / "config.json").write_text(json.dumps(SPECS["llama3"].hf_config(shape)))
    run = check_config(
        ["--checkpoint.enable_checkpoint", f"--checkpoint.initial_load_path={tmp_path}"], 1
    )[1]
    monkeypatch.setattr(
        "titanlite.assembly.datasets.read_training_text",
        lambda *_: pytest.fail("the text was read"),
    )
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 2304 here, 4096 there"):
        read_datasets(run)


def test_a_checkpoint_of_another_model_is_told_by_its_manifest(pool, tmp_path):
    published(tmp_path / "source", "llama3")
    out = tmp_path / "out"
    pool(1).run(_train, str(out), *of("llama3", tmp_path / "source"), "--training.steps=1")
    for path in (out, out / "checkpoint", out / "checkpoint" / "step-1"):
        given = of("llama3", path, f"--job.dump_folder={tmp_path / 'new'}")
        assert check_config(given, 1)[1].model_args().dim == 64
        found = refusal([*given, "--model.overrides.n_layers=4"])
        assert (
            "by its manifest.json:\n  model.overrides.n_layers is 4 here, 2 there" in found.message
        )
        check_config(
            [*given, "--model.overrides.n_layers=4", "--checkpoint.allow_missing=model.layers.*"], 1
        )
    evil = out / "checkpoint" / "step-1" / "manifest.json"
    code = tmp_path / "evil.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nSPEC = None\n")
    evil.write_text(evil.read_text().replace('"family": "llama3"', f'"family": "{code}:SPEC"'))
    with pytest.raises(ConfigError):
        check_config(of("llama3", evil.parent, f"--job.dump_folder={tmp_path / 'new'}"), 1)
    assert not (tmp_path / "ran").exists(), "nothing that a manifest names is imported"


WRONG: tuple[Any, ...] = ("llama3", [], [[1]], {"a": 1}, None, True, 1.5, -1, 10**30, float("nan"))


@pytest.mark.parametrize("name", ["llama3", "llama4", "gemma3"])
def test_an_entry_of_a_wrong_type_is_an_error_that_names_it(tmp_path, name):
    """Of each entry, also in the table of the rotary positions: a model, or an error in words."""
    whole = {**SMALL, **FAMILIES[name]}
    more = ("rope_scaling", "rope_theta", "rope_parameters", "layer_types", "head_dim")
    places = [*((key,) for key in (*whole, *more)), *(("rope_parameters", key) for key in LLAMA_3)]
    for place in places:
        for value in WRONG:
            content = json.loads(json.dumps(whole))
            table = content if len(place) == 1 else content.setdefault(place[0], dict(LLAMA_3))
            table[place[-1]] = value
            try:
                get_spec(name).args_from_hf(content)
            except ValueError as error:
                assert str(error), (place, value)
    written(tmp_path / "source", name, rope_scaling="linear")
    found = refusal(of(name, tmp_path / "source"))
    assert "config.json: rope_scaling is 'linear', expected a table" in found.message
