"""`model.name = "hf"` with the loss in chunks and with document masks: losses and gradients of
every parameter are those of transformers on one rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf import SMALL, TOML
from tests.support.hf_compare import (
    alone,
    differences,
    flags_of,
    on_ranks,
)
from tests.support.pool import Pools
from titanlite.config.errors import ConfigError
from titanlite.resolve.load import check_config

CHUNKS = {"training__loss_chunks": 3}
MASKS = {"data__mask_documents": "true"}
#: Largest distance, as a share, of a loss and of each gradient.
WITHIN = 2e-6


def check(pool: Pools, folder: Path, kind: str, **keys: Any) -> None:
    """Hold a run against transformers."""
    documents = "data__mask_documents" in keys
    results = pool(2).run(on_ranks, flags_of(folder, kind, **keys), documents)
    expected = alone(kind, results[0].weights, documents)
    for result in results:
        worst = differences(result, expected)
        name = max(worst, key=lambda name: worst[name])
        assert worst[name] < WITHIN, (name, worst[name])
    if kind == "llama":
        together = alone(kind, results[0].weights, False)
        assert max(differences(together, expected).values()) > 0.1, "documents matter"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_chunks_and_document_masks_on_two_ranks_are_exact(
    pool: Pools, tmp_path: Path, kind: str
) -> None:
    check(pool, tmp_path, kind, **MASKS, **CHUNKS)


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        ({"model_type": "phi"}, "training.loss_chunks", "no plain linear without bias"),
        ({"model_type": "gemma2"}, "training.loss_chunks", "changes its logits after the head"),
        (
            {"model_type": "gemma2", "head_dim": 16},
            "data.mask_documents",
            "the attention of Gemma2ForCausalLM is its own",
        ),
        (
            {"model_type": "bloom", "n_layer": 2, "n_head": 4},
            "data.mask_documents",
            "the forward of BloomForCausalLM takes no position_ids",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "data.mask_documents",
            'RoPE tables of "dynamic" depend on the length',
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "data.mask_documents",
            "sees tokens of other documents",
        ),
        (
            {"model_type": "llama"},
            "training.tensor_parallel_degree",
            "is not supported by the model hf: its ModelSpec has no tensor_plan",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 4},
            "parallelism.expert_parallel_degree",
            "is not supported by the model hf: its ModelSpec has no experts",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 4},
            "activation_checkpoint.selective_ac_option",
            "change results in place that it would save; take a number",
        ),
    ],
    ids=str,
)
def test_a_model_that_cannot_do_it_says_why(
    tmp_path: Path, content: dict[str, Any], key: str, words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **content}))
    values = {"training.loss_chunks": "3", "data.mask_documents": "true"}
    value = "op" if "option" in key else values.get(key, "4")
    flags = [f"--model.hf_config={tmp_path}", "--training.seq_len=32", f"--{key}={value}"]
    flags.append("--activation_checkpoint.mode=selective")
    with pytest.raises(ConfigError) as caught:
        check_config([f"--job.config_file={TOML}", *flags], 4, training=False)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert words in problem.message


BY_OP = {
    "activation_checkpoint__mode": "selective",
    "activation_checkpoint__selective_ac_option": "op",
}


@pytest.mark.slow
def test_compiled_blocks_are_exact(pool: Pools, tmp_path: Path) -> None:
    check(pool, tmp_path, "gpt_neox", training__compile="true", **MASKS, **BY_OP)
