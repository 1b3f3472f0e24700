"""One `ModelSpec` per family: all that the rest of titanlite may ask of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titanlite.models.shapes import SHAPES, LlamaArgs

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Init:
    """The distribution that one parameter is drawn from."""

    kind: Literal["ones", "normal", "trunc_normal"]
    std: float = 0.0
    #: trunc_normal only: no value lies outside [-bound, bound].
    bound: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What one module costs."""

    #: Per training token, forward and backward.
    flops: int
    parameters: int


@dataclass(frozen=True)
class Size:
    """A linear's: its weight is [out_features, in_features]."""

    in_features: int
    out_features: int


@dataclass(frozen=True)
class ModelSpec:
    """A model family as functions of its arguments."""

    name: str
    #: Builds the module on the current default device (`with torch.device("meta")` for none).
    build: Callable[[LlamaArgs], nn.Module]
    #: (full parameter name, arguments) → how to draw it.
    init_rule: Callable[[str, LlamaArgs], Init]
    #: Names of the decoder blocks, in order.
    block_names: Callable[[LlamaArgs], list[str]]
    #: Names of the halves of each block (attention, feed-forward), in order.
    sublayer_names: Callable[[LlamaArgs], list[str]]
    #: Names of modules to shard together, in order of last use.
    fsdp_units: Callable[[LlamaArgs], list[tuple[str, ...]]]
    #: Module name → how tensor parallelism divides it.
    tensor_plan: Callable[[LlamaArgs], dict[str, str]]
    #: Name → size of every linear, in the model's order.
    linears: Callable[[LlamaArgs], dict[str, Size]]
    #: (arguments, tokens per sequence) → cost of each module that a pipeline can be cut before, in the order they run.
    pipeline_costs: Callable[[LlamaArgs, int], dict[str, Cost]]
    #: State dictionaries to and from Hugging Face's names.
    to_hf: Callable[[Mapping[str, Tensor], LlamaArgs], dict[str, Tensor]]
    from_hf: Callable[[Mapping[str, Tensor], LlamaArgs], dict[str, Tensor]]
    #: Our parameter name → Hugging Face's, of every tensor that its files hold.
    hf_names: Callable[[LlamaArgs], dict[str, str]]
    #: (names in its files, arguments) → its name → ours.
    names_from_hf: Callable[[Collection[str], LlamaArgs], dict[str, str]]
    #: The content of Hugging Face's config.json, and the arguments that one describes.
    hf_config: Callable[[LlamaArgs], dict[str, Any]]
    args_from_hf: Callable[[Mapping[str, Any]], LlamaArgs]

    def build_on_meta(self, args: LlamaArgs) -> nn.Module:
        """Build the module on the meta device, in float32 (the masters of mixed precision) with every default dtype."""
        import torch

        with torch.device("meta"):
            return self.build(args).float()


def get_spec(family: str) -> ModelSpec:
    """The spec of a family named in `SHAPES`; ValueError for any other."""
    if family not in SHAPES:
        raise ValueError(f"unknown model {family!r}; there are {', '.join(SHAPES)}")
    from titanlite.models.llama import hf, plan
    from titanlite.models.llama.model import Llama

    return ModelSpec(
        name=family,
        build=Llama,
        init_rule=plan.init_rule,
        block_names=plan.block_names,
        sublayer_names=plan.sublayer_names,
        fsdp_units=plan.fsdp_units,
        tensor_plan=plan.tensor_plan,
        linears=plan.linears,
        pipeline_costs=plan.pipeline_costs,
        to_hf=hf.to_hf,
        from_hf=hf.from_hf,
        hf_names=hf.hf_names,
        names_from_hf=hf.names_from_hf,
        hf_config=hf.hf_config,
        args_from_hf=hf.args_from_hf,
    )
