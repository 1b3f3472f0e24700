"""Facts about a model of `transformers`, read from it on the meta device."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlite.models.hf.causal import causal_model
from titanlite.models.hf.config_json import read_config, refused
from titanlite.models.spec import Init

if TYPE_CHECKING:
    from torch import Tensor

    from titanlite.models.hf.experts import MoELayer

#: Name of the linear that computes the logits, in all but a few models.
HEAD = "lm_head"


@dataclass(frozen=True)
class Skeleton:
    """Facts about a model, read on the meta device."""

    #: Its `transformers` config.
    config: Any
    model: Any
    blocks: list[str]
    rules: dict[str, Init]
    #: Name of a parameter → name of the one whose tensor it shares.
    tied: dict[str, str]
    #: Names of the embedding of tokens and of the head.
    embedding: str
    head: str
    #: The MoE layers, by the name of their experts.
    moe_layers: dict[str, MoELayer]


@functools.lru_cache(maxsize=8)
def skeleton_of(content: str, vocab_size: int) -> Skeleton:
    """Return the facts of a config.json with another vocab_size. Raises ShapeError."""
    import torch

    from titanlite.models.hf.experts import moe_layers_of

    config = read_config({**json.loads(content), "vocab_size": vocab_size})
    try:
        with torch.device("meta"), _recorded() as operations:
            model = causal_model(config)
            model.initialize_weights()
    except Exception as error:  # a constructor of `transformers` raises any class for wrong values
        raise refused(
            f"transformers makes no model of this config: {type(error).__name__}: {error}"
        ) from error
    _check(model, config, operations)
    names: dict[Tensor, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, name)
        if first != name:
            tied[name] = first
    rules = {}
    for parameter, name in names.items():
        operation, arguments, _ = operations.get(id(parameter), ("nothing", (), parameter))
        rules[name] = _rule(name, operation, arguments)
    paths = {module: name for name, module in model.named_modules()}
    return Skeleton(
        config,
        model,
        _blocks(model),
        rules,
        tied,
        embedding=paths[model.get_input_embeddings()],
        head=paths.get(model.get_output_embeddings(), ""),
        moe_layers=moe_layers_of(model),
    )


def _check(model: Any, config: Any, operations: Mapping[int, Any]) -> None:
    """Raise ShapeError for a buffer that initialisation does not compute, blocks that are skipped
    at random, or a token that sees later ones.
    """
    if any(getattr(module, "layerdrop", 0) for module in model.modules()):
        entry = "decoder_layerdrop" if hasattr(config, "decoder_layerdrop") else "layerdrop"
        message = f"{entry} skips blocks at random: ranks would wait for each other for ever"
        raise refused(message, f"set model.overrides.{entry} = 0.0")
    for name, buffer in model.named_buffers():
        if buffer.is_meta and id(buffer) not in operations:
            raise refused(
                f"{type(model).__name__} does not compute its buffer {name} with its initial "
                "weights"
            )
    # Attention of BERT's family says so; others name `is_decoder` in the config alone, and do not
    # read it.
    if all(getattr(module, "is_decoder", True) is not False for module in model.modules()):
        return
    message = (
        f"each token of this {config.model_type} sees those after it: it would learn to copy "
        "the next one"
    )
    has_switch = hasattr(config, "is_decoder")
    raise refused(message, "set model.overrides.is_decoder = true" if has_switch else "")


@contextlib.contextmanager
def _recorded() -> Iterator[dict[int, tuple[str, Any, Tensor]]]:
    """Record what last set each tensor: id → name, arguments, tensor (keeps the id)."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers.initialization import TORCH_INIT_FUNCTIONS as FUNCTIONS

    found: dict[int, tuple[str, Any, Tensor]] = {}

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func._schema.name.removeprefix("aten::")
            if name.endswith("_"):
                found[id(args[0])] = (name, args[1:], args[0])
            return out

    def trunc_normal_(
        tensor: Any, mean: Any = 0.0, std: Any = 1.0, a: Any = -2.0, b: Any = 2.0, **_: Any
    ) -> Any:
        # torch's reads values, and there are none.
        found[id(tensor)] = ("trunc_normal_", (mean, std, a, b), tensor)
        return tensor

    plain = FUNCTIONS["trunc_normal_"]
    FUNCTIONS["trunc_normal_"] = trunc_normal_
    try:
        with Mode():
            yield found
    finally:
        FUNCTIONS["trunc_normal_"] = plain


def _rule(name: str, operation: str, given: tuple[Any, ...]) -> Init:
    mean, std, low, high = given + (0.0, 1.0, -2.0, 2.0)[len(given) :]
    if operation in ("zero_", "fill_"):
        value = given[0] if given else 0.0
        return {0.0: Init("zeros"), 1.0: Init("ones")}.get(value, Init("constant", value=value))
    if operation == "normal_" and mean == 0:
        return Init("normal", std=std)
    if operation == "trunc_normal_" and mean == 0 and -low == high:
        return Init("trunc_normal", std=std, bound=high)
    if operation == "uniform_" and given and -given[0] == given[1]:
        return Init("uniform", bound=given[1])
    raise refused(
        f"no rule is known for the initial values of {name}: transformers sets them by {operation}"
    )


def _blocks(model: Any) -> list[str]:
    """Return the blocks that `transformers` does not split, else the longest list of a class."""
    from torch import nn

    whole = set(model._no_split_modules or ())
    longest: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            classes = {type(block).__name__ for block in module}
            names = [f"{path}.{i}" for i in range(len(module))]
            if classes & whole:
                return names
            if len(classes) == 1 and len(names) > len(longest):
                longest = names
    if not longest:
        raise refused(f"{type(model).__name__} has no list of blocks to shard by")
    return longest
