"""Meta's own files: one per rank of its tensor parallelism, q and k weights in another order of
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.errors import CheckpointError
from titanlite.checkpoint.hf_files import META_CONFIG, META_FILES
from titanlite.checkpoint.source_model import meta_args, read_json
from titanlite.checkpoint.weights import Part, Weights
from titanlite.models.families import get_spec
from titanlite.models.hf_names import is_derived
from titanlite.models.llama import LlamaArgs
from titanlite.models.spec import ModelSpec


def open_meta(path: Path, _: ModelSpec | None, args: LlamaArgs | None) -> Weights:
    """Return the weights of a folder of Meta's: args are those of the model, None: those of
    params.json.
    """
    files = sorted(path.glob(META_FILES))
    file = path / META_CONFIG
    try:
        config = read_json(file)
        states = []
        for file in files:
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            _check_tensors(state)
            states.append(state)
        args = args or args_from_meta(config, states)
    # torch has many ways to refuse a cut file, or a pickle of other things than tensors.
    except Exception as error:
        raise CheckpointError(f"{file} cannot be used as one of Meta's: {error}") from None
    wanted = get_spec("llama3").build_on_meta(args).state_dict()
    parts: dict[str, list[Part]] = {}
    for name in {name: None for state in states for name in state if not is_derived(name)}:
        if any(name not in state for state in states):
            raise CheckpointError(
                f"{path}: not every {META_FILES} has {name}: they are not of one model"
            )
        shape = tuple(wanted[name].shape) if name in wanted else None
        pieces = {file: state[name] for file, state in zip(files, states, strict=True)}
        parts[name] = _parts_of(name, pieces, args, shape)
    spare = None
    if args.tied:
        head = parts.pop("output.weight", None)
        if head is not None and len(states) == 1:
            spare = head[0]
        parts["output.weight"] = parts["tok_embeddings.weight"]
    return Weights(path, "llama3", args, parts, config, spare)


def _check_tensors(state: Any) -> None:
    """Raise ValueError unless a file holds tensors by name."""
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, and no tensors by name")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"its entry {name!r:.80} is no tensor with a name")


def _parts_of(
    name: str, pieces: Mapping[Path, torch.Tensor], args: LlamaArgs, known: tuple[int, ...] | None
) -> list[Part]:
    """Return the parts of one tensor, by file. known: its whole shape; None: the model has no such
    tensor.
    """
    shape = known or tuple(next(iter(pieces.values())).shape)
    for file, piece in pieces.items():
        if piece.ndim != len(shape):
            raise CheckpointError(
                f"{file}: {name} has the shape {list(piece.shape)}, and the whole {list(shape)}"
            )
    cut = _divided_dimension(list(pieces.values()), shape)
    parts = []
    start = 0
    for file, piece in pieces.items():
        offsets = [0] * piece.ndim
        if cut is not None:
            offsets[cut] = start
        part = Part(file, name, piece.dtype, tuple(piece.shape), piece.__getitem__).at(*offsets)
        parts.append(_by_halves(part, args, shape) if known else part)
        if cut is None:
            break
        start += piece.size(cut)
    return parts


def _divided_dimension(pieces: Sequence[torch.Tensor], shape: tuple[int, ...]) -> int | None:
    """Return the dimension in which files divide a tensor; None: each has the whole of it."""
    if len(pieces) == 1:
        return None
    for dimension, size in enumerate(pieces[0].shape):
        if size != shape[dimension]:
            return dimension
    return None


def _by_halves(part: Part, args: LlamaArgs, shape: tuple[int, ...]) -> Part:
    """Return a part of q or k in our order of rows; another one as it is. shape: of the whole.

    Raises CheckpointError for rows that are no whole heads.
    """
    heads = {"wq": args.n_heads, "wk": args.kv_heads}.get(part.name.split(".")[-2])
    if not heads:
        return part
    # A head is in one file.
    number = part.shape[0]
    each = shape[0] // heads
    if not number or number % each:
        raise CheckpointError(f"{part.file}: {part.name} has {number} rows, and a head has {each}")
    return part.by_halves(number // each)


def args_from_meta(config: Mapping[str, Any], states: list[dict[str, torch.Tensor]]) -> LlamaArgs:
    """Return the arguments that Meta's params.json describes; the vocabulary is that of the files.

    Raises ValueError for a model with experts or quantised weights. A head that is equal to the
    embedding is tied.
    """
    args = meta_args(config)
    embedding = states[0]["tok_embeddings.weight"]
    vocabulary = embedding.size(0)
    if embedding.size(1) == args.dim:  # the files divide its rows
        vocabulary *= len(states)
    # Llama 3.2: the files hold the tied head once more.
    tied = all(_is_tied(state) for state in states)
    return replace(args, vocab_size=vocabulary, tied=tied)


def _is_tied(state: Mapping[str, torch.Tensor]) -> bool:
    head = state.get("output.weight")
    return head is None or torch.equal(head, state["tok_embeddings.weight"])
