"""`model.name = "hf"` with experts: gradients, files and checkpoints of ranks that share them, held
against `transformers` on one rank.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import unequal
from tests.support.hf import TOML
from tests.support.hf_compare import (
    ARCHITECTURES,
    MIXTURES,
    alone,
    differences,
    flags_of,
    on_ranks,
)
from tests.support.steps import train_rows
from tests.support.tiny import KEPT_TOKENS
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf import open_hf
from titanlite.dist.dist_env import DistEnv
from titanlite.models import ShapeError, get_spec
from titanlite.models.hf import args_from_hf

SPEC = get_spec("hf")
FULL = {"activation_checkpoint__mode": "full"}
REPLICAS = {
    "training__data_parallel_replicate_degree": 2,
    "training__data_parallel_shard_degree": 2,
}
#: Largest relative error of the loss and of each gradient.
NEAR = 2e-6


def content(kind: str, **entries: Any) -> dict[str, Any]:
    """A config.json with experts."""
    return {"model_type": kind, **MIXTURES[kind], "vocab_size": 192, **entries}


# Gradients


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "ranks", "keys"),
    [
        ("qwen3_moe", 2, {**FULL, "training__loss_chunks": 2}),
        ("gpt_oss", 2, {}),
        ("deepseek_v3", 2, FULL),
        ("mixtral", 4, REPLICAS),
        ("olmoe", 2, {"training__compile": "true"}),
    ],
    ids=str,
)
def test_gradients_are_those_of_transformers_on_one_rank(pool, tmp_path, kind, ranks, keys):
    results = pool(ranks).run(on_ranks, flags_of(tmp_path, kind, **keys), False)
    expected = alone(kind, results[0].weights, False)
    assert max(differences(results[0], expected).values()) < NEAR


# Numbers of a model


def test_a_token_counts_the_experts_that_it_uses():
    args = args_from_hf(content("deepseek_v3"))
    mixture = 3 * 64 * 32
    (layer,) = args.skeleton.moe_layers.items()
    assert layer[0] == "model.layers.1.mlp.experts"
    assert layer[1][:2] == (8, 2)
    fewer = args_from_hf(content("deepseek_v3", num_experts_per_tok=1))
    assert SPEC.flops_per_token(args, 32) - SPEC.flops_per_token(fewer, 32) == 6 * mixture
    assert "model.layers.1.mlp.gate" not in SPEC.linears(args)  # type: ignore[misc]


def test_a_built_model_leaves_the_facts_of_its_config_alone():
    """A config that models shared had the products of the last one."""
    args = args_from_hf(content("mixtral"))
    with torch.device("meta"):
        model = SPEC.build(args)
    assert args.skeleton.model.config._experts_implementation == "batched_mm"
    assert model.config._experts_implementation == "grouped_mm"
    assert SPEC.why_not(args, "training.loss_chunks") == ""


# Files


def reference(kind: str) -> Any:
    """A model of `transformers` with random weights."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(5)
    config = CONFIG_MAPPING[kind](**MIXTURES[kind], vocab_size=192)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.normal_()
    return model


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_files_of_save_pretrained_are_read_bit_for_bit(tmp_path, kind):
    model = reference(kind)
    model.save_pretrained(tmp_path)
    args = args_from_hf(json.loads((tmp_path / "config.json").read_text()))
    found = open_hf(tmp_path, SPEC, args)
    state = model.state_dict()
    assert found.parts.keys() == state.keys()
    for name, tensor in state.items():
        assert found.read(name).equal(tensor), name


_EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda all_: all_.update({_EXPERT: all_[_EXPERT][:-8].contiguous()}),
            "experts.2.w1.weight is .88, 64., and .*need one shape",
        ),
        (
            lambda all_: all_.update(
                {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(4, 192, 64)}
            ),
            "has both .* one weight",
        ),
    ],
    ids=["another shape", "the stack too"],
)
def test_tensors_that_do_not_fit_together_are_refused(tmp_path, change, message):
    from safetensors.torch import load_file, save_file

    reference("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        open_hf(tmp_path, SPEC, args_from_hf(content("mixtral")))


def test_an_override_wins_over_the_other_name_of_its_entry():
    found = content("qwen3_moe")
    found["num_local_experts"] = found.pop("num_experts", 8)
    args = args_from_hf(found, {"num_experts": 4, "num_experts_per_tok": 2})
    assert args.skeleton.config.num_experts == 4


# Runs

STEPS = 4


def run_flags(folder: Path, kind: str, *more: str, **keys: Any) -> list[str]:
    """Flags of a short run that saves every step."""
    given = {
        "training__batch_size": 1,
        "training__global_batch_size": 4,
        "training__warmup_steps": 1,
        "training__steps": STEPS,
        "lr_scheduler__total_steps": STEPS,
        "metrics__log_freq": 1,
        "model__vocab_size": 2304,
        "checkpoint__enable_checkpoint": "true",
        "checkpoint__interval": 1,
        "checkpoint__keep_latest_k": 0,
        **keys,
    }
    return [*flags_of(folder, kind, **given), KEPT_TOKENS, *more]


def _rows(world: DistEnv, folder: Path, flags: list[str]) -> list[tuple[float, float]]:
    rows = train_rows(world, str(folder / "run"), *flags, config=TOML)
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_resumes_exactly_and_on_other_ranks(pool, tmp_path):
    kind = "gpt_oss"
    folders = {}
    for name in ("straight", "resumed", "four"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
    straight = pool(2).run(_rows, folders["straight"], run_flags(folders["straight"], kind))
    saved = folders["straight"] / "run" / "checkpoint"
    for name, ranks in (("resumed", 2), ("four", 4)):
        own = folders[name] / "run" / "checkpoint"
        shutil.copytree(saved / "step-2", own / "step-2")
        flags = run_flags(folders[name], kind)
        rows = pool(ranks).run(_rows, folders[name], flags)[0]
        if name == "resumed":
            assert rows == straight[0][2:]
            assert unequal(saved / "step-4", own / "step-4") == []
        expected = [number for row in straight[0][2:] for number in row]
        assert [number for row in rows for number in row] == pytest.approx(expected, rel=2e-5)


def test_an_export_of_two_ranks_is_what_transformers_loads(pool, tmp_path):
    from transformers import AutoModelForCausalLM

    exports = []
    for name, ranks in (("two", 2), ("one", 1)):
        folder = tmp_path / name
        folder.mkdir()
        keys = {
            "training__steps": 1,
            "optimizer__lr": 0.0,
            "checkpoint__last_save_in_hf": "true",
            "checkpoint__last_save_model_weights_only": "true",
        }
        pool(ranks).run(_rows, folder, run_flags(folder, "mixtral", **keys))
        exports.append(folder / "run" / "checkpoint" / "step-1-hf")
    # Nothing was learned: both hold the initial weights.
    assert exports[0].joinpath("model.safetensors").read_bytes() == (
        exports[1].joinpath("model.safetensors").read_bytes()
    )
    model = AutoModelForCausalLM.from_pretrained(exports[0], dtype=torch.float32)
    args = args_from_hf(json.loads((exports[0] / "config.json").read_text()))
    found = open_hf(exports[0], SPEC, args)
    for name, tensor in model.state_dict().items():
        assert found.read(name).equal(tensor), name


# Configs


@pytest.mark.parametrize(
    ("kind", "entries", "words"),
    [
        ("llama4_text", {}, "do not go through the interface of transformers for experts"),
        ("mixtral", {"output_router_logits": True}, "load-balancing loss"),
        ("mixtral", {"num_experts_per_tok": 0}, "gives a token no experts"),
        ("gpt_oss", {"num_experts_per_tok": 99}, "does not run on tensors"),
    ],
)
def test_experts_that_cannot_be_computed_are_refused(kind, entries, words):
    given = {**MIXTURES.get(kind, ARCHITECTURES["llama"]), "vocab_size": 192, **entries}
    with pytest.raises(ShapeError, match=words):
        args_from_hf({"model_type": kind, **given})
