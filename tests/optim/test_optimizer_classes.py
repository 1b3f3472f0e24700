"""`optimizer.name` with a class of optimizers: torch's own, and one in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.checkpoints import two_and_two
from tests.support.harness import Run, batches, full_precision
from tests.support.pool import Pools
from titanlite.config.errors import ConfigError
from titanlite.config.load import load
from titanlite.config.model_sections import Optimizer, OptimizerGroup
from titanlite.config.own_functions import load_functions
from titanlite.optim.optimizer import build_optimizer, gated_step
from titanlite.utils import logger

CPU = torch.device("cpu")
OWN = '''
import torch


class Decayed(torch.optim.SGD):
    """Has the arguments of SGD, and one more."""

    def __init__(self, params, lr, power, momentum=0.0):
        super().__init__(params, lr=lr / power, momentum=momentum)


class Inherits(Decayed):
    pass


class WithSettings(torch.optim.AdamW):
    def __init__(self, parameters, settings, device):
        super().__init__(parameters.values(), lr=settings.lr, weight_decay=settings.weight_decay)
'''


def parameters() -> dict[str, nn.Parameter]:
    """Return a matrix and a vector, the same at each call."""
    values = torch.Generator().manual_seed(0)
    return {
        "layers.0.w": nn.Parameter(torch.randn(4, 3, generator=values)),
        "norm.weight": nn.Parameter(torch.randn(3, generator=values)),
    }


def follow(
    optimizer: torch.optim.Optimizer, held: dict[str, nn.Parameter], rates: list[float], gated: bool
) -> None:
    """Take a step at each rate, with gradients from a seed; `gated`: hold one back between
    any two.
    """
    values = torch.Generator().manual_seed(1)
    for rate in rates:
        if gated:
            for parameter in held.values():
                parameter.grad = torch.full_like(parameter, torch.nan)
            gated_step(optimizer, torch.tensor(False), rate)
        for parameter in held.values():
            parameter.grad = torch.randn(parameter.shape, generator=values)
        if gated:
            gated_step(optimizer, torch.tensor(True), rate)
        else:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("scale", 1.0)
            optimizer.step()


def test_a_class_gets_the_rate_its_arguments_and_the_groups() -> None:
    ours = parameters()
    theirs = parameters()
    groups = [OptimizerGroup(pattern="norm", lr=5e-3, weight_decay=0.25)]
    settings = Optimizer(
        name="torch.optim:SGD",
        lr=1e-2,
        args={"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        groups=groups,
    )
    optimizer = build_optimizer(ours, settings, CPU)
    assert type(optimizer) is torch.optim.SGD
    reference = torch.optim.SGD(
        [
            {"params": [theirs["layers.0.w"]]},
            {"params": [theirs["norm.weight"]], "weight_decay": 0.25, "scale": 0.5},
        ],
        lr=1e-2,
        momentum=0.9,
        nesterov=True,
        weight_decay=0.1,
    )
    rates = [1e-2, 5e-3, 2e-3]
    follow(optimizer, ours, rates, gated=True)
    follow(reference, theirs, rates, gated=False)
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name


def test_two_and_two_steps_equal_four(pool: Pools, tmp_path: Path) -> None:
    args = {"betas": [0.9, 0.99], "decoupled_weight_decay": True}
    settings = Optimizer(name="torch.optim:NAdam", args=args, no_decay_on_norms=True)
    run = Run(*batches(4, 8, 16, 192), [3e-3] * 4, training=full_precision(), settings=settings)
    straight = two_and_two(pool, run, tmp_path)
    assert len(set(straight["losses"])) == 4


def refused(*flags: str) -> str:
    """Return the report of a config whose functions are refused when they are imported."""
    with pytest.raises(ConfigError, match="optimizer.name") as error:
        load_functions(load(flags))
    return str(error.value)


def test_arguments_are_compared_with_the_class_before_work(tmp_path: Path) -> None:
    sgd = "--optimizer.name=torch.optim.SGD"
    assert load([sgd, "--optimizer.args.momentum=0.9"]).value("optimizer.name") == "torch.optim:SGD"
    assert "unexpected keyword argument 'momentun'" in refused(sgd, "--optimizer.args.momentun=0.9")
    assert "multiple values for keyword argument 'lr'" in refused(sgd, "--optimizer.args.lr=1")
    (tmp_path / "own.py").write_text(OWN)
    own = f"--optimizer.name={tmp_path}/own.py"
    assert "missing a required argument: 'power'" in refused(f"{own}:Decayed")
    assert "missing a required argument: 'power'" in refused(f"{own}:Inherits")
    load_functions(load([f"{own}:Inherits", "--optimizer.args.power=2"]))
    load_functions(load([f"{own}:WithSettings"]))


def test_settings_that_a_class_does_not_get_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    flags = ["--optimizer.weight_decay=0.1", "--optimizer.beta1=0.8"]
    load_functions(load(["--optimizer.name=torch.optim.SGD", *flags]))
    assert caplog.messages == [
        "optimizer.weight_decay, beta1: a class of optimizers gets lr and [optimizer.args] alone"
    ]
    caplog.clear()
    (tmp_path / "own.py").write_text(OWN)
    load_functions(load([f"--optimizer.name={tmp_path}/own.py:WithSettings", *flags]))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer.name=torch.optim:LBFGS"], "its step needs a closure"),
        (["--optimizer.name=torch.optim:Nonsense"], "has no Nonsense"),
    ],
)
def test_classes_that_cannot_train_are_refused_before_work(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match="optimizer.name") as error:
        load_functions(load(flags))
    assert message in str(error.value)


def test_values_that_a_class_refuses_are_config_errors() -> None:
    wrong = Optimizer(name="torch.optim:SGD", args={"momentum": -1.0})
    with pytest.raises(
        ConfigError, match="optimizer.args: 'torch.optim:SGD' refuses them: Invalid momentum value"
    ):
        build_optimizer(parameters(), wrong, CPU)
    groups = [OptimizerGroup(pattern="norm", beta1=0.5)]
    with pytest.raises(ConfigError, match="'torch.optim:SGD' knows no betas"):
        build_optimizer(parameters(), Optimizer(name="torch.optim:SGD", groups=groups), CPU)


def test_a_class_that_takes_the_section_is_called_as_a_function(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    settings = Optimizer(name=f"{tmp_path}/own.py:WithSettings", lr=3e-4, weight_decay=0.7)
    (group,) = build_optimizer(parameters(), settings, CPU).param_groups
    assert (group["lr"], group["weight_decay"], len(group["params"])) == (3e-4, 0.7, 2)
