"""The optimizer's step in the backward (`optimizer.early_step_in_backward`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from titanlite.optim.gradients import square_sum
from titanlite.optim.optimizer import set_rates


class StepInBackward:
    """Steps `optimizer` inside of `at(lr)`: each parameter as soon as its gradient is reduced.

    Gradients are freed at once, so those of one FSDP group exist at a time. In return there is no
    clipping by the global norm and no accumulation, and the guard sees a bad step after it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._active = False
        self._squares: list[torch.Tensor] = []
        #: Parameter → place of its group: a load of the optimizer's state makes new groups.
        self._group_of: dict[int, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            self._group_of.update((id(parameter), index) for parameter in group["params"])
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._step)

    @contextmanager
    def at(self, lr: float, before_update: Callable[[], object]) -> Iterator[None]:
        """Update parameters during the one backward inside. before_update: is called at once."""
        before_update()
        set_rates(self._optimizer, lr)
        self._squares = []
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def square_sum(self, device: torch.device) -> torch.Tensor:
        """Return this rank's share for the latest gradients, as `gradients.square_sum`."""
        return torch.stack(self._squares).to(device).sum()

    def _step(self, parameter: torch.Tensor) -> None:
        if not self._active:
            return
        assert isinstance(parameter, nn.Parameter)
        self._squares.append(square_sum([parameter], parameter.device))
        groups = self._optimizer.param_groups
        index = self._group_of.get(id(parameter))
        if index is not None:
            self._optimizer.param_groups = [{**groups[index], "params": [parameter]}]
            try:
                self._optimizer.step()
            finally:
                self._optimizer.param_groups = groups
        parameter.grad = None
