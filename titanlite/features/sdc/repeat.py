"""Runs the forward and backward pass of a step twice, and compares the bits on the device.

A hash of 64 bits is taken of this rank's loss, of its gradients, and of the model's buffers.
Gradients are hashed before and after their sum over ranks: replicas must have the same sums.
"""

from __future__ import annotations

import itertools
import os
import socket
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.callbacks import Callback
from titanlite.dist.dist_env import gather_objects
from titanlite.dist.local_parts import bit_sum, plain_local
from titanlite.optim.bad_step_errors import CorruptionError, name_ranks
from titanlite.parallel.fsdp_private import before_reduction

if TYPE_CHECKING:
    from titanlite.trainer import Trainer

#: Names of what is compared; the first two are of this rank alone.
_OWN = (_LOSS, _GRADIENT) = "the loss", "the gradient of "
_SUMMED = "the summed gradient of "
#: How many of them a message has, and how many hosts.
_NAMED = 4


class RepeatedSteps(Callback):
    """Lets the run's `Runner` run twice on checked steps: the first of each start, and those whose
    number `freq` divides.

    Such a step waits for the device. Its update takes the gradients of the second pass.
    """

    def __init__(self, freq: int) -> None:
        self._freq = freq
        self._is_first = True
        #: By parameter: the hash of its gradients before they are summed over ranks. None: no pass
        #: of a checked step is under way.
        self._own: dict[Tensor, Tensor] | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._weights = dict(trainer.parts.model.named_parameters())
        runner: Any = trainer.parts.train_step.runner
        self._run = runner.forward_backward
        runner.forward_backward = self._run_twice
        before_reduction(trainer.parts.model, self._add)

    def _run_twice(self, *arguments: Any) -> Tensor:
        """Raises CorruptionError on all ranks if the two passes of a checked step differ."""
        if self._trainer.step % self._freq and not self._is_first:
            share: Tensor = self._run(*arguments)
            return share
        device = self._trainer.parts.world.device
        state = self._state()
        kept = [tensor.clone() for tensor in state.values()]
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            first = self._hashed(arguments, state)[1]
        self._drop_gradients()
        for tensor, value in zip(state.values(), kept, strict=True):
            tensor.copy_(value)
        share, second = self._hashed(arguments, state)
        differs = torch.stack(list(first.values())) != torch.stack(list(second.values()))
        odd = self._unlike_replicas(second)
        anywhere = (differs | odd).any().int()
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        if anywhere:
            self._drop_gradients()
            wrong = [itertools.compress(first, mask.tolist()) for mask in (differs, odd)]
            self._fail(*map(list, wrong))
        self._is_first = False
        return share

    def _drop_gradients(self) -> None:
        for weight in self._weights.values():
            weight.grad = None

    def _state(self) -> dict[str, Tensor]:
        """Return what else a pass changes: buffers, and the counts of experts."""
        found = {}
        for module_name, module in self._trainer.parts.model.named_modules():
            for name, value in {**module._buffers, **vars(module)}.items():
                if isinstance(value, Tensor):
                    found[f"{module_name}.{name}"] = plain_local(value.detach())
        return found

    def _add(self, weight: Tensor, gradient: Tensor) -> None:
        if self._own is not None:
            # The hash of the micro-batches before; a factor makes their order count.
            before = 3 * self._own[weight] if weight in self._own else 0
            self._own[weight] = bit_sum(plain_local(gradient)) + before

    def _hashed(self, arguments: Any, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a pass's share of the loss, and the hash of each tensor by its name."""
        own = self._own = {}
        share = self._run(*arguments)
        self._own = None
        hashes = {_LOSS: bit_sum(share)}
        for name, weight in self._weights.items():
            if weight in own:
                hashes[_GRADIENT + name] = own[weight]
            if weight.grad is not None:
                kind = _SUMMED if weight in own else _GRADIENT
                hashes[kind + name] = bit_sum(plain_local(weight.grad)).to(share.device)
        return share, hashes | {name: bit_sum(tensor) for name, tensor in state.items()}

    def _unlike_replicas(self, hashes: dict[str, Tensor]) -> Tensor:
        """Return for each hash whether it is of a summed gradient, and at most half of the replicas
        have it.
        """
        values = torch.stack(list(hashes.values()))
        values *= torch.tensor([name.startswith(_SUMMED) for name in hashes], device=values.device)
        group = self._trainer.parts.mesh["dp_replicate"].get_group()
        found = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(found, values, group)
        return (torch.stack(found) == values).sum(0) * 2 <= len(found)

    def _fail(self, names: list[str], odd: list[str]) -> NoReturn:
        """Raise the error, the same on all ranks.

        names: of this rank's hashes that differ. odd: of those that replicas do not have.
        """
        parts = self._trainer.parts
        # A sum over ranks takes the error of one to others.
        own = [name for name in names if name.startswith(_OWN)]
        # Its name in Slurm, which may be another.
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        found = gather_objects((own, names, odd, host, f"{host}, {parts.world.device}"))
        at = next(kind for kind in range(3) if any(one[kind] for one in found))
        ranks = [rank for rank, one in enumerate(found) if one[at]]
        hosts = sorted({found[rank][3] for rank in ranks})
        where = f"{name_ranks(ranks)} ({'; '.join(found[rank][4] for rank in ranks[:_NAMED])})"
        shown = ", ".join(found[ranks[0]][at][:_NAMED])
        how = "a second forward and backward pass gave other bits"
        shared = "Ranks that exchange activations share a fault of one of them"
        if at == 2:
            how = "the gradients of replicas have other bits"
            shared = "Any of them may be wrong: no other value has a majority"
        why = f"{how} on {where}, first in {shown}"
        if len(ranks) > 1:
            why += f". {shared}"
        if self._is_first:
            # Nothing is gained by going back.
            parts.train_step.guard.policy = "stop"
        if self._is_first and at < 2:
            hosts = []
            why += (
                ". Every step may do so where kernels are not deterministic: set "
                "debug.deterministic = true; if bits still differ, a device is broken. "
                "sdc.freq = 0 turns the check off"
            )
        raise CorruptionError(self._trainer.step, why, ranks, hosts)
