"""Parts of a model of `transformers` by name, and its numbers."""

from __future__ import annotations

import re

from titanlite.models.hf.args import HFArgs
from titanlite.models.hf.skeleton import HEAD
from titanlite.models.spec import Size


def fsdp_units(args: HFArgs) -> list[tuple[str, ...]]:
    """Return embedding, blocks and head; of tied models the blocks: the rest is the root's."""
    known = args.skeleton
    blocks: list[tuple[str, ...]] = [(name,) for name in known.blocks]
    if known.tied or not known.head:
        return blocks
    return [(known.embedding,), *blocks, (known.head,)]


def sublayer_names(args: HFArgs) -> list[str]:
    """Return each block's parts with linears."""
    from torch import nn

    names = []
    for block in args.skeleton.blocks:
        for name, part in args.skeleton.model.get_submodule(block).named_children():
            if any(isinstance(module, nn.Linear) for module in part.modules()):
                names.append(f"{block}.{name}")
    return names


def linears(args: HFArgs) -> dict[str, Size]:
    """Return name → size of every linear but routers, whose few outputs decide about tokens, and
    heads not named `lm_head`.
    """
    from torch import nn

    known = args.skeleton
    routers = set()
    for name, layer in known.moe_layers.items():
        block = name.rpartition(".")[0]
        for leaf, module in known.model.get_submodule(block).named_children():
            if getattr(module, "out_features", 0) == layer.experts:
                routers.add(f"{block}.{leaf}")
    found = {}
    for name, module in known.model.named_modules():
        if type(module) is nn.Linear and name not in routers:
            found[name] = Size(module.in_features, module.out_features)
    if known.head != HEAD:
        found.pop(known.head, None)
    return found


def count_parameters(args: HFArgs) -> int:
    """Return the number of parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in args.skeleton.model.parameters())


def flops_per_token(args: HFArgs, seq_len: int) -> int:
    """Return the model FLOPs of one training token, forward and backward, by the formula of the
    Llamas.

    6 per parameter outside of embeddings, of experts only those of a token; a tied embedding counts
    as the head.
    Plus 6 * heads * (width of a key + width of a value) * seq_len per layer with attention; windows
    and causality are not discounted.
    """
    from torch import nn

    known = args.skeleton
    config = known.config
    tables = {module.weight for module in known.model.modules() if isinstance(module, nn.Embedding)}
    tables -= {known.model.get_parameter(name) for name in known.tied.values()}
    multiplied = [weight for weight in known.model.parameters() if weight not in tables]
    weights = sum(weight.numel() for weight in multiplied)
    for layer in known.moe_layers.values():
        unused = layer.experts - layer.top_k
        weights -= layer.parameters // layer.experts * unused
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_width = getattr(config, "qk_head_dim", None) or width
    value_width = getattr(config, "v_head_dim", None) or width
    kinds = getattr(config, "layer_types", None) or [""] * len(known.blocks)
    attending = sum(not re.search("linear|conv", kind) for kind in kinds)
    per_layer = config.num_attention_heads * (key_width + value_width) * seq_len
    return 6 * weights + 6 * attending * per_layer
