"""The plain single-process run that all others are held against.

Imports nothing of titanlite: `transformers`' models, torch's optimizers, batches and initial
weights as tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Curve:
    """What a run of a few steps leaves behind."""

    losses: list[float]
    norms: list[float]
    #: Full gradients of the first step, before clipping.
    gradients: dict[str, torch.Tensor]
    #: Full weights after the last step.
    weights: dict[str, torch.Tensor]


def in_our_names(
    state: Mapping[str, torch.Tensor], names: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file under titanlite's names. names: of `ModelSpec.hf_names`."""
    found = {}
    for ours, theirs in names.items():
        is_one = isinstance(theirs, str)
        found[ours] = state[theirs] if is_one else torch.stack([state[one] for one in theirs])
    return found


#: Matrices of Mixtral's experts in files → as `transformers` calls them.
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def in_memory(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file under the names that `transformers` has in memory: it stacks
    experts.
    """
    found = {}
    parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for in_file, tensor in state.items():
        name = in_file
        if ".block_sparse_moe" in name:
            name = name.replace("block_sparse_moe", "mlp")
            name = re.sub(r"\.(w[123])\.", lambda found: f".{_MIXTRAL[found[1]]}.", name)
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            parts.setdefault((match[1], match[3]), {})[int(match[2])] = tensor

    def stack(prefix: str, kind: str) -> torch.Tensor:
        experts = parts[prefix, kind]
        return torch.stack([experts[index] for index in range(len(experts))])

    for prefix in {prefix for prefix, _ in parts}:
        both = [stack(prefix, "gate_proj"), stack(prefix, "up_proj")]
        found[f"{prefix}.gate_up_proj"] = torch.cat(both, 1)
        found[f"{prefix}.down_proj"] = stack(prefix, "down_proj")
    return found


def model_of(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Make the model of `transformers`. config: its config.json; weights: its state dictionary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # torch's attention has no sinks.
    attention = "eager" if config["model_type"] == "gpt_oss" else "sdpa"
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation=attention
    )
    model.load_state_dict(in_memory(weights), strict=not config.get("tie_word_embeddings"))
    return model


def train_reference(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    *,
    optimizer: str,
    rates: list[float],
    max_norm: float,
) -> Curve:
    """Train a model, of tokens to logits, on whole global batches.

    tokens, labels: [steps, global batch, seq] int64, label -100 where there is no target.
    optimizer: "AdamW" or "SGD". rates: learning rate of each step.
    """
    model.train()
    if optimizer == "AdamW":
        optim: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
    else:
        optim = torch.optim.SGD(model.parameters(), lr=0.0)
    curve = Curve([], [], {}, {})
    for step, rate in enumerate(rates):
        output = model(tokens[step])
        logits = getattr(output, "logits", output)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[step].flatten(), ignore_index=-100
        )
        loss.backward()
        if step == 0:
            curve.gradients = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for group in optim.param_groups:
            group["lr"] = rate
        optim.step()
        optim.zero_grad()
        curve.losses.append(loss.item())
        curve.norms.append(norm.item())
    curve.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return curve
