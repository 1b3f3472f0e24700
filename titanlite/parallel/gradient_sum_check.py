"""Whether a model's gradients are summed over ranks, as `titanlite.step.TrainStep` needs them."""

from __future__ import annotations

from torch import nn

from titanlite.dist import ParallelismError
from titanlite.dist.local_parts import parts_of
from titanlite.parallel.fsdp_private import parameter_groups, ranks_of
from titanlite.utils import counted


def check_summed(model: nn.Module, ranks: int) -> None:
    """Raise ParallelismError unless gradients are summed over so many ranks with other tokens."""
    groups = [group for part in parts_of(model) for group in parameter_groups(part)]
    sharded = {one.sharded_param for group in groups for one in group.fsdp_params}
    call = "call apply_fsdp(model, groups, mesh) before the optimizer is made, in place of"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in sharded:
            raise ParallelismError(
                f"gradients of {name} are not summed over ranks: {call} DistributedDataParallel"
            )
    # Experts may be divided over other ranks before.
    widest = max((ranks_of(group) for group in groups), default=ranks)
    if widest != ranks:
        raise ParallelismError(
            f"gradients are summed over {counted(widest, 'ranks')}, and {ranks} have tokens of "
            "their own by `factors`: give the ReplicationFactors of tensor and pipeline parallelism"
        )
    if any(group.gradient_divide_factor is None and ranks_of(group) > 1 for group in groups):
        raise ParallelismError(
            f"gradients are averaged over ranks, and a step needs their sum: {call} fully_shard, "
            "without average = True"
        )
