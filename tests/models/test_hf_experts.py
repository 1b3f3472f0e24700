"""`model.name = "hf"` with experts: gradients, files and checkpoints of ranks that share them, held
against `transformers` on one rank.
"""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import unequal
from tests.support.hf import train_losses
from tests.support.hf_compare import (
    ARCHITECTURES,
    MIXTURES,
    alone,
    differences,
    flags_of,
    on_ranks,
)
from tests.support.pool import Pools
from tests.support.tiny import KEPT_TOKENS
from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf import open_hf
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
    ((name, layer),) = args.skeleton.moe_layers.items()
    assert name == "model.layers.1.mlp.experts"
    assert layer[:2] == (8, 2)
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
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(**content(kind))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in model.state_dict().values():
        tensor.normal_()
    return model


def holds_the_weights(folder: Path, model: Any) -> None:
    """Check that we read all weights of a model of `transformers` from a folder, bit for bit."""
    args = args_from_hf(json.loads((folder / "config.json").read_text()))
    found = open_hf(folder, SPEC, args)
    state = model.state_dict()
    assert found.parts.keys() == state.keys()
    for name, tensor in state.items():
        assert found.read(name).equal(tensor), name


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_files_of_save_pretrained_are_read_bit_for_bit(tmp_path, kind):
    model = reference(kind)
    model.save_pretrained(tmp_path)
    holds_the_weights(tmp_path, model)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "block_sparse_moe.experts.2.w1.weight",
            (88, 64),
            "experts.2.w1.weight is .88, 64., and .*need one shape",
        ),
        ("mlp.experts.gate_up_proj", (4, 192, 64), "has both .* one weight"),
    ],
    ids=["another shape", "the stack too"],
)
def test_tensors_that_do_not_fit_together_are_refused(tmp_path, name, shape, message):
    from safetensors.torch import load_file, save_file

    reference("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), f"model.layers.1.{name}": torch.zeros(shape)}, file)
    with pytest.raises(CheckpointError, match=message):
        open_hf(tmp_path, SPEC, args_from_hf(content("mixtral")))


def test_an_override_wins_over_the_other_name_of_its_entry():
    found = content("qwen3_moe")
    found["num_local_experts"] = found.pop("num_experts", 8)
    args = args_from_hf(found, {"num_experts": 4, "num_experts_per_tok": 2})
    assert args.skeleton.config.num_experts == 4


# Runs

STEPS = 4


def rows_of(pool: Pools, ranks: int, folder: Path, kind: str, **keys: Any) -> Any:
    """Return what each step of a short run logs, which saves every step in `folder`."""
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
    folder.mkdir(exist_ok=True)
    flags = [*flags_of(folder, kind, **given), KEPT_TOKENS]
    return pool(ranks).run(train_losses, flags)[0]


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_resumes_exactly_and_on_other_ranks(pool, tmp_path):
    straight = rows_of(pool, 2, tmp_path / "straight", "gpt_oss")[2:]
    saved = tmp_path / "straight" / "run" / "checkpoint"
    for ranks in (2, 4):
        own = tmp_path / str(ranks) / "run" / "checkpoint"
        shutil.copytree(saved / "step-2", own / "step-2")
        rows = rows_of(pool, ranks, tmp_path / str(ranks), "gpt_oss")
        if ranks == 2:
            assert rows == straight
            assert unequal(saved / "step-4", own / "step-4") == []
        assert list(chain(*rows)) == pytest.approx([*chain(*straight)], rel=2e-5)


def test_an_export_of_two_ranks_is_what_transformers_loads(pool, tmp_path):
    from transformers import AutoModelForCausalLM

    keys = {
        "training__steps": 1,
        "optimizer__lr": 0.0,
        "checkpoint__last_save_in_hf": "true",
        "checkpoint__last_save_model_weights_only": "true",
    }
    exports = [tmp_path / str(ranks) / "run" / "checkpoint" / "step-1-hf" for ranks in (1, 2)]
    for ranks in (1, 2):
        rows_of(pool, ranks, tmp_path / str(ranks), "mixtral", **keys)
    # Nothing was learned: both hold the initial weights.
    one, two = ((export / "model.safetensors").read_bytes() for export in exports)
    assert one == two
    holds_the_weights(exports[1], AutoModelForCausalLM.from_pretrained(exports[1]))


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
