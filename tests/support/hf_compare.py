"""Models of transformers on several ranks, held against the same model of transformers on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support.harness import full
from tests.support.hf import FAMILIES, SIZES, TOML
from titanlite import load_config
from titanlite.assembly.loaders import data_parallel_rank
from titanlite.assembly.model import build_model
from titanlite.data.loader import Batch
from titanlite.dist.dist_env import DistEnv
from titanlite.models import Init
from titanlite.parallel.init import fill_part

VOCABULARY = 192
ROWS = 4
SEQ = 32
_SIZES = {**SIZES, "hidden_dropout": 0.0}
#: Windows are shorter than the documents.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "attention_bias": True},
    "qwen3": {**_SIZES, "head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {
        **_SIZES,
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "pad_token_id": 0,
    },
    "gpt_neox": {**_SIZES, "rotary_pct": 0.5},
}
#: With experts; four ranks can share the widths.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_SIZES, "head_dim": 32, "moe_intermediate_size": 48, "num_experts": 8}
    | {"num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [0]}
    | {"num_hidden_layers": 3},
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**_SIZES, "head_dim": 16, "sliding_window": 5, "num_local_experts": 8}
    | {"num_experts_per_tok": 2, "swiglu_limit": 1.0},
    "deepseek_v3": {**_SIZES, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 4}
    | {"topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 2, "q_lora_rank": 24}
    | {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    | {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    "olmoe": {**_SIZES, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
}


def sizes_of(kind: str) -> dict[str, Any]:
    """The config.json of an architecture, without its type and vocabulary."""
    sizes = {**FAMILIES, **ARCHITECTURES, **MIXTURES}[kind]
    return {name: size for name, size in sizes.items() if name != "vocab_size"}


def flags_of(folder: Path, kind: str, **keys: Any) -> list[str]:
    """Write the config.json of an architecture; return the flags of a run with it.

    keys: others, with two underscores for a dot.
    """
    content = {"model_type": kind, **sizes_of(kind)}
    (folder / "config.json").write_text(json.dumps(content))
    given = {
        "model__hf_config": folder,
        "model__vocab_size": VOCABULARY,
        "training__seq_len": SEQ,
        "training__mixed_precision_param": "float32",
        "compile__backend": "aot_eager",
        "validation__enable": "false",
        "job__dump_folder": folder / "run",
        **keys,
    }
    return [f"--{key.replace('__', '.')}={value}" for key, value in given.items()]


class Result(NamedTuple):
    """Of the global batch: its summed loss, and gradients of every parameter."""

    loss: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def batch_of(documents: bool) -> Batch:
    """The global batch: documents of 1 to 20 tokens, some rows alike, some targets missing."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCABULARY, (ROWS, SEQ), generator=generator)
    labels = torch.randint(0, VOCABULARY, (ROWS, SEQ), generator=generator)
    labels[1, 7:11] = -100
    if not documents:
        return Batch(tokens, labels)
    numbers = torch.zeros(ROWS, SEQ, dtype=torch.int32)
    for row, begins in enumerate([(5, 6, 20), (13,), (), (12, 24)]):
        for begin in begins:
            numbers[row, begin:] += 1
    return Batch(tokens, labels, numbers)


def larger(name: str, parameter: torch.Tensor) -> None:
    """Make initial weights large enough that each of them matters."""
    noise = torch.empty_like(parameter)
    std = 0.2 if parameter.ndim == 1 else parameter.size(-1) ** -0.5
    fill_part(noise, f"noise/{name}", Init("normal", std=std), 0)
    parameter.add_(noise)


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint holds."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def on_ranks(world: DistEnv, flags: list[str], documents: bool) -> Result:
    """Run forward and backward of the global batch as a run does; every rank returns the sums."""
    run = load_config(TOML, world.size, flags)
    parts = build_model(run, world, VOCABULARY)
    with torch.no_grad():
        saved = {**dict(parts.model.named_parameters()), **saved_buffers(parts.model)}
        for name, tensor in saved.items():
            larger(name, tensor)
    weights = {name: full(tensor) for name, tensor in saved.items()}
    rank, degree = data_parallel_rank(parts.mesh), run.mesh.dp_degree
    mine = [part[rank::degree] for part in batch_of(documents) if part is not None]
    share = parts.runner.forward_backward([Batch(*mine)], torch.tensor(1.0))
    dist.all_reduce(share)
    gradients = {}
    for name, parameter in parts.model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = full(parameter.grad)
    return Result(float(share) / parts.factors.loss, gradients, weights)


def alone(kind: str, weights: dict[str, torch.Tensor], documents: bool) -> Result:
    """What transformers computes, each document in a call of its own."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[kind](**sizes_of(kind), vocab_size=VOCABULARY)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    model.load_state_dict(weights, strict=not config.tie_word_embeddings)
    model.train()
    batch = batch_of(documents)
    numbers = torch.zeros_like(batch.labels) if batch.documents is None else batch.documents
    total = torch.zeros(())
    for tokens, labels, row in zip(batch.tokens, batch.labels, numbers, strict=True):
        for number in row.unique():
            own = row == number
            logits = model(input_ids=tokens[own][None], use_cache=False).logits[0]
            total = total + torch.nn.functional.cross_entropy(
                logits, labels[own], ignore_index=-100, reduction="sum"
            )
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Result(float(total.detach()), gradients, weights)


def differences(found: Result, expected: Result) -> dict[str, float]:
    """Distance of the loss and of each gradient, as a share of the expected one.

    A bias of keys has no gradient but rounding, since softmax does not see it: against the largest.
    """
    largest = max(gradient.norm() for gradient in expected.gradients.values())
    shares = {"loss": abs(found.loss / expected.loss - 1)}
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        distance = (found.gradients[name] - gradient).norm()
        shares[name] = float(distance / gradient.norm().clamp(min=1e-3 * largest))
    return shares
