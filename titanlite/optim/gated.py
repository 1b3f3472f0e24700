"""The base of titanlite's optimizers: a flag on the device holds a step back without the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from titanlite.dist.local_parts import local


class GatedOptimizer(torch.optim.Optimizer):
    """Subclasses change the parameters of a group in `update`, and write every change with `store`.

    The state is sharded as the parameters, so checkpoints load on any mesh. Updates work on local
    parts.
    """

    #: torch's protocol for gradient scalers: `step` does nothing where the tensor `found_inf` is
    #: set, and divides gradients by the tensor `grad_scale`, if there is one.
    _step_supports_amp_scaling = True
    found_inf: torch.Tensor | None = None

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, {**defaults, "fused": True})

    def update(self, group: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
        """Change `parameters`, those of the group that have gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """closure: not supported, as the losses are gone when titanlite steps."""
        if closure is not None:
            raise ValueError("titanlite's optimizers take no closure")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.store(state["step"], state["step"] + 1)
            self.update(group, parameters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the dtypes of the state: torch casts it to that of the parameters."""
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            state = state_dict["state"].get(key, {})
            self.state[parameter].update(
                {name: value.to(parameter.device) for name, value in state.items()}
            )

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return this rank's part of a gradient in float32."""
        assert parameter.grad is not None
        gradient, scale = local(parameter.grad).float(), getattr(self, "grad_scale", None)
        return gradient if scale is None else gradient / scale

    def store(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Write `value` into the local tensor `target`, in its dtype, unless this step is held
        back.
        """
        if self.found_inf is None:
            target.copy_(value)
        else:
            value = value.to(target.dtype)
            torch.where(self.found_inf.bool(), target, value, out=target)

    def buffer(self, parameter: torch.nn.Parameter, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the local part of a state tensor shaped as the parameter, of zeros at first."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=dtype)
        return local(state[name])
