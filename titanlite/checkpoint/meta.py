"""Meta's own files: one per rank of its tensor parallelism, q and k weights in another order of
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.hf import Part, Slices, Weights
from titanlite.checkpoint.hf_files import META_CONFIG, META_FILES
from titanlite.checkpoint.manifest import CheckpointError
from titanlite.checkpoint.source_model import meta_args, read_json
from titanlite.models.families import get_spec
from titanlite.models.hf_names import is_derived
from titanlite.models.llama import LlamaArgs
from titanlite.models.llama_hf import hf_names, permute


def open_meta(path: Path, args: LlamaArgs | None) -> Weights:
    """Return the weights of a folder of Meta's: args are those of the model, None: those of
    params.json.
    """
    file = path / META_CONFIG
    try:
        config, file = read_json(file), path
        files = sorted(path.glob(META_FILES))
        states = []
        for file in files:
            states.append(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
        args = args or args_from_meta(config, states)
        names = [*hf_names(args), *(["output.weight"] if args.tied else [])]
    # torch has many ways to refuse a cut file, or a pickle of other things than tensors
    except Exception as error:
        raise CheckpointError(f"{file} cannot be used as one of Meta's: {error}") from None
    wanted = get_spec("llama3").build_on_meta(args).state_dict()
    parts: dict[str, list[Part]] = {}
    for name in {name: None for state in states for name in state if not is_derived(name)}:
        if any(name not in state for state in states):
            raise CheckpointError(
                f"{path}: not every {META_FILES} has {name}: they are not of one model"
            )
        pieces = [state[name] for state in states]
        whole = tuple(wanted[name].shape) if name in names else tuple(pieces[0].shape)
        # The dimension in which the files divide the tensor; none: all have the whole of it.
        cut = (
            next((d for d, size in enumerate(pieces[0].shape) if size != whole[d]), None)
            if len(states) > 1
            else None
        )
        start, parts[name] = 0, []
        for file, piece in zip(files, pieces, strict=True):
            offsets = [0] * piece.ndim
            offsets[cut or 0] = start
            heads = {"wq": args.n_heads, "wk": args.kv_heads}.get(name.split(".")[-2])
            order = None
            if heads:  # a head is in one file
                rows = torch.arange(piece.size(0))[:, None]
                order = permute(rows, heads * piece.size(0) // whole[0])[:, 0]
            read = partial(_meta_rows, piece, order)
            parts[name].append(Part(file, name, piece.dtype, tuple(piece.shape), read).at(*offsets))
            if cut is None:
                break
            start += piece.size(cut)
    spare = parts.pop("output.weight", [None])[0] if args.tied else None
    if args.tied:
        parts["output.weight"] = parts["tok_embeddings.weight"]
    return Weights(path, "llama3", args, parts, config, spare if len(states) == 1 else None)


def _meta_rows(tensor: torch.Tensor, order: torch.Tensor | None, slices: Slices) -> torch.Tensor:
    return tensor[slices] if order is None else tensor[order[slices[0]]][:, slices[1]]


def args_from_meta(config: Mapping[str, Any], states: list[dict[str, torch.Tensor]]) -> LlamaArgs:
    """Return the arguments that Meta's params.json describes; the vocabulary is that of the files.

    Raises ValueError for a model with experts or quantised weights. A head that is equal to the
    embedding is tied.
    """
    args = meta_args(config)
    embedding = states[0]["tok_embeddings.weight"]
    vocabulary = embedding.size(0) * (1 if embedding.size(1) != args.dim else len(states))
    # Llama 3.2: the files hold the tied head once more.
    heads = ((state.get("output.weight"), state["tok_embeddings.weight"]) for state in states)
    tied = all(head is None or torch.equal(head, table) for head, table in heads)
    return replace(args, vocab_size=vocabulary, tied=tied)
