"""The arguments of a model of `transformers`: its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.config.errors import Problem
from titanlite.models.hf.config_json import config_file, read_config, refused
from titanlite.models.spec import ShapeError, names_like, shown
from titanlite.utils import parse_json

if TYPE_CHECKING:
    from titanlite.models.hf.skeleton import Skeleton

#: Entries of a config.json that change no number of a run.
_IGNORED = (
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "architectures",
    "auto_map",
)
#: Entries besides that change no tensor and no logit.
_UNDECIDING = frozenset(
    {*_IGNORED, "max_position_embeddings", "rope_scaling", "router_aux_loss_coef"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)


@dataclass(frozen=True)
class HFArgs:
    """A model of `transformers`."""

    #: The content of its config.json, as JSON.
    config: str
    #: In place of the one in `config`.
    vocab_size: int
    #: Tokens of the longest sequence.
    max_seq_len: int

    def __post_init__(self) -> None:
        """Raise ShapeError if `transformers` makes no trainable causal model for such sequences."""
        positions = getattr(self.skeleton.config, "max_position_embeddings", None)
        if positions is not None and self.max_seq_len > positions:
            message = (
                f"sequences have {self.max_seq_len} tokens, and the model has {positions} positions"
            )
            raise ShapeError(
                Problem("model", "", message, "set model.overrides.max_position_embeddings")
            )

    @property
    def skeleton(self) -> Skeleton:
        """The model's facts. The first call imports torch."""
        from titanlite.models.hf.skeleton import skeleton_of

        return skeleton_of(self.config, self.vocab_size)

    def deciding(self) -> dict[str, Any]:
        """Return the entries of config.json that decide tensors or logits, by dotted names."""
        left_out = set(_UNDECIDING)
        if "rope_parameters" in self.skeleton.config.to_dict():
            left_out.add("rope_theta")
        found: dict[str, Any] = {}
        for name, value in hf_config(self).items():
            if name in left_out:
                continue
            if isinstance(value, dict):
                found.update({f"{name}.{inner}": item for inner, item in value.items()})
            else:
                found[name] = value
        return found


def read_args(source: str | None, overrides: Mapping[str, Any]) -> HFArgs:
    """Return the arguments of a config.json: a file, its folder, or a model's id on the hub.

    overrides: entries to replace. Raises ShapeError.
    """
    if source is None:
        raise refused(
            'is needed for model.name = "hf": a config.json, its folder, or the id of a model on '
            "the hub"
        )
    try:
        content = parse_json(Path(config_file(source)).read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        return args_from_hf(content, overrides)
    except ShapeError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP client raise their own classes
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise refused(
            f"cannot read {shown(source)}: {reason}", "give a config.json or its folder"
        ) from error


def args_from_hf(content: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> HFArgs:
    """Return the arguments of a config.json. Raises ShapeError."""
    kept = {key: value for key, value in content.items() if key not in _IGNORED}
    config = read_config(kept)
    for key in overrides or {}:
        if not hasattr(config, key):
            near = names_like(key, config.to_dict()).partition("; there are")[0]
            raise refused(f"{type(config).__name__} has no such entry", near, f"overrides.{key}")
    # A config.json may have an entry under another of its names, which would win.
    for alias, own in type(config).attribute_map.items():
        if overrides and (alias in overrides or own in overrides):
            kept.pop(alias, None)
            kept.pop(own, None)
    kept = {**kept, **(overrides or {})}
    config = read_config(kept)
    kept.pop("vocab_size", None)
    names = ("max_position_embeddings", "seq_length", "n_positions")
    given = [getattr(config, name, None) for name in names]
    positions = next((number for number in given if number), 2048)
    return HFArgs(json.dumps(kept, sort_keys=True), config.vocab_size, positions)


def hf_config(args: HFArgs) -> dict[str, Any]:
    """Return a complete config.json, to compare two; the tokenizer's ids are left out."""
    entries = dict(args.skeleton.config.to_dict())
    for name in (*_IGNORED, "bos_token_id", "eos_token_id"):
        entries.pop(name, None)
    return {**entries, "architectures": [type(args.skeleton.model).__name__]}
