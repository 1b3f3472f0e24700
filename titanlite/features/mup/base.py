"""The base model: the one whose settings were found, as arguments of a model. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from titanlite.config.errors import Problem
from titanlite.models.args import checked_fields
from titanlite.models.llama import LlamaArgs
from titanlite.models.spec import ShapeError

#: Arguments that become narrower with `dim`; experts' products want multiples of 8.
_SCALED = ("ffn_dim", "expert_width", "q_lora_rank", "kv_lora_rank")
_MULTIPLE = 8
#: Arguments that `mup.base` may name: widths, and the depth.
NAMES = (
    *_SCALED,
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "query_scalar",
    "n_layers",
)


def base_args(args: LlamaArgs, dim: int, given: Mapping[str, Any]) -> Any:
    """Return the arguments of the base model of width `dim`. given: its other ones in `mup.base`.

    By default heads and depth are the model's, and feed-forward, experts and latents are as much
    narrower as `dim`. Raises ShapeError, whose fields are those of `mup.base`.
    """
    known = [name for name in NAMES if name in {field.name for field in fields(args)}]
    for name in given:
        if name not in known:
            message = f"{name} is no width of this model, and not its depth"
            raise ShapeError(Problem("model", name, message, f"there are {', '.join(known)}"))
    checked = checked_fields(type(args), given, "")
    changes: dict[str, Any] = {"dim": dim}
    for name in _SCALED:
        width = getattr(args, name) if name in known else None
        if width and dim != args.dim:
            steps = round(width * dim / args.dim / _MULTIPLE)
            changes[name] = max(steps, 1) * _MULTIPLE
    changes |= checked
    if "n_heads" not in given:
        changes["n_heads"] = _heads(args, dim)
    if args.n_kv_heads is not None and "n_kv_heads" not in given:
        changes["n_kv_heads"] = _groups(args, changes["n_heads"])
    return replace(args, **changes)


def _heads(args: LlamaArgs, dim: int) -> int:
    heads, rest = divmod(args.n_heads * dim, args.dim)
    if rest or not heads:
        message = (
            f"{args.n_heads} heads at dim = {args.dim} are no whole number at dim = {dim}, with "
            "heads of one width"
        )
        raise ShapeError(Problem("model", "n_heads", message, "name the base model's in mup.base"))
    return heads


def _groups(args: LlamaArgs, heads: int) -> int:
    """Return the most key/value heads that fit, at the model's ratio at most."""
    groups = max(heads * args.kv_heads // args.n_heads, 1)
    while heads % groups:
        groups -= 1
    return groups


def head_width(args: LlamaArgs) -> int:
    """Return the numbers of a query that a score sums over."""
    width: int = getattr(args, "qk_head_dim", args.head_dim)
    return width
