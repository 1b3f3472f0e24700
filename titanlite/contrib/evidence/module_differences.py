"""A batch through titanlite and another program, module by module, and where they differ."""

from __future__ import annotations

import math
import subprocess
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.foreign_formats import open_weights
from titanlite.checkpoint.hf_files import hf_form
from titanlite.config.errors import bad_flag
from titanlite.contrib.evidence import module_hooks
from titanlite.contrib.evidence.module_hooks import Trace, trace
from titanlite.data.rows import IGNORE
from titanlite.loss import count_valid, cross_entropy_sum
from titanlite.models.hf import read_config
from titanlite.models.hf_names import as_names
from titanlite.models.llama import LlamaArgs
from titanlite.models.rope_scaling import RopeScaling
from titanlite.models.spec import ModelSpec

#: Arguments that have the same name in torchtitan.
_SHARED = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "norm_eps",
    "rope_theta",
    "max_seq_len",
)
#: Experts get their tokens in an order of their own, and sinks no call.
_OWN_FORM = (".experts", ".sinks")
#: A factor of the arguments → the module whose result has it in one program alone.
_SCALED = {"embedding_scale": "tok_embeddings", "query_scale": ".q_norm"}


class Difference(NamedTuple):
    """How far two tensors are apart; the largest is the worst."""

    #: Share of the largest value; infinity for tensors of other sizes or that are no numbers.
    relative: float
    absolute: float
    name: str
    ours: list[int]
    theirs: list[int]


def write_random(spec: ModelSpec, args: Any, folder: Path) -> None:
    """Write a Hugging Face folder of random weights. Raises CheckpointError for other models."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = hf_form(spec, args)[1]
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(read_config(config))
    for tensor in model.state_dict().values():
        tensor.add_(torch.randn_like(tensor) * tensor.size(-1) ** -0.5)
    model.save_pretrained(folder)


def read_model(folder: Path, spec: ModelSpec, args: Any) -> nn.Module:
    """Return titanlite's model with the weights of a Hugging Face folder. Raises CheckpointError
    for weights of another shape.
    """
    weights = open_weights(folder, spec, args)
    model = spec.build(args).float()
    try:
        model.load_state_dict({name: weights.read(name) for name in weights.parts})
    except RuntimeError as error:
        raise CheckpointError(f"{folder} does not fit the config: {error}") from None
    return model


def module_pairs(spec: ModelSpec, args: Any, theirs: nn.Module) -> dict[str, str]:
    """Return module of titanlite → module of `transformers`, by its names of parameters."""
    there = {name for name, _ in theirs.named_modules()}
    found: dict[str, str] = {}
    for name, entry in {**spec.hf_names(args), f"{spec.head}.weight": "lm_head.weight"}.items():
        ours = _around(name)
        # In memory Mixtral has another name than in files.
        other = _around(as_names(entry)[0]).replace("block_sparse_moe", "mlp")
        # A stack of experts is one module.
        while other not in there:
            other = _around(other)
        while ours and other:
            found.setdefault(ours, other)
            ours, other = _around(ours), _around(other)
    scaled = [ending for factor, ending in _SCALED.items() if getattr(args, factor, 1) != 1]
    own = (*_OWN_FORM, *scaled)
    return {ours: other for ours, other in found.items() if not ours.endswith(own)}


def _around(name: str) -> str:
    return name.rpartition(".")[0]


def trace_ours(model: nn.Module, tokens: Tensor) -> Trace:
    """Run titanlite's model. tokens: [batch, seq] int64."""
    labels = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    return trace(model, lambda: cross_entropy_sum(model(tokens), labels) / count_valid(labels))


def trace_transformers(
    model: Any, spec: ModelSpec, args: Any, tokens: Tensor, folder: Path
) -> Trace:
    """Run a model of `transformers`; spec, args: of titanlite.

    Its weights become its gradients, which it writes to a new folder: files have the names of the
    family's table.
    """
    names = {other: ours for ours, other in module_pairs(spec, args, model).items()}
    found = trace(model, lambda: model(input_ids=tokens, labels=tokens).loss, names)
    for name, p in model.named_parameters():
        p.data = found.gradients.get(name, torch.zeros_like(p))
    model.save_pretrained(folder)
    weights = open_weights(folder, spec, args)
    return found._replace(gradients={name: weights.read(name) for name in weights.parts})


def trace_torchtitan(
    python: str, model: nn.Module, spec: ModelSpec, args: Any, tokens: Tensor, folder: Path
) -> tuple[str, Trace]:
    """Run torchtitan's Llama 3 with the weights of titanlite's model; return its version first.

    python: of an environment that has torchtitan. Raises ConfigError.
    """
    if type(args) is not LlamaArgs or args.tied:
        raise bad_flag("--torchtitan", "torchtitan has this model in another form: take a Llama 3")
    shape = {name: getattr(args, name) for name in _SHARED}
    # Its rule for the width comes out at ours.
    shape["ffn_dim_multiplier"] = args.ffn_width / int(8 * args.dim / 3)
    shape["multiple_of"] = args.ffn_width
    scaling: Any = args.rope_scaling or RopeScaling(factor=1.0)
    weights = spec.to_hf(model.state_dict(), args)
    torch.save((shape, astuple(scaling), weights, tokens), folder / module_hooks.JOB)
    words = [python, module_hooks.__file__, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise bad_flag("--torchtitan", f"{python} cannot run torchtitan 0.2.2:\n{done.stderr}")
    activations, loss, found = torch.load(folder / module_hooks.RESULT)
    gradients = {name: found[other] for name, other in spec.hf_names(args).items()}
    return f"torchtitan {done.stdout.strip()}", Trace(activations, loss, gradients)


def compare(ours: Trace, theirs: Trace) -> dict[str, list[Difference]]:
    """Return the differences of activations that both have, in order, of the loss and of
    gradients.
    """
    activations = []
    for name, tensors in ours.activations.items():
        # A router returns several, and some norms have heads before positions.
        forms = theirs.activations.get(name, [])
        forms = [*forms, *(one.transpose(1, 2) for one in forms if one.ndim == 4)]
        if forms:
            activations.append(min(difference(name, tensors[0], one) for one in forms))
    gradients = [
        difference(name, one, theirs.gradients[name]) for name, one in ours.gradients.items()
    ]
    loss = difference("loss", ours.loss, theirs.loss)
    return {"activations": activations, "loss": [loss], "gradients": gradients}


def difference(name: str, ours: Tensor, theirs: Tensor) -> Difference:
    """Compare two tensors, perhaps of other dimensions."""
    absolute = relative = math.inf
    if ours.numel() == theirs.numel():
        expected = theirs.double().reshape(ours.shape)
        gap = float((ours.double() - expected).abs().max())
        if math.isfinite(gap):
            absolute = gap
            relative = gap / (float(expected.abs().max()) or gap or 1.0)
    return Difference(relative, absolute, name, list(ours.shape), list(theirs.shape))
