"""Low-rank adapters beside models of `transformers` (`model.name = "hf"`), also with experts that
ranks share: gradients as PEFT's, a base that stays, exports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import outcome_seen, peft_folder, peft_gradients, run_flags
from tests.support.compare import relative
from tests.support.hf import TOML
from tests.support.hf_compare import sizes_of
from tests.support.pool import Pools
from tests.support.tiny import KEPT_TOKENS
from titanlite.assembly.build import build
from titanlite.assembly.datasets import read_datasets
from titanlite.cli.hub.compare_checkpoints import our_logits
from titanlite.cli.hub.export_weights import convert, open_source
from titanlite.config.load import load_file as load_config_file
from titanlite.dist.dist_env import DistEnv
from titanlite.resolve.load import resolve
from titanlite.trainer import Trainer

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
VOCABULARY = 2304
KIND = "qwen3_moe"


def base_folder(folder: Path) -> Path:
    """A model with random weights, as `transformers` saves it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {**sizes_of(KIND), "vocab_size": VOCABULARY, "initializer_range": 0.1}
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[KIND](**sizes)).save_pretrained(folder)
    return folder


def _train(world: DistEnv, folder: str, flags: list[str]) -> dict[str, Any]:
    config = load_config_file(TOML, [*flags, f"--job.dump_folder={folder}"])
    run = resolve(config, world.size)[1]
    return outcome_seen(Trainer(build(run, world, read_datasets(run))), folder)


def our_name(theirs: str) -> str:
    """Our name of a parameter of PEFT's adapters."""
    name = theirs.removeprefix("base_model.model.")
    for letter in "AB":
        name = name.replace(f"lora_{letter}.default.weight", f"lora_{letter.lower()}")
    return name


def test_gradients_are_those_of_peft_which_computes_what_the_run_has_trained(
    pool: Pools, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = base_folder(tmp_path / "base")
    adapters = peft_folder(tmp_path / "peft", base, TARGETS)
    flags = [flag for flag in run_flags(base) if "overrides" not in flag]
    flags += [f"--model.hf_config={base}", f"--lora.adapter={adapters}", KEPT_TOKENS]
    flags += [f"--lora.targets={','.join(TARGETS)}", "--training.seq_len=32"]
    flags += ["--training.steps=2", "--training.warmup_steps=1", "--metrics.log_freq=1"]
    found = pool(2).run(_train, str(tmp_path / "run"), flags)
    assert not found[0]["error"]
    batches = [batch for one in found for batch in one["batches"]]
    expected, loss = peft_gradients(base, batches, TARGETS, our_name)
    assert found[0]["rows"][0]["loss"] == pytest.approx(loss, abs=2e-6)
    assert found[0]["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(found[0]["gradients"][name], gradient) < 2e-6, name
    for name, tensor in found[0]["end"].items():
        assert (name in expected) != tensor.equal(found[0]["start"][name]), name
    convert(tmp_path / "run", tmp_path / "trained", "peft")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, tmp_path / "trained")
    source = open_source(tmp_path / "run")
    tokens = batches[0][0]
    with torch.no_grad():
        ours = [our_logits(source.family, source.args, source.read, row[None]) for row in tokens]
        assert relative(model(tokens).logits, torch.cat(ours)) < 1e-6
