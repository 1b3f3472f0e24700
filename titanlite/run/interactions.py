"""Rules that concern two features, each with the reason that made it. No torch here.

A rule about one feature and a key is in that feature's folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.config.errors import Problem
from titanlite.config.rules import around
from titanlite.config.sections import Config
from titanlite.config.toml import quote

if TYPE_CHECKING:
    from titanlite.run.config import RunConfig

_AC_OPTION = "activation_checkpoint.selective_ac_option"
_EP = "parallelism.expert_parallel_degree"
_TP = "training.tensor_parallel_degree"
_CP = "experimental.context_parallel_degree"


def compiles_halves(run: RunConfig) -> bool:
    """Whether `torch.compile` makes two graphs of each block.

    Where ranks share experts, the host reads a number inside a block. Where they share products,
    whole blocks have wrong gradients before torch 2.13. With full recomputation torch cannot divide
    their graph: a device mesh is among the saved tensors. With offload, float8 and asynchronous
    tensor parallelism, whole blocks' gradients are untested.
    """
    ac = run.activation_checkpoint
    if run.mesh.expert > 1:
        return True
    if run.mesh.tensor == 1:
        return False
    untested = ac.offload or run.features.float8 is not None or run.features.async_tp is not None
    divides = ac.by_op or ac.mode == "none"
    if untested or not divides:
        return True
    from importlib.metadata import version

    return version("torch") < "2.13"


def halving_key(run: RunConfig) -> str | None:
    """Return the degree's key that halves compiled blocks; None: they are whole."""
    if not run.compiles_blocks or not compiles_halves(run):
        return None
    return _TP if run.mesh.tensor > 1 else _EP


def needs_whole_backward(d: Config) -> Iterator[tuple[str, str]]:
    """Yield reason and remedy of what excludes schedules that split a backward in two."""
    ac = d.activation_checkpoint
    reshard = d.training.reshard_after_forward
    if d.compiles_blocks:
        reason = "a compiled block has one backward, which would run twice or fail"
        yield reason, 'training.compile = false, or compile.components = ["loss"]'
    if ac.by_op:
        reason = f'{_AC_OPTION} = "op" lets a block be run again only once'
        yield reason, 'activation_checkpoint.mode = "full" or "none"'
    if d.float8.enable_float8_linear:
        reason = "a float8 linear has one backward, which would run twice"
        yield reason, "float8.enable_float8_linear = false"
    if reshard not in ("default", "never"):
        frees = f"training.reshard_after_forward = {quote(reshard)} frees the weights in between"
        remedy = 'training.reshard_after_forward = "default"'
        yield f"{frees}: they would get no gradient", remedy


def needs_whole_groups(d: Config) -> Iterator[str]:
    """Yield the reasons that exclude FSDP groups inside of blocks."""
    if d.compiles_blocks:
        yield "training.compile makes one graph of the block around it"
    if d.activation_checkpoint.by_op:
        # torch matches a block's operators by their order, and the second time weights are gathered
        # at other places.
        yield f'{_AC_OPTION} = "op" runs the block around it again, by operator'
    if d.activation_checkpoint.offload:
        # Weights that stay on the device are listed where the block begins; these are gathered
        # later.
        yield (
            "activation_checkpoint.offload would send its gathered weights to host memory with "
            "the block's"
        )


def uneven_sequences(run: RunConfig) -> Iterator[Problem]:
    """Find sequences that tensor-parallel ranks cannot divide once context parallelism has."""
    tensor, context = run.mesh.tensor, run.mesh.context
    ranks = tensor * context
    for key, length in run.sequence_lengths.items():
        if length % ranks == 0:
            continue
        by = f"{_TP} {tensor}"
        if context > 1:
            by += f" * {_CP} {context}"
        message = f"is {length}, and the sequence is divided over {by} = {ranks} ranks"
        yield Problem("divide", key, message, f"these work: {around(length, ranks)}")
