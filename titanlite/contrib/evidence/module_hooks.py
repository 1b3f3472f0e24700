"""Keeps what the modules of a model compute. As a script it is torchtitan's side of `titanlite
parity`: Python of another environment runs it, so it imports nothing of titanlite.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

JOB = "job.pt"
RESULT = "result.pt"


class Trace(NamedTuple):
    """The results of one program for a batch."""

    #: Module → the tensors that it returns, and with ", input" those that it gets, in the order of
    #: the forward pass.
    activations: dict[str, list[Tensor]]
    loss: Tensor
    #: Parameter → its gradient.
    gradients: dict[str, Tensor]


def trace(
    model: nn.Module, loss_of: Callable[[], Tensor], names: Mapping[str, str] | None = None
) -> Trace:
    """Run a forward and a backward pass.

    names: module → its name in the trace; None: all, as they are.
    """
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, *values: Any) -> None:
        # Llama 4 adds to its results in place.
        found[name] = [value.detach().clone() for value in values if isinstance(value, Tensor)]

    for name, module in model.named_modules():
        if kept := name if names is None else names.get(name):
            module.register_forward_pre_hook(
                lambda _, given, more, kept=kept: keep(f"{kept}, input", *given, *more.values()),
                with_kwargs=True,
            )
            module.register_forward_hook(
                lambda _, given, result, kept=kept: keep(
                    kept, *(result if isinstance(result, tuple) else [result])
                )
            )
    loss = loss_of()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Trace(found, loss.detach(), gradients)


def main(folder: Path) -> None:
    """Compute the batch in `JOB` by torchtitan's Llama 3, and write `RESULT`."""
    # Experts need triton, which machines without a GPU lack.
    kernels: Any = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules[kernels.__name__] = kernels
    from torchtitan.models.llama3 import Llama3StateDictAdapter, Transformer, TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs

    shape, scaling, weights, tokens = torch.load(folder / JOB)
    args = TransformerModelArgs(**shape, rope_scaling_args=RoPEScalingArgs(*scaling))
    model = Transformer(args)
    adapter = Llama3StateDictAdapter(args, None)
    model.load_state_dict(adapter.from_hf(weights))

    def loss_of() -> Tensor:
        logits = model(tokens)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    found = trace(model, loss_of)
    for name, tensors in found.activations.items():
        # It rotates neighbours, where titanlite and Hugging Face rotate halves.
        if name.endswith((".wq", ".wk", ".inner_attention, input")):
            pairs = (-1, args.dim // args.n_heads // 2, 2)
            tensors[:] = [one.unflatten(-1, pairs).mT.flatten(-3) for one in tensors]
    torch.save((found.activations, found.loss, adapter.to_hf(found.gradients)), folder / RESULT)
    print(version("torchtitan"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
