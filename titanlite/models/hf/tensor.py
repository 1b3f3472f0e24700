"""The plan of tensor parallelism that `transformers` gives a model, in titanlite's kinds.

The kinds are those of `titanlite.parallel.tensor_whole`. Whether the plan is exact for a model is
tried on the meta device. There its modules must run with the narrow linears of one rank.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from titanlite.models.hf.causal import causal_model

if TYPE_CHECKING:
    from titanlite.models.hf.args import HFArgs
    from titanlite.models.hf.skeleton import Skeleton

#: Style of `transformers` → kind.
_KINDS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "rowwise_split_input": "split",
    "rowwise_rep": "split",
    "replicated_with_grad_allreduce": "heads",
}
_COLUMNS = ("colwise", "gathered")
_ROWS = ("rowwise", "split")


class NoPlan(ValueError):
    """Tensor parallelism cannot divide a model; the message says why."""


@functools.lru_cache(maxsize=8)
def plan_of(args: HFArgs) -> dict[str, str]:
    """Return module name → kind, of each module with its own parameters. Raises NoPlan."""
    known = args.skeleton
    model = known.model
    name = type(model).__name__
    styles = _styles(model)
    if not styles:
        raise NoPlan(f"transformers has no plan that divides a {name}")
    if not known.head or not known.embedding:
        raise NoPlan(f"{name} has no embedding or no head")
    plan: dict[str, str] = {}
    for path, module in model.named_modules():
        parameters = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        if not parameters:
            continue
        for leaf in parameters:
            style = styles.get(_generic(f"{path}.{leaf}"))
            if style is not None:
                raise NoPlan(f'its plan divides the parameter {path}.{leaf} as "{style}"')
        plan[path] = _kind(known, path, module, styles.get(_generic(path)))
    divided = [path for path, kind in plan.items() if kind in _COLUMNS]
    if not divided:
        raise NoPlan(f"the plan of transformers divides no linear of a {name}")
    for path in _inputs(plan, divided):
        plan[path] = "input"
    return plan


def _styles(model: Any) -> dict[str, str]:
    """Return the styles of `transformers` by name, with a star for each number."""
    base = getattr(model.config, "base_model_tp_plan", None) or {}
    styles = {f"{model.base_model_prefix}.{name}": style for name, style in base.items()}
    return styles | dict(getattr(type(model), "_tp_plan", None) or {})


def _generic(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _kind(known: Skeleton, path: str, module: nn.Module, style: str | None) -> str:
    if path == known.head:
        if type(module) is not nn.Linear:
            raise NoPlan(f"the head {path} is no plain linear")
        return "head"
    if path == known.embedding:
        if not isinstance(module, nn.Embedding):
            raise NoPlan(f"the embedding {path} is no nn.Embedding")
        return "embedding"
    if style is None:
        return "whole"
    kind = _KINDS.get(style)
    if kind is None:
        raise NoPlan(f'its plan divides {path} as "{style}", which titanlite has not')
    if kind != "heads" and type(module) is not nn.Linear:
        raise NoPlan(f"its plan divides {path}, which is no plain linear")
    return kind


def _inputs(plan: dict[str, str], divided: list[str]) -> Iterator[str]:
    """Return modules all of whose linears take its input, so that one sum serves them all."""
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in divided):
        kinds = [kind for path, kind in plan.items() if path.startswith(f"{parent}.")]
        if kinds.count("colwise") > 1 and set(kinds) <= {"colwise", "rowwise", "heads"}:
            yield parent


def tensor_sizes(args: HFArgs) -> dict[str, int]:
    """Return the numbers that tensor-parallel ranks must divide, by name for messages."""
    known = args.skeleton
    try:
        plan = plan_of(args)
    except NoPlan:
        return {}
    sizes: dict[str, int] = {}
    text = known.config.get_text_config()
    if any(kind == "colwise" and "att" in path for path, kind in plan.items()):
        for key in ("num_attention_heads", "num_key_value_heads"):
            number = getattr(text, key, None)
            if number:
                sizes[key] = number
    for path, kind in plan.items():
        module: Any = known.model.get_submodule(path)
        leaf = path.rpartition(".")[2]
        if kind in _COLUMNS:
            sizes[f"outputs of {leaf}"] = module.out_features
        elif kind in _ROWS:
            sizes[f"inputs of {leaf}"] = module.in_features
    return sizes


def why_no_tensor(args: HFArgs, ranks: int) -> str:
    """Return why these ranks cannot divide a model; "": they can. They divide its sizes."""
    known = args.skeleton
    try:
        plan = plan_of(args)
        numbers = [*tensor_sizes(args).values(), known.config.get_text_config().vocab_size]
        if not any(number % ranks for number in numbers):
            _try(known, plan, ranks)
    except NoPlan as error:
        return str(error)
    return ""


def _try(known: Skeleton, plan: dict[str, str], ranks: int) -> None:
    """Run the model on the meta device with linears of one rank's size. Raises NoPlan."""
    whole = _shapes(known, plan, 1)
    part = _shapes(known, plan, ranks)
    for path, kind in plan.items():
        if kind == "whole" and part[path] != whole[path]:
            raise NoPlan(f"its plan does not say that {path} sees a part of the heads")
        if kind == "input" and part[path] != whole[path]:
            raise NoPlan(f"{path} takes more than one input with a gradient")


def _shapes(known: Skeleton, plan: dict[str, str], ranks: int) -> dict[str, Any]:
    """Return the shapes that modules of some kinds take on one of so many ranks."""
    with torch.device("meta"):
        model = causal_model(known.config)
    model.train()
    found: dict[str, Any] = {path: [] for path in plan}
    for path, kind in plan.items():
        module: Any = model.get_submodule(path)
        if kind in _COLUMNS:
            width = module.out_features // (ranks if kind == "colwise" else 1)
            module.forward = _Narrow(module.in_features, width)
        elif kind in _ROWS:
            width = module.in_features // (ranks if kind == "rowwise" else 1)
            module.forward = _Narrow(width, module.out_features)
        elif kind == "input":
            module.register_forward_pre_hook(_look_at_input(found[path]), with_kwargs=True)
        elif kind == "whole":
            module.register_forward_pre_hook(_look(found[path]), with_kwargs=True)
    try:
        model(torch.zeros((1, 4), dtype=torch.int64, device="meta"))
    except Exception as error:  # code of `transformers` raises any class
        reason = str(error).partition("\n")[0]
        raise NoPlan(f"it does not run with a part of its heads: {reason}") from error
    return found


class _Narrow:
    """The forward of a linear of other sizes, on the meta device."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.inputs, self.outputs = inputs, outputs

    def __call__(self, x: Tensor) -> Tensor:
        if x.size(-1) != self.inputs:
            raise ValueError(f"a linear gets {x.size(-1)} features, not {self.inputs}")
        return x[..., :1].expand(*x.shape[:-1], self.outputs)


def _look(shapes: list[Any]) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
        shapes.append([t.shape for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])

    return hook


def _look_at_input(shapes: list[Any]) -> Any:
    """Look for inputs that have a gradient: more than one makes shapes that are never equal."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        others = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        more = [t for t in others if t.requires_grad and t is not first]
        shapes.append(object() if more or not isinstance(first, Tensor) else first.shape)

    return hook
